// SPDX-License-Identifier: Apache-2.0
// The binary version of CIFAR-10 and CIFAR-100: records of one label byte (CIFAR-100: a coarse and a fine one; the fine
// one is used) and 3 x 32 x 32 pixel bytes, red before green before blue. A file is a whole number of records.
#include <fmt/format.h>

#include "train/loaders.h"

namespace gradwire::train {
namespace {

constexpr uint64_t kPixels = 3 * 32 * 32;

struct Format {
  uint64_t label_bytes;
  int classes;
};

void append(const DataPlace& place, const std::string& name, const Format& format, Samples& samples) {
  const std::string path = find_file(place, {name});
  const std::vector<uint8_t> bytes = read_file(place, path, kMostFileBytes);
  const uint64_t record = format.label_bytes + kPixels;
  if (bytes.empty() || bytes.size() % record)
    damaged(place, path, "size", fmt::format("{} bytes", bytes.size()),
            fmt::format("a whole number of records of {} bytes, at least one", record));
  const uint64_t count = bytes.size() / record;
  samples.pixels.reserve(samples.pixels.size() + count * kPixels);
  for (uint64_t i = 0; i < count; ++i) {
    const uint8_t* label = bytes.data() + i * record + format.label_bytes - 1;
    if (*label >= format.classes)
      damaged(place, path, "label", fmt::format("{} in record {}", *label, i),
              fmt::format("0 to {}", format.classes - 1));
    samples.labels.push_back(*label);
    samples.pixels.insert(samples.pixels.end(), label + 1, label + 1 + kPixels);
  }
  samples.count += count;
}

}  // namespace

Task load_cifar(const std::string& name, const DataPlace& place) {
  const bool ten = name == "cifar10";
  const Format format = ten ? Format{1, 10} : Format{2, 100};
  Task task;
  task.name = name;
  task.train.shape = task.test.shape = {3, 32, 32};
  if (ten)
    for (int batch = 1; batch <= 5; ++batch) append(place, fmt::format("data_batch_{}.bin", batch), format, task.train);
  else
    append(place, "train.bin", format, task.train);
  append(place, ten ? "test_batch.bin" : "test.bin", format, task.test);
  task.classes = format.classes;
  // Of the whole published training sets.
  task.mean = ten ? std::vector<float>{0.4914f, 0.4822f, 0.4465f} : std::vector<float>{0.5071f, 0.4865f, 0.4409f};
  task.deviation = ten ? std::vector<float>{0.2470f, 0.2435f, 0.2616f} : std::vector<float>{0.2673f, 0.2564f, 0.2762f};
  task.crops = task.flips = true;
  return task;
}

}  // namespace gradwire::train
