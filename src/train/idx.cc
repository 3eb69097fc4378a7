// SPDX-License-Identifier: Apache-2.0
// The idx files of MNIST and of Fashion-MNIST, gzip or plain. Big-endian words: a magic number (0x0800 for bytes, then
// the number of dimensions), the dimensions; then one byte a value. Images are {count, 28, 28}, labels {count}.
#include <fmt/format.h>

#include <algorithm>

#include "train/loaders.h"

namespace gradwire::train {
namespace {

constexpr uint32_t kImages = 0x0803, kLabels = 0x0801;
constexpr uint32_t kSide = 28, kClasses = 10;
constexpr uint64_t kMostImages = uint64_t{1} << 20;  // more than any set in this format has; 0.8 GB

std::vector<std::string> names(const std::string& part, const std::string& kind) {
  std::vector<std::string> all;
  for (const char* separator : {"-", "."})
    for (const char* end : {".gz", ""}) all.push_back(fmt::format("{}{}{}{}", part, separator, kind, end));
  return all;
}

void expect_magic(const DataPlace& place, const std::string& path, ByteStream& stream, uint32_t expected,
                  const char* what) {
  const uint32_t magic = stream.read_big_endian();
  if (magic != expected)
    damaged(place, path, "magic", fmt::format("{:#010x}", magic), fmt::format("{:#010x} ({})", expected, what));
}

Samples read_part(const DataPlace& place, const std::string& part) {
  const std::string image_path = find_file(place, names(part + "-images", "idx3-ubyte"));
  const std::string label_path = find_file(place, names(part + "-labels", "idx1-ubyte"));
  ByteStream images(place, image_path), labels(place, label_path);

  expect_magic(place, image_path, images, kImages, "bytes in three dimensions");
  const uint64_t count = images.read_big_endian();
  const uint32_t height = images.read_big_endian(), width = images.read_big_endian();
  if (height != kSide || width != kSide)
    damaged(place, image_path, "shape", fmt::format("{} x {}", height, width), fmt::format("{} x {}", kSide, kSide));
  const uint64_t each = uint64_t{kSide} * kSide;
  if (count == 0) damaged(place, image_path, "count", "0 images", "at least one");
  if (count > kMostImages || count * each > images.most())
    damaged(place, image_path, "count", fmt::format("{} images", count),
            fmt::format("at most {} in a file of this size", std::min(kMostImages, images.most() / each)));

  expect_magic(place, label_path, labels, kLabels, "bytes in one dimension");
  const uint64_t label_count = labels.read_big_endian();
  if (label_count != count)
    damaged(place, label_path, "count", fmt::format("{} labels", label_count),
            fmt::format("{}, as many as the images of {}", count, image_path));

  Samples samples;
  samples.count = count;
  samples.shape = {1, kSide, kSide};
  const std::vector<uint8_t> classes = labels.read(count);
  labels.expect_end();
  for (uint64_t i = 0; i < count; ++i)
    if (classes[i] >= kClasses)
      damaged(place, label_path, "label", fmt::format("{} at sample {}", classes[i], i),
              fmt::format("0 to {}", kClasses - 1));
  samples.labels.assign(classes.begin(), classes.end());
  samples.pixels = images.read(count * each);
  images.expect_end();
  return samples;
}

}  // namespace

Task load_idx(const std::string& name, const DataPlace& place) {
  Task task;
  task.name = name;
  task.train = read_part(place, "train");
  task.test = read_part(place, "t10k");
  task.classes = kClasses;
  // Of the whole published training sets.
  task.mean = {name == "mnist" ? 0.1307f : 0.2860f};
  task.deviation = {name == "mnist" ? 0.3081f : 0.3530f};
  return task;
}

}  // namespace gradwire::train
