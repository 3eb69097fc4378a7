// SPDX-License-Identifier: Apache-2.0
// What the loaders of data sets promise: small files made here read as what was written into them, and each kind of
// damage is refused with an error that names the file, what was found, what was expected and how to get the data. The
// order of an epoch and augmentation are functions that another program can repeat.
#include "train/data.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>
#include <zlib.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <set>

#include "core/bits.h"
#include "gradwire/error.h"

namespace gradwire::train {
namespace {

namespace fs = std::filesystem;
constexpr uint64_t kImage = 28 * 28;

class DataTest : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ =
        fs::path(::testing::TempDir()) /
        fmt::format("gradwire_data_{}_{}", ::getpid(), ::testing::UnitTest::GetInstance()->current_test_info()->name());
    fs::create_directories(folder_);
  }
  void TearDown() override { fs::remove_all(folder_); }

  std::string path(const std::string& name) const { return (folder_ / name).string(); }
  TaskOptions options() const { return {.directory = folder_.string()}; }

  void write(const std::string& name, const std::string& bytes) const {
    fs::create_directories(fs::path(path(name)).parent_path());
    std::ofstream(path(name), std::ios::binary) << bytes;
  }
  void write_gzip(const std::string& name, const std::string& bytes) const {
    gzFile file = ::gzopen(path(name).c_str(), "wb");
    ASSERT_EQ(::gzwrite(file, bytes.data(), static_cast<unsigned>(bytes.size())), static_cast<int>(bytes.size()));
    ASSERT_EQ(::gzclose(file), Z_OK);
  }
  std::string bytes_of(const std::string& name) const {
    std::ifstream file(path(name), std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }

  // The task is refused with this kind and field, and with a message that holds all of `parts`.
  void refused(const std::string& task, const TaskOptions& with, ErrorKind kind, const std::string& field,
               const std::vector<std::string>& parts) const {
    SCOPED_TRACE(task + " " + field);
    try {
      load_task(task, with);
      ADD_FAILURE() << "was accepted";
    } catch (const Error& error) {
      const std::string message = error.what();
      EXPECT_EQ(error.kind(), kind) << message;
      EXPECT_EQ(error.field(), field) << message;
      for (const std::string& part : parts)
        EXPECT_NE(message.find(part), std::string::npos) << message << "\nlacks " << part;
      EXPECT_EQ(message.find('\n'), std::string::npos) << message;
    }
  }

  fs::path folder_;
};

std::string word(uint32_t x) {
  return {static_cast<char>(x >> 24), static_cast<char>(x >> 16), static_cast<char>(x >> 8), static_cast<char>(x)};
}

std::string pixels(uint64_t count, uint64_t each, int salt) {
  std::string out(count * each, 0);
  for (size_t i = 0; i < out.size(); ++i) out[i] = static_cast<char>(mix64(i + static_cast<size_t>(salt) * 1'000'003));
  return out;
}
std::string idx_images(uint32_t count, int salt) {
  return word(0x803) + word(count) + word(28) + word(28) + pixels(count, kImage, salt);
}
std::string idx_labels(uint32_t count) {
  std::string out = word(0x801) + word(count);
  for (uint32_t i = 0; i < count; ++i) out += static_cast<char>(i % 10);
  return out;
}

class IdxTest : public DataTest {
 protected:
  void SetUp() override {
    DataTest::SetUp();
    write_gzip("train-images-idx3-ubyte.gz", idx_images(30, 1));
    write_gzip("train-labels-idx1-ubyte.gz", idx_labels(30));
    write("t10k-images-idx3-ubyte", idx_images(7, 2));
    write("t10k-labels-idx1-ubyte", idx_labels(7));
  }
};

TEST_F(IdxTest, GzipAndPlainFilesGiveWhatWasWritten) {
  for (const char* name : {"mnist", "fashion-mnist"}) {
    const Task task = load_task(name, options());
    EXPECT_EQ(task.name, name);
    EXPECT_EQ(task.classes, 10);
    EXPECT_EQ(task.vocabulary, 0);
    EXPECT_EQ(task.train.count, 30u);
    EXPECT_EQ(task.test.count, 7u);
    EXPECT_EQ(task.train.shape, (std::vector<int64_t>{1, 28, 28}));
    const std::string train = pixels(30, kImage, 1), test = pixels(7, kImage, 2);
    EXPECT_TRUE(std::equal(train.begin(), train.end(), task.train.pixels.begin(), task.train.pixels.end(),
                           [](char a, uint8_t b) { return static_cast<uint8_t>(a) == b; }));
    EXPECT_TRUE(std::equal(test.begin(), test.end(), task.test.pixels.begin(), task.test.pixels.end(),
                           [](char a, uint8_t b) { return static_cast<uint8_t>(a) == b; }));
    for (size_t i = 0; i < 30; ++i) EXPECT_EQ(task.train.labels[i], static_cast<int32_t>(i % 10));
    ASSERT_EQ(task.mean.size(), 1u);
    ASSERT_EQ(task.deviation.size(), 1u);
    EXPECT_FALSE(task.crops || task.flips);
  }
}

TEST_F(IdxTest, ALimitKeepsTheFirstSamples) {
  TaskOptions with = options();
  with.limit = 10;
  const Task all = load_task("mnist", options()), some = load_task("mnist", with);
  EXPECT_EQ(some.train.count, 10u);
  EXPECT_EQ(some.test.count, 7u);
  EXPECT_EQ(some.train.labels.size(), 10u);
  ASSERT_EQ(some.train.pixels.size(), 10 * kImage);
  EXPECT_TRUE(std::equal(some.train.pixels.begin(), some.train.pixels.end(), all.train.pixels.begin()));
}

TEST_F(IdxTest, AMissingFileIsNamedWithAdvice) {
  fs::remove(path("train-labels-idx1-ubyte.gz"));
  refused("fashion-mnist", options(), ErrorKind::io, "data",
          {path("train-labels-idx1-ubyte.gz"), "dataset-fashion-mnist"});
  refused("mnist", {.directory = path("nowhere")}, ErrorKind::io, "data",
          {path("nowhere"), "train-images-idx3-ubyte", "idx files"});
  refused("mnist", {}, ErrorKind::usage, "data", {"mnist needs it", "idx files"});
}

TEST_F(IdxTest, ATruncatedGzipIsRefusedWhereverItEnds) {
  const std::string name = "train-images-idx3-ubyte.gz", whole = bytes_of(name);
  for (const size_t keep : {whole.size() - 1, whole.size() - 8, whole.size() / 2, size_t{30}, size_t{11}, size_t{3}}) {
    write(name, whole.substr(0, keep));
    refused("mnist", options(), ErrorKind::frame, "gzip", {path(name), "damaged after", "a whole stream"});
  }
}

TEST_F(IdxTest, AFlippedBitInAGzipIsRefused) {
  const std::string name = "train-images-idx3-ubyte.gz", whole = bytes_of(name);
  for (size_t at = 20; at < whole.size() - 4; at += 997) {
    std::string bad = whole;
    bad[at] = static_cast<char>(bad[at] ^ 4);
    write(name, bad);
    EXPECT_THROW(load_task("mnist", options()), Error) << at;
  }
  std::string bad = whole;
  bad[whole.size() - 6] = static_cast<char>(bad[whole.size() - 6] ^ 1);  // the checksum itself
  write(name, bad);
  refused("mnist", options(), ErrorKind::frame, "gzip", {path(name)});
}

TEST_F(IdxTest, DamagedHeadersAreRefused) {
  const std::string images = "t10k-images-idx3-ubyte", labels = "t10k-labels-idx1-ubyte";
  const struct {
    std::string file, bytes, field;
    std::vector<std::string> parts;
  } cases[] = {
      {images, idx_labels(7), "magic", {"0x00000801", "0x00000803"}},
      {labels, idx_images(7, 2), "magic", {"0x00000803", "0x00000801"}},
      {images, idx_images(8, 2), "count", {"7 labels", "8, as many"}},
      {images, word(0x803) + word(7) + word(32) + word(32) + pixels(7, 1024, 2), "shape", {"32 x 32", "28 x 28"}},
      {images, word(0x803) + word(0) + word(28) + word(28), "count", {"0 images"}},
      {images, word(0x803) + word(0xffffffff) + word(28) + word(28), "count", {"4294967295 images", "at most 0"}},
      {images,
       word(0x803) + word(900'000) + word(28) + word(28) + pixels(7, kImage, 2),
       "count",
       {"900000 images", "at most 7"}},
      {images, idx_images(7, 2).substr(0, 16 + 7 * kImage - 1), "size", {"5503 bytes", "5504"}},
      {images, idx_images(7, 2) + "x", "size", {"larger", "5504"}},
      {labels, idx_labels(7) + "x", "size", {"larger", "15"}},
      {labels, idx_labels(7).substr(0, 12), "size", {"12 bytes", "15"}},
      {images, word(0x803).substr(0, 3), "size", {"at most 3 bytes"}},
      {images, "", "size", {"at most 0 bytes"}},
      {labels, word(0x801) + word(7) + std::string("\0\1\2\12\4\5\6", 7), "label", {"10 at sample 3", "0 to 9"}},
  };
  for (const auto& c : cases) {
    const std::string good = bytes_of(c.file);
    write(c.file, c.bytes);
    std::vector<std::string> parts = c.parts;
    parts.push_back("idx files");
    refused("mnist", options(), ErrorKind::frame, c.field, parts);
    write(c.file, good);
  }
  EXPECT_NO_THROW(load_task("mnist", options()));
}

// 64 KB of gzip hold 60 MB of zeros here; the claim is what counts, and it is refused at once.
TEST_F(IdxTest, AClaimThatTheGzipCannotHoldTakesNoMemory) {
  write_gzip("train-images-idx3-ubyte.gz", word(0x803) + word(1'000'000) + word(28) + word(28));
  refused("mnist", options(), ErrorKind::frame, "count", {"1000000 images", "at most"});
  write_gzip("train-images-idx3-ubyte.gz", word(0x803) + word(30) + word(28) + word(28) + std::string(60'000'000, 0));
  refused("mnist", options(), ErrorKind::frame, "size", {"larger than its own count", "23536"});
}

TEST_F(IdxTest, OptionsThatImagesDoNotTakeAreRefused) {
  TaskOptions with = options();
  with.length = 5;
  refused("mnist", with, ErrorKind::usage, "length", {"length is 5", "images"});
  with = options();
  with.vocabulary = 5;
  refused("mnist", with, ErrorKind::usage, "vocabulary", {"vocabulary is 5", "images"});
  with = options();
  with.words = true;
  refused("mnist", with, ErrorKind::usage, "words", {"only the task text"});
  refused("imagenet", options(), ErrorKind::usage, "task",
          {"'imagenet'", "fashion-mnist, mnist, cifar10, cifar100, ag-news, text"});
}

TEST(Installed, FashionMnistIsWhatItsPublishersSay) {
  if (!fs::exists("/usr/share/datasets/fashion-mnist"))
    GTEST_SKIP() << "Debian's package dataset-fashion-mnist is not installed";
  const Task task = load_task("fashion-mnist");
  EXPECT_EQ(task.train.count, 60'000u);
  EXPECT_EQ(task.test.count, 10'000u);
  std::vector<int> seen(10);
  for (const int32_t label : task.train.labels) ++seen[static_cast<size_t>(label)];
  EXPECT_EQ(seen, std::vector<int>(10, 6000));
  double sum = 0, squares = 0;
  for (const uint8_t p : task.train.pixels) sum += p, squares += double{1} * p * p;
  const double n = static_cast<double>(task.train.pixels.size()), mean = sum / n;
  EXPECT_NEAR(task.mean[0], mean / 255, 1e-4);
  EXPECT_NEAR(task.deviation[0], std::sqrt(squares / n - mean * mean) / 255, 1e-4);
}

std::string cifar_records(uint64_t count, int label_bytes, int classes, int salt) {
  std::string out;
  for (uint64_t i = 0; i < count; ++i) {
    if (label_bytes == 2) out += static_cast<char>(i % 20);
    out += static_cast<char>((i + static_cast<uint64_t>(salt)) % static_cast<uint64_t>(classes));
    out += pixels(1, 3072, salt * 100 + static_cast<int>(i));
  }
  return out;
}

class CifarTest : public DataTest {
 protected:
  void ten(const std::string& folder) const {
    for (int b = 1; b <= 5; ++b) write(fmt::format("{}data_batch_{}.bin", folder, b), cifar_records(3, 1, 10, b));
    write(folder + "test_batch.bin", cifar_records(2, 1, 10, 9));
  }
};

TEST_F(CifarTest, TenAndHundredReadFromTheDirectoryOrItsUsualFolder) {
  for (const char* folder : {"", "cifar-10-batches-bin/"}) {
    ten(folder);
    const Task task = load_task("cifar10", options());
    EXPECT_EQ(task.train.count, 15u);
    EXPECT_EQ(task.test.count, 2u);
    EXPECT_EQ(task.classes, 10);
    EXPECT_TRUE(task.crops && task.flips);
    EXPECT_EQ(task.train.labels[4], 3);  // the second of batch 2
    const std::string expected = pixels(1, 3072, 201);
    for (size_t i = 0; i < 3072; ++i) ASSERT_EQ(task.train.pixels[4 * 3072 + i], static_cast<uint8_t>(expected[i]));
    fs::remove_all(folder_);
    fs::create_directories(folder_);
  }
  write("cifar-100-binary/train.bin", cifar_records(120, 2, 100, 0));
  write("cifar-100-binary/test.bin", cifar_records(1, 2, 100, 0));
  const Task task = load_task("cifar100", options());
  EXPECT_EQ(task.classes, 100);
  EXPECT_EQ(task.train.labels[99], 99);
  EXPECT_EQ(task.train.labels[100], 0);
  EXPECT_EQ(task.train.pixels.size(), 120u * 3072);
  EXPECT_EQ(task.train.pixels[3072], static_cast<uint8_t>(pixels(1, 3072, 1)[0]));
}

TEST_F(CifarTest, DamageIsRefused) {
  ten("");
  const std::string file = "data_batch_3.bin", good = bytes_of(file);
  write(file, good.substr(0, good.size() - 1));
  refused("cifar10", options(), ErrorKind::frame, "size", {path(file), "9218 bytes", "records of 3073", "Krizhevsky"});
  write(file, "");
  refused("cifar10", options(), ErrorKind::frame, "size", {path(file), "0 bytes", "at least one"});
  std::string bad = good;
  bad[3073] = 10;
  write(file, bad);
  refused("cifar10", options(), ErrorKind::frame, "label", {path(file), "10 in record 1", "0 to 9"});
  fs::remove(path(file));
  refused("cifar10", options(), ErrorKind::io, "data", {path(file), "not there", "binary version"});
  fs::create_directories(path(file));
  refused("cifar10", options(), ErrorKind::io, "data", {path(file)});
  write("train.bin", cifar_records(1, 2, 100, 0));
  write("test.bin", std::string(1, 0) + std::string(1, 100) + pixels(1, 3072, 0));
  refused("cifar100", options(), ErrorKind::frame, "label", {path("test.bin"), "100 in record 0", "0 to 99"});
}

const char kRows[] =
    "\"3\",\"Oil, \"\"Gas\"\" rise\",\"Prices rise\\again.\\\"\n"
    "\"1\",\"It #39;s &lt;b&gt;OIL\",\"a\nsecond line\"\r\n"
    "4,plain,rise\n\n"
    "\"2\",\"rise oil\",\"\"";

TEST_F(DataTest, AgNewsRowsBecomeNumberedWords) {
  write("ag_news_csv/train.csv", kRows);
  write("ag_news_csv/test.csv", "\"1\",\"Gas unheard\",\"rise oil\"\n");
  TaskOptions with = options();
  with.length = 5;
  const Task task = load_task("ag-news", with);
  EXPECT_EQ(task.classes, 4);
  EXPECT_EQ(task.train.count, 4u);
  EXPECT_EQ(task.train.shape, std::vector<int64_t>{5});
  EXPECT_EQ(task.train.labels, (std::vector<int32_t>{2, 0, 3, 1}));
  // rise (4 times) 2, oil (3) 3, then by alphabet: a 4, again 5, b 6 (between two entities), gas 7, it 8, line 9, plain
  // 10, prices 11, s 12, second 13
  EXPECT_EQ(task.vocabulary, 14);
  EXPECT_EQ(task.train.tokens,
            (std::vector<int32_t>{3, 7, 2, 11, 2, /**/ 8, 12, 6, 3, 4, /**/ 10, 2, 0, 0, 0, /**/ 2, 3, 0, 0, 0}));
  EXPECT_EQ(task.test.tokens, (std::vector<int32_t>{7, 1, 2, 3, 0}));

  with.vocabulary = 4;  // two reserved, rise, oil
  const Task small = load_task("ag-news", with);
  EXPECT_EQ(small.vocabulary, 4);
  EXPECT_EQ(small.test.tokens, (std::vector<int32_t>{1, 1, 2, 3, 0}));
  with.limit = 1;  // the vocabulary stays that of all rows
  const Task one = load_task("ag-news", with);
  EXPECT_EQ(one.train.count, 1u);
  EXPECT_EQ(one.train.tokens.size(), 5u);
  EXPECT_EQ(one.vocabulary, 4);
}

TEST_F(DataTest, AgNewsHeaderRowIsSkippedAndDefaultsAreThePublishedOnes) {
  write("train.csv", std::string("Class Index,Title,Description\n") + kRows);
  write("test.csv", kRows);
  const Task task = load_task("ag-news", options());
  EXPECT_EQ(task.train.count, 4u);
  EXPECT_EQ(task.test.shape, std::vector<int64_t>{64});
}

TEST_F(DataTest, AgNewsDamageIsNamedByLine) {
  write("test.csv", kRows);
  const struct {
    std::string bytes, field;
    std::vector<std::string> parts;
  } cases[] = {
      {"\"1\",\"a\",\"b\"\n\"2\",\"only a title\"\n", "columns", {"2 on line 2", "3: class"}},
      {"\"1\",\"a\n\nb\",\"c\"\n\"2\",\"x\",\"y\",\"z\"\n", "columns", {"4 on line 4"}},
      {"\"1\",\"a\",\"b\"\n\n\"5\",\"c\",\"d\"\n", "class", {"'5' on line 3", "1 to 4"}},
      {"\"0\",\"a\",\"b\"\n", "class", {"'0' on line 1"}},
      {"\"11\",\"a\",\"b\"\n", "class", {"'11' on line 1"}},
      {",\"a\",\"b\"\n", "class", {"'' on line 1"}},
      {"\"1\",\"a\",\"b\n", "quote", {"line 1", "closing quote"}},
      {"\"1\",\"a\"x,\"b\"\n", "quote", {"line 1", "after a closing quote"}},
      {"", "size", {"0 rows"}},
      {"\n\r\n", "size", {"0 rows"}},
      {"Class Index,Title,Description\n", "size", {"0 rows"}},
  };
  for (const auto& c : cases) {
    write("train.csv", c.bytes);
    std::vector<std::string> parts = c.parts;
    parts.insert(parts.end(), {path("train.csv"), "ag_news_csv"});
    refused("ag-news", options(), ErrorKind::frame, c.field, parts);
  }
  fs::remove(path("test.csv"));
  write("train.csv", kRows);
  refused("ag-news", options(), ErrorKind::io, "data", {path("test.csv"), "not there"});
  TaskOptions with = options();
  with.length = -1;
  refused("ag-news", with, ErrorKind::usage, "length", {"length is -1", "1 to 65536"});
  with = options();
  with.vocabulary = 2;
  refused("ag-news", with, ErrorKind::usage, "vocabulary", {"vocabulary is 2", "3 to"});
}

TEST_F(DataTest, TextOfOneFileEndsInItsTestPart) {
  std::string text;
  for (int i = 0; i < 100; ++i) text += i < 90 ? "abc"[i % 3] : "cz"[i % 2];
  write("book.txt", text);
  TaskOptions with{.directory = path("book.txt"), .length = 4};
  const Task task = load_task("text", with);
  EXPECT_EQ(task.vocabulary, 4);  // unknown, a, b, c
  EXPECT_EQ(task.classes, 4);
  EXPECT_EQ(task.train.count, 22u);  // 88 of 90 tokens, and one more as the last label
  EXPECT_EQ(task.test.count, 2u);
  EXPECT_EQ(task.train.labels_each, 4u);
  EXPECT_EQ(std::vector<int32_t>(task.train.tokens.begin(), task.train.tokens.begin() + 5),
            (std::vector<int32_t>{1, 2, 3, 1, 2}));
  ASSERT_EQ(task.train.labels.size(), task.train.tokens.size());
  for (size_t i = 0; i + 1 < task.train.tokens.size(); ++i) ASSERT_EQ(task.train.labels[i], task.train.tokens[i + 1]);
  EXPECT_EQ(task.train.labels.back(), 2);  // character 88
  EXPECT_EQ(task.test.tokens, (std::vector<int32_t>{3, 0, 3, 0, 3, 0, 3, 0}));
  with.limit = 3;
  EXPECT_EQ(load_task("text", with).train.labels.size(), 12u);
}

TEST_F(DataTest, TextByWordsCountsLineEndsAndMapsTheUnknown) {
  write("wiki.train.tokens", "b a b\n<unk> a\tb c\n");
  write("wiki.valid.tokens", "not this one, there is a test part\n");
  write("wiki.test.tokens", "a d <unk>\n b");
  TaskOptions with = options();
  with.length = 2;
  with.words = true;
  const Task task = load_task("text", with);
  EXPECT_EQ(task.vocabulary, 5);  // unknown, line end, b, a, c
  EXPECT_EQ(task.train.tokens, (std::vector<int32_t>{2, 3, 2, 1, 0, 3, 2, 4}));
  EXPECT_EQ(task.train.labels, (std::vector<int32_t>{3, 2, 1, 0, 3, 2, 4, 1}));
  EXPECT_EQ(task.test.tokens, (std::vector<int32_t>{3, 0, 0, 1}));
  with.vocabulary = 3;
  EXPECT_EQ(load_task("text", with).test.tokens, (std::vector<int32_t>{0, 0, 0, 1}));
  fs::remove(path("wiki.test.tokens"));
  EXPECT_EQ(load_task("text", with).test.count, 4u);  // the valid part stands in
}

TEST_F(DataTest, TextThatIsMissingShortOrAmbiguousIsRefused) {
  TaskOptions with{.directory = path("book.txt"), .length = 4};
  refused("text", with, ErrorKind::io, "data", {path("book.txt"), "plain text file"});
  write("book.txt", std::string(49, 'a'));
  refused("text", with, ErrorKind::frame, "length", {path("book.txt"), "last tenth", "4 tokens", "at least 5"});
  write("book.txt", std::string(50, 'a'));
  EXPECT_EQ(load_task("text", with).test.count, 1u);
  write("book.txt", "");
  refused("text", with, ErrorKind::frame, "length", {path("book.txt"), "0 tokens"});
  refused("text", options(), ErrorKind::io, "data", {folder_.string(), "'train'"});
  write("latest-train.txt", std::string(500, 'a'));
  refused("text", options(), ErrorKind::io, "data", {folder_.string(), "'test' or 'valid'"});
  write("train2.txt", "b");
  refused("text", options(), ErrorKind::frame, "files", {"latest-train.txt", "train2.txt", "one with 'train'"});
  with.vocabulary = 100;
  refused("text", with, ErrorKind::usage, "vocabulary", {"vocabulary is 100", "words"});
  with = {.directory = "/dev/zero"};
  refused("text", with, ErrorKind::io, "data", {"/dev/zero", "regular file"});
}

// Written out once more, from the header's words.
uint64_t mixed(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}
uint64_t key(uint64_t seed, uint64_t epoch, uint64_t sample) {
  return mixed(mixed(seed + 0x9e3779b97f4a7c15ull) ^ mixed(epoch << 32 | sample));
}

TEST(Order, AnEpochIsThePermutationThatTheHeaderDefines) {
  for (const uint64_t count : {0, 1, 2, 1000}) {
    const std::vector<uint32_t> order = epoch_order(count, 7, 3);
    std::vector<uint32_t> expected(count);
    std::iota(expected.begin(), expected.end(), 0u);
    std::sort(expected.begin(), expected.end(), [](uint32_t a, uint32_t b) { return key(7, 3, a) < key(7, 3, b); });
    EXPECT_EQ(order, expected);
  }
  EXPECT_NE(epoch_order(100, 7, 3), epoch_order(100, 7, 4));
  EXPECT_NE(epoch_order(100, 7, 3), epoch_order(100, 8, 3));
  EXPECT_NE(epoch_order(100, 0, 0)[0], 0u);
  // Made with numpy, from the formula in the header.
  EXPECT_EQ(epoch_order(8, 1, 2), (std::vector<uint32_t>{0, 6, 3, 2, 1, 4, 5, 7}));
}

TEST(Augment, CropsAndMirrorsAreThoseThatTheHeaderDefines) {
  Task task;
  task.crops = task.flips = true;
  Samples& samples = task.train;
  samples.count = 200;
  samples.shape = {3, 6, 5};
  const int64_t height = 6, width = 5;
  for (uint64_t i = 0; i < 200 * 90; ++i) samples.pixels.push_back(static_cast<uint8_t>(mix64(i) % 255 + 1));
  std::set<std::pair<int64_t, int64_t>> places;
  int mirrored = 0;
  std::vector<uint8_t> out(90), again(90);
  for (uint64_t s = 0; s < samples.count; ++s) {
    copy_pixels(task, samples, s, true, 11, 5, out);
    const uint64_t r = mixed(key(11, 5, s) + 0x9e3779b97f4a7c15ull);
    const int64_t down = static_cast<int64_t>((r & 0xffffffff) * 9 >> 32),
                  right = static_cast<int64_t>((r >> 32 & 0x7fffffff) * 9 >> 31);
    for (int64_t c = 0; c < 3; ++c) {
      std::vector<uint8_t> padded(14 * 13, 0);
      for (int64_t y = 0; y < height; ++y)
        for (int64_t x = 0; x < width; ++x) padded[(y + 4) * 13 + x + 4] = samples.pixels[s * 90 + c * 30 + y * 5 + x];
      for (int64_t y = 0; y < height; ++y)
        for (int64_t x = 0; x < width; ++x)
          ASSERT_EQ(out[c * 30 + y * 5 + (r >> 63 ? width - 1 - x : x)], padded[(y + down) * 13 + x + right])
              << s << " " << y << " " << x;
    }
    places.insert({down, right});
    mirrored += static_cast<int>(r >> 63);
    copy_pixels(task, samples, s, false, 11, 5, again);
    ASSERT_TRUE(std::equal(again.begin(), again.end(), samples.pixels.begin() + static_cast<std::ptrdiff_t>(s * 90)));
  }
  EXPECT_GT(places.size(), 60u);  // of 81 places 200 draws leave about 7 out
  EXPECT_GT(mirrored, 70);        // 100 +- 7
  EXPECT_LT(mirrored, 130);
  copy_pixels(task, samples, 0, true, 11, 5, out);
  copy_pixels(task, samples, 0, true, 11, 5, again);
  EXPECT_EQ(out, again);
  task.crops = task.flips = false;
  copy_pixels(task, samples, 3, true, 11, 5, out);
  EXPECT_TRUE(std::equal(out.begin(), out.end(), samples.pixels.begin() + 270));
}

}  // namespace
}  // namespace gradwire::train
