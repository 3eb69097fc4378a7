// SPDX-License-Identifier: Apache-2.0
// libFuzzer on the files that the program reads: .npy arrays, message files that may be packed, the records of runs,
// and the data sets that are trained on (idx, CIFAR, comma-separated, plain text; gzip too). The first byte chooses.
// Only gradwire::Error may come out, of a kind that docs say; another exception, a sanitizer's report, or memory for
// what a file only claims, is a finding.
#include <sys/mman.h>
#include <unistd.h>
#include <zlib.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "codec/npy.h"
#include "codec/packed.h"
#include "gradwire/error.h"
#include "io/json.h"
#include "report/report_run.h"
#include "support/fuzz_source.h"
#include "train/data.h"

namespace {

using namespace gradwire;
using gradwire::fuzz::nested_json;
using gradwire::fuzz::promise;
using gradwire::fuzz::Source;
namespace fs = std::filesystem;

std::vector<std::byte> bytes_of(const std::string& text) {
  const auto bytes = std::as_bytes(std::span(text));
  return {bytes.begin(), bytes.end()};
}

std::string altered_often(Source& source, std::string text) {
  while (source.size > 2) text = gradwire::fuzz::altered(source, std::move(text), 32, 32);
  return text;
}

// Arrays.

void parse_array(const std::string& file) {
  const std::vector<std::byte> bytes = bytes_of(file);
  try {
    app::looks_like_npy(bytes);
    const app::NpyArray array = app::parse_npy(bytes, "x.npy");
    promise(array.data.size() == array.count * bytes_of(array.dtype) && array.data.size() <= bytes.size());
    if (array.fortran_order) promise(app::in_c_order(array).size() == array.data.size());
    std::vector<std::byte> again = app::npy_header(array.dtype, array.shape);
    again.insert(again.end(), array.data.begin(), array.data.end());
    promise(app::parse_npy(again, "x.npy").count == array.count);  // what we write, we read
  } catch (const Error& error) {
    promise(error.kind() == ErrorKind::frame || error.kind() == ErrorKind::usage);
    promise(!error.field().empty());
  }
}

void fuzz_npy(Source source) {
  if (source.next<uint8_t>() % 2) return parse_array(source.rest());
  // A header with its magic and its length.
  const auto data = source.next<uint8_t>();
  std::string header = altered_often(source, "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }          \n");
  const auto length = static_cast<uint16_t>(header.size());
  std::string file("\x93NUMPY\x01\x00", 8);
  file.append(reinterpret_cast<const char*>(&length), 2);
  parse_array(file + header + std::string(data, '\1'));
}

// Messages.

void fuzz_packed(Source source) {
  static const int file = ::memfd_create("message", MFD_CLOEXEC);
  static const std::string path = "/proc/self/fd/" + std::to_string(file);
  const auto how = source.next<uint8_t>();
  std::string bytes = source.rest();
  if (how % 2 && app::packing_built()) {  // packed rightly, whatever it is
    const std::vector<std::byte> packed = app::pack(bytes_of(bytes));
    bytes.assign(reinterpret_cast<const char*>(packed.data()), packed.size());
    if (how & 2 && !bytes.empty()) bytes[how * 7u % bytes.size()] ^= static_cast<char>(how);
  }
  promise(::ftruncate(file, 0) == 0 &&
          ::pwrite(file, bytes.data(), bytes.size(), 0) == static_cast<ssize_t>(bytes.size()));
  try {
    promise(app::read_message(path, 1 << 20).file_bytes == bytes.size());
  } catch (const Error& error) {
    promise(error.kind() == ErrorKind::frame || error.kind() == ErrorKind::io ||
            error.kind() == ErrorKind::unsupported);
  }
}

// Records of runs.

void fuzz_record(Source source) {
  static const std::string honest =
      R"({"version":1,"codec":"qsgd:bits=4","canonical":"qsgd:bits=4","task":"mnist","model":"mlp","collective":)"
      R"("scatter","device":"cpu","machine":"m","engine":"threads","optimizer":"sgd","schedule":"constant","weights":)"
      R"("none","command":"c","seed":1,"workers":2,"batch":8,"parameters":100,"skipped_steps":0,"rate":0.1,"finished":)"
      R"(true,"metric":"accuracy","epochs":[{"epoch":1,"step":5,"rate":0.1,"train_loss":1,"train_accuracy":0.5,)"
      R"("test_loss":null,"test_accuracy":0.5,"bytes_sent":10,"bits":4,"seconds":{"wall":1,"compute":1,"encode":1,)"
      R"("wait":1,"decode":1}}],"bits_over_time":[[0,4]],"layers":[{"step":1,"tensors":[{"name":"a","elements":3,)"
      R"("error":0.1,"cosine":0.9}]}],"tables":[{"step":1,"direction":"up","codec":"optquant","tensors":["a"],"lines":)"
      R"(["l"],"levels":[0.5]}],"memory":{"peak":1,"gradients":1,"residuals":1,"messages":1}})";
  const auto how = source.next<uint8_t>();
  const std::string text = how % 4 == 0   ? source.rest()
                           : how % 4 == 1 ? nested_json(source)
                                          : altered_often(source, honest);
  std::string why;
  const nlohmann::json record = io::parse_bounded(text, why);
  if (!why.empty()) return;
  try {
    const app::Run run = app::parse_run(record);
    app::ratio_of(run);
    for (const app::Epoch& epoch : run.epochs) app::value_of(epoch, run.metric);
  } catch (const Error& error) {
    promise(error.kind() == ErrorKind::frame);
  }
}

// Data sets: the honest files of a small one, and one of them as the input says.

class InputFolder {
 public:
  InputFolder() : path_(fs::temp_directory_path() / ("gradwire_fuzz_files_" + std::to_string(::getpid()))) {
    fs::create_directories(path_);
  }
  ~InputFolder() { fs::remove_all(path_); }
  std::string path() const { return path_.string(); }
  void clear() const {
    for (const auto& one : fs::directory_iterator(path_)) fs::remove_all(one);
  }
  void write(const std::string& name, const std::string& bytes, bool packed = false) const {
    const std::string path = (path_ / name).string();
    if (packed) {
      gzFile file = ::gzopen(path.c_str(), "wb1");
      promise(file && (bytes.empty() || ::gzwrite(file, bytes.data(), static_cast<unsigned>(bytes.size())) > 0));
      ::gzclose(file);
    } else {
      std::ofstream(path, std::ios::binary) << bytes;
    }
  }

