// SPDX-License-Identifier: Apache-2.0
// AG-News as its authors publish it: rows of class (1 to 4), title and description, separated by commas. A field in
// quotes may hold commas, line ends and, doubled, quotes. A backslash escapes nothing (rows end in `\"`): the published
// file has it where a line ended, so it separates words like any other sign. A header row, which some copies have, is
// skipped.
//
// A word is a run of letters, digits and bytes above 127, in lower case; what is left of HTML entities (#39; &lt; ...)
// is no word. Number 0 is padding, 1 any word outside the vocabulary, which is the most frequent words of the training
// rows.
#include <fmt/format.h>

#include <algorithm>

#include "train/loaders.h"

namespace gradwire::train {
namespace {

constexpr int32_t kUnknownWord = 1, kReservedWords = 2;
constexpr int kTopics = 4;

struct Row {
  int32_t label;     // from 0
  std::string text;  // title and description
};

// Splits a file into rows of fields, and remembers on which line a row began.
class Csv {
 public:
  Csv(const DataPlace& place, const std::string& path)
      : place_(place), path_(path), bytes_(read_file(place, path, kMostFileBytes)) {}

  uint64_t line() const { return first_line_; }

  // False at the end. Blank lines are no rows.
  bool next(std::vector<std::string>& fields) {
    while (at_ < bytes_.size() && (peek() == '\n' || peek() == '\r')) take();
    if (at_ == bytes_.size()) return false;
    first_line_ = line_;
    fields.clear();
    while (true) {
      fields.push_back(field());
      if (at_ == bytes_.size()) return true;
      const char separator = take();
      if (separator == '\n') return true;
    }
  }

  [[noreturn]] void refuse(const std::string& field, const std::string& found, const std::string& expected) const {
    damaged(place_, path_, field, fmt::format("{} on line {}", found, first_line_), expected);
  }

 private:
  char peek() const { return static_cast<char>(bytes_[at_]); }
  char take() {
    const char c = peek();
    line_ += c == '\n';
    ++at_;
    return c;
  }

  std::string field() {
    std::string text;
    if (at_ < bytes_.size() && peek() == '"') {
      take();
      while (true) {
        if (at_ == bytes_.size()) refuse("quote", "open to the end of the file", "a closing quote");
        const char c = take();
        if (c != '"')
          text += c;
        else if (at_ < bytes_.size() && peek() == '"')
          text += take();
        else
          break;
      }
    } else {
      while (at_ < bytes_.size() && peek() != ',' && peek() != '\n' && peek() != '\r') text += take();
    }
    if (at_ < bytes_.size() && peek() == '\r') take();
    if (at_ < bytes_.size() && peek() != ',' && peek() != '\n')
      refuse("quote", "closed inside a field", "a comma or the end of the row after a closing quote");
    return text;
  }

  const DataPlace& place_;
  std::string path_;
  std::vector<uint8_t> bytes_;
  size_t at_ = 0;
  uint64_t line_ = 1, first_line_ = 1;
};

std::vector<Row> read_rows(const DataPlace& place, const std::string& name) {
  const std::string path = find_file(place, {name});
  Csv csv(place, path);
  std::vector<Row> rows;
  std::vector<std::string> fields;
  while (csv.next(fields)) {
    if (fields.size() != 3) csv.refuse("columns", std::to_string(fields.size()), "3: class, title, description");
    if (csv.line() == 1 && fields[0] == "Class Index") continue;
    const std::string& label = fields[0];
    if (label.size() != 1 || label[0] < '1' || label[0] > '0' + kTopics)
      csv.refuse("class", fmt::format("'{}'", label.substr(0, 20)), fmt::format("1 to {}", kTopics));
    rows.push_back({label[0] - '1', fields[1] + ' ' + fields[2]});
  }
  if (rows.empty()) damaged(place, path, "size", "0 rows", "at least one");
  return rows;
}

bool in_word(char c) { return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || static_cast<unsigned char>(c) > 127; }

// The length of an entity at the front of the text (#39; &lt; &#36;), or 0.
size_t entity(std::string_view text) {
  if (text[0] != '#' && text[0] != '&') return 0;
  size_t end = 1;
  while (end < text.size() && end < 8 && (in_word(text[end]) || text[end] == '#')) ++end;
  return end > 1 && end < text.size() && text[end] == ';' ? end + 1 : 0;
}

// Calls `use` with each word of a text in lower case, until it says that it has enough.
template <class Use>
void each_word(std::string_view text, Use use) {
  for (size_t i = 0; i < text.size();) {
    if (const size_t skip = entity(text.substr(i))) {
      i += skip;
      continue;
    }
    size_t end = i;
    while (end < text.size() && in_word(text[end])) ++end;
    if (end > i && !use(text.substr(i, end - i))) return;
    i = std::max(end, i + 1);
  }
}

void lower(std::vector<Row>& rows) {
  for (Row& row : rows)
    for (char& c : row.text)
      if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
}

Samples number(const std::vector<Row>& rows, const Vocabulary& vocabulary, int64_t length) {
  Samples samples;
  samples.count = rows.size();
  samples.shape = {length};
  samples.tokens.assign(rows.size() * static_cast<size_t>(length), 0);
  for (size_t r = 0; r < rows.size(); ++r) {
    int32_t* out = samples.tokens.data() + r * static_cast<size_t>(length);
    int32_t* const end = out + length;
    each_word(rows[r].text, [&](std::string_view word) {
      *out++ = vocabulary.number(word);
      return out < end;
    });
    samples.labels.push_back(rows[r].label);
  }
  return samples;
}

}  // namespace

Task load_ag_news(const DataPlace& place, int64_t length, int64_t vocabulary) {
  std::vector<Row> train = read_rows(place, "train.csv"), test = read_rows(place, "test.csv");
  lower(train);
  lower(test);
  Vocabulary words(kReservedWords, kUnknownWord, vocabulary);
  for (const Row& row : train)
    each_word(row.text, [&](std::string_view word) {
      words.count(word);
      return true;
    });
  words.close();
  Task task;
  task.name = "ag-news";
  task.train = number(train, words, length);
  task.test = number(test, words, length);
  task.classes = kTopics;
  task.vocabulary = words.size();
  return task;
}

}  // namespace gradwire::train
