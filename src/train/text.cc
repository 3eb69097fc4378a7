// SPDX-License-Identifier: Apache-2.0
// Plain text for language models. One file, whose last tenth is the test part; or a directory with files that have
// "train" and "test" (or "valid") in their names. Tokens are characters (bytes), or words: what stands between white
// space, and the end of a line as a word of its own. The vocabulary is that of the training part; number 0 is whatever
// it does not hold, so a test part may surprise. With words, 1 is the end of a line and `<unk>` in the text is number
// 0.
//
// A sample is a window of `length` tokens, and its labels are the same window one token later. Windows do not overlap;
// what is left at the end of a part is not used.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <filesystem>

#include "train/loaders.h"

namespace gradwire::train {
namespace {

constexpr int32_t kUnknownToken = 0, kLineEnd = 1, kWordsReserved = 2;

std::string_view view(const std::vector<uint8_t>& bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

// The one file of a directory whose name has this part; empty without one. What is named for training is never a test
// part ("latest-train.txt").
std::string file_named(const DataPlace& place, const std::string& part) {
  std::vector<std::string> found;
  std::error_code error;
  for (std::filesystem::directory_iterator entry(place.directory, error), end; !error && entry != end;
       entry.increment(error)) {
    std::string name = entry->path().filename().string();
    std::transform(name.begin(), name.end(), name.begin(),
                   [](char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c + 32) : c; });
    std::error_code unknown;
    const bool meant =
        name.find(part) != std::string::npos && (part == "train" || name.find("train") == std::string::npos);
    if (meant && entry->is_regular_file(unknown)) found.push_back(entry->path().string());
  }
  if (error) unreadable(place, place.directory, error.message());
  std::sort(found.begin(), found.end());
  if (found.size() > 1)
    damaged(place, place.directory, "files", fmt::format("{} ({})", found.size(), fmt::join(found, ", ")),
            fmt::format("one with '{}' in its name", part));
  return found.empty() ? std::string{} : found.front();
}

// The words; a line end is the word "\n".
std::vector<std::string_view> split(std::string_view text) {
  std::vector<std::string_view> words;
  constexpr std::string_view kWhite = " \t\r\v\f\n";
  for (size_t i = 0; i < text.size();) {
    if (text[i] == '\n') words.push_back(text.substr(i, 1));
    if (kWhite.find(text[i]) != std::string_view::npos) {
      ++i;
      continue;
    }
    const size_t end = std::min(text.find_first_of(kWhite, i), text.size());
    words.push_back(text.substr(i, end - i));
    i = end;
  }
  return words;
}

Samples windows(const DataPlace& place, const std::string& path, const std::vector<int32_t>& tokens, int64_t length) {
  const auto each = static_cast<uint64_t>(length);
  if (tokens.size() <= each)
    damaged(place, path, "length", fmt::format("{} tokens", tokens.size()),
            fmt::format("at least {}: a sample and the token after it", each + 1));
  Samples samples;
  samples.count = (tokens.size() - 1) / each;
  samples.shape = {length};
  samples.labels_each = each;
  const auto used = static_cast<std::ptrdiff_t>(samples.count * each);
  samples.tokens.assign(tokens.begin(), tokens.begin() + used);
  samples.labels.assign(tokens.begin() + 1, tokens.begin() + 1 + used);
  return samples;
}

// Numbers the train part, then the test part by the same vocabulary.
struct Numbered {
  std::vector<int32_t> train, test;
  int64_t vocabulary = 0;
};

Numbered by_characters(std::string_view train, std::string_view test) {
  std::array<int32_t, 256> number{};
  for (const char c : train) number[static_cast<unsigned char>(c)] = 1;
  int32_t next = kUnknownToken + 1;
  for (int32_t& n : number) n = n ? next++ : kUnknownToken;
  Numbered out;
  out.vocabulary = next;
  for (const char c : train) out.train.push_back(number[static_cast<unsigned char>(c)]);
  for (const char c : test) out.test.push_back(number[static_cast<unsigned char>(c)]);
  return out;
}

Numbered by_words(std::span<const std::string_view> train, std::span<const std::string_view> test, int64_t size) {
  constexpr std::string_view kLine = "\n", kWritten = "<unk>";
  Vocabulary vocabulary(kWordsReserved, kUnknownToken, size);
  for (const std::string_view word : train)
    if (word != kLine && word != kWritten) vocabulary.count(word);
  vocabulary.close();
  const auto number = [&](std::span<const std::string_view> words) {
    std::vector<int32_t> tokens;
    tokens.reserve(words.size());
    for (const std::string_view word : words) tokens.push_back(word == kLine ? kLineEnd : vocabulary.number(word));
    return tokens;
  };
  return {number(train), number(test), vocabulary.size()};
}

}  // namespace

Task load_text(const DataPlace& place, int64_t length, int64_t vocabulary, bool words) {
  std::error_code error;
  const bool one = !std::filesystem::is_directory(place.directory, error);
  std::string train_path = place.directory, test_path = place.directory;
  if (!one) {
    train_path = file_named(place, "train");
    if (train_path.empty()) missing(place, place.directory, "a file with 'train' in its name");
    test_path = file_named(place, "test");
    if (test_path.empty()) test_path = file_named(place, "valid");
    if (test_path.empty()) missing(place, place.directory, "a file with 'test' or 'valid' in its name");
  }
  const std::vector<uint8_t> train_bytes = read_file(place, train_path, kMostFileBytes);
  const std::vector<uint8_t> test_bytes = one ? std::vector<uint8_t>{} : read_file(place, test_path, kMostFileBytes);

  Numbered tokens;
  if (words) {
    const std::vector<std::string_view> train = split(view(train_bytes)), test = split(view(test_bytes));
    const std::span<const std::string_view> all(train);
    const size_t cut = one ? train.size() - train.size() / 10 : train.size();
    tokens = by_words(all.first(cut), one ? all.subspan(cut) : std::span(test), vocabulary);
  } else {
    const std::string_view train = view(train_bytes);
    const size_t cut = one ? train.size() - train.size() / 10 : train.size();
    tokens = by_characters(train.substr(0, cut), one ? train.substr(cut) : view(test_bytes));
  }
  Task task;
  task.name = "text";
  task.train = windows(place, train_path + (one ? " (the first nine tenths)" : ""), tokens.train, length);
  task.test = windows(place, test_path + (one ? " (the last tenth)" : ""), tokens.test, length);
  task.classes = task.vocabulary = tokens.vocabulary;
  return task;
}

}  // namespace gradwire::train
