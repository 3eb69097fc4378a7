// SPDX-License-Identifier: Apache-2.0
// The loaders, one per family of file formats, and what the two that read words share: a Vocabulary numbers words.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "train/data.h"
#include "train/files.h"

namespace gradwire::train {

Task load_idx(const std::string& name, const DataPlace& place);
Task load_cifar(const std::string& name, const DataPlace& place);
Task load_ag_news(const DataPlace& place, int64_t length, int64_t vocabulary);
Task load_text(const DataPlace& place, int64_t length, int64_t vocabulary, bool words);

// Words by number. The first numbers are reserved (one of them means "unknown"); then come the words that were counted,
// the frequent first, ties in the order of their bytes, until the vocabulary is full.
class Vocabulary {
 public:
  Vocabulary(int32_t reserved, int32_t unknown, int64_t size) : reserved_(reserved), unknown_(unknown), size_(size) {}
  void count(std::string_view word) { ++counts_[word]; }  // the text must outlive the vocabulary
  void close();                                           // all are counted: numbers are given
  int32_t number(std::string_view word) const {
    const auto found = numbers_.find(word);
    return found == numbers_.end() ? unknown_ : found->second;
  }
  int64_t size() const { return reserved_ + static_cast<int64_t>(numbers_.size()); }

 private:
  int32_t reserved_, unknown_;
  int64_t size_;
  std::unordered_map<std::string_view, uint64_t> counts_;
  std::unordered_map<std::string_view, int32_t> numbers_;
};

}  // namespace gradwire::train