 private:
  fs::path path_;
};

std::string big_endian(std::initializer_list<uint32_t> words) {
  std::string text;
  for (uint32_t word : words)
    for (int shift = 24; shift >= 0; shift -= 8) text.push_back(static_cast<char>(word >> shift));
  return text;
}

void fuzz_data(Source source) {
  static const InputFolder folder;
  folder.clear();
  const auto how = source.next<uint8_t>();
  const auto which = source.next<uint8_t>();
  const auto given = [&](const std::string& honest) {
    return how & 64 ? source.rest() : altered_often(source, honest);
  };
  std::string task;
  train::TaskOptions options{.directory = folder.path()};
  switch (how % 4) {
    case 0: {
      task = "mnist";
      const std::string images = big_endian({0x803, 2, 28, 28}) + std::string(2 * 28 * 28, '\7'),
                        labels = big_endian({0x801, 2}) + "\1\2";
      const std::array<std::string, 4> names = {"train-images-idx3-ubyte", "train-labels-idx1-ubyte",
                                                "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"};
      for (size_t i = 0; i < names.size(); ++i) {
        const std::string& honest = i % 2 ? labels : images;
        const bool fuzzed = which % 4 == i, gzip = fuzzed && (how & 16), raw = fuzzed && (how & 32);
        folder.write(names[i] + (gzip || raw ? ".gz" : ""), fuzzed ? given(honest) : honest, gzip);
      }
      break;
    }
    case 1: {
      task = which % 2 ? "cifar10" : "cifar100";
      const std::string record = std::string(task == "cifar10" ? 1 : 2, '\1') + std::string(3072, '\7');
      for (const char* name : {"data_batch_1.bin", "data_batch_2.bin", "data_batch_3.bin", "data_batch_4.bin",
                               "data_batch_5.bin", "test_batch.bin", "train.bin", "test.bin"})
        folder.write(name, record);
      folder.write(task == "cifar10" ? "data_batch_1.bin" : "train.bin", given(record + record));
      break;
    }
    case 2: {
      task = "ag-news";
      const std::string rows = "\"1\",\"a title\",\"some \"\"quoted\"\" words\"\n\"4\",\"b\",\"more, words\"\n";
      folder.write("train.csv", which % 2 ? given(rows) : rows);
      folder.write("test.csv", which % 2 ? rows : given(rows));
      options.length = which / 2 % 20;
      break;
    }
    default: {
      task = "text";
      const std::string text = "the quick brown fox jumps over the lazy dog again and again and again\n";
      folder.write("train.txt", which % 2 ? given(text) : text);
      folder.write("test.txt", which % 2 ? text : given(text));
      options.length = 1 + which / 2 % 8;
      options.words = how & 16;
      break;
    }
  }
  try {
    const train::Task loaded = train::load_task(task, options);
    for (const train::Samples* part : {&loaded.train, &loaded.test}) {
      uint64_t each = 1;
      for (int64_t extent : part->shape) each *= static_cast<uint64_t>(extent);
      promise(part->count > 0 && part->pixels.size() + part->tokens.size() == part->count * each);
      promise(part->labels.size() == part->count * part->labels_each);
      for (int32_t label : part->labels)
        promise(label >= 0 && label < std::max<int64_t>(loaded.classes, loaded.vocabulary));
      for (int32_t token : part->tokens) promise(token >= 0 && token < loaded.vocabulary);
    }
  } catch (const Error& error) {
    promise(error.kind() == ErrorKind::frame || error.kind() == ErrorKind::io || error.kind() == ErrorKind::usage);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Source source{data, size};
  switch (source.next<uint8_t>() % 4) {
    case 0:
      fuzz_npy(source);
      break;
    case 1:
      fuzz_packed(source);
      break;
    case 2:
      fuzz_record(source);
      break;
    default:
      fuzz_data(source);
      break;
  }
  return 0;
}
