// SPDX-License-Identifier: Apache-2.0
// The list of tasks: what each is called, where its files are looked for, how a user gets them and which options it
// takes. An option that a task has no use for is refused, not ignored. A limit is applied after a task was read and
// checked whole, so that it changes neither vocabulary nor verdict.
#include "train/data.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "gradwire/error.h"
#include "train/loaders.h"

namespace gradwire::train {
namespace {

struct TaskEntry {
  std::string name;
  std::string directory;  // where it is unless the user says
  std::vector<std::string> folders;
  std::string advice;
  int64_t length, vocabulary;  // defaults of text; 0: has none
};

const std::vector<TaskEntry>& entries() {
  static const std::vector<TaskEntry> all = {
      {"fashion-mnist",
       "/usr/share/datasets/fashion-mnist",
       {"FashionMNIST/raw"},
       "Debian's package dataset-fashion-mnist installs it, and elsewhere the data directory is one with the four idx "
       "files that Zalando Research publishes",
       0,
       0},
      {"mnist",
       "",
       {"MNIST/raw"},
       "the data directory is one with the four idx files of MNIST as LeCun, Cortes and Burges publish them, gzip or "
       "plain",
       0,
       0},
      {"cifar10",
       "",
       {"cifar-10-batches-bin"},
       "the data directory is what the archive of CIFAR-10's binary version, published by Krizhevsky, unpacks to",
       0,
       0},
      {"cifar100",
       "",
       {"cifar-100-binary"},
       "the data directory is what the archive of CIFAR-100's binary version, published by Krizhevsky, unpacks to",
       0,
       0},
      {"ag-news",
       "",
       {"ag_news_csv"},
       "the data directory is one with train.csv and test.csv of AG-News as Zhang, Zhao and LeCun publish them "
       "(ag_news_csv)",
       64,
       20'000},
      {"text",
       "",
       {},
       "the data path is a plain text file, or a directory with a train and a test or valid file, such as WikiText-2 "
       "unpacks to",
       128,
       50'000},
  };
  return all;
}

// An option's value, or its default; refused where the task does not take it or it is out of range.
int64_t choose(const char* option, int64_t given, int64_t fallback, int64_t low, int64_t high, bool taken,
               const std::string& why_not) {
  if (given == 0) return fallback;
  if (!taken) throw Error(ErrorKind::usage, fmt::format("{} is {}; {}", option, given, why_not), option);
  if (given < low || given > high)
    throw Error(ErrorKind::usage, fmt::format("{} is {}; allowed is {} to {}", option, given, low, high), option);
  return given;
}

void limit(Samples& samples, uint64_t most) {
  if (most == 0 || most >= samples.count) return;
  const auto cut = [&](auto& values) { values.resize(values.size() / samples.count * most); };
  cut(samples.pixels);
  cut(samples.tokens);
  cut(samples.labels);
  samples.count = most;
}

}  // namespace

const std::vector<std::string>& task_names() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> all;
    for (const TaskEntry& entry : entries()) all.push_back(entry.name);
    return all;
  }();
  return names;
}

Task load_task(const std::string& name, const TaskOptions& options) {
  const auto entry =
      std::find_if(entries().begin(), entries().end(), [&](const TaskEntry& e) { return e.name == name; });
  if (entry == entries().end())
    throw Error(ErrorKind::usage, fmt::format("task is '{}'; known are {}", name, fmt::join(task_names(), ", ")),
                "task");
  const bool text = name == "text", has_text = entry->length > 0;
  if (options.words && !text)
    throw Error(ErrorKind::usage, fmt::format("words is set; only the task text takes it, not {}", name), "words");
  const int64_t length = choose("length", options.length, entry->length, 1, 65'536, has_text,
                                fmt::format("{} has images, not text", name));
  const int64_t vocabulary =
      choose("vocabulary", options.vocabulary, entry->vocabulary, 3, 10'000'000, has_text && (!text || options.words),
             text ? "characters have a vocabulary of their own, it is for words"
                  : fmt::format("{} has images, not text", name));

  const DataPlace place{options.directory.empty() ? entry->directory : options.directory, entry->folders,
                        entry->advice};
  if (place.directory.empty())
    throw Error(ErrorKind::usage, fmt::format("data is not given; {} needs it: {}", name, entry->advice), "data");
  Task task = text                        ? load_text(place, length, vocabulary, options.words)
              : has_text                  ? load_ag_news(place, length, vocabulary)
              : name.starts_with("cifar") ? load_cifar(name, place)
                                          : load_idx(name, place);
  limit(task.train, options.limit);
  limit(task.test, options.limit);
  return task;
}

void Vocabulary::close() {
  std::vector<std::pair<std::string_view, uint64_t>> words(counts_.begin(), counts_.end());
  std::sort(words.begin(), words.end(), [](const auto& a, const auto& b) {
    return a.second != b.second ? a.second > b.second : a.first < b.first;
  });
  for (const auto& [word, times] : words) {
    if (size() >= size_) break;
    numbers_.emplace(word, static_cast<int32_t>(size()));
  }
}

}  // namespace gradwire::train
