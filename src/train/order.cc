// SPDX-License-Identifier: Apache-2.0
// What chance decides about the data: the order of an epoch and how an image is cropped and mirrored. Both are
// functions of (seed, epoch, sample), made from one 64-bit key a sample, so that any number of workers, a restarted run
// and another program find the same.
#include <algorithm>
#include <utility>

#include "core/bits.h"
#include "core/check.h"
#include "gradwire/error.h"
#include "train/data.h"

namespace gradwire::train {
namespace {

constexpr uint64_t kGolden = 0x9e3779b97f4a7c15ull;
constexpr int64_t kPad = 4;

// mix64(0) is 0: without the constant, seed 0 would start its first epoch with sample 0.
uint64_t sample_key(uint64_t seed, uint64_t epoch, uint64_t sample) {
  return mix64(mix64(seed + kGolden) ^ mix64(epoch << 32 | sample));
}

}  // namespace

std::vector<uint32_t> epoch_order(uint64_t count, uint64_t seed, uint64_t epoch) {
  if (count > uint64_t{1} << 32 || epoch >> 32)
    throw Error(ErrorKind::usage,
                "count is " + std::to_string(count) + ", epoch " + std::to_string(epoch) + "; each must fit in 32 bits",
                "count");
  std::vector<std::pair<uint64_t, uint32_t>> keys(count);
  for (uint64_t i = 0; i < count; ++i) keys[i] = {sample_key(seed, epoch, i), static_cast<uint32_t>(i)};
  std::sort(keys.begin(), keys.end());  // keys of one epoch differ: every step from sample to key can be undone
  std::vector<uint32_t> order(count);
  for (uint64_t i = 0; i < count; ++i) order[i] = keys[i].second;
  return order;
}

void copy_pixels(const Task& task, const Samples& samples, uint64_t sample, bool augment, uint64_t seed, uint64_t epoch,
                 std::span<uint8_t> out) {
  GW_CHECK(samples.shape.size() == 3 && sample < samples.count);
  const int64_t channels = samples.shape[0], height = samples.shape[1], width = samples.shape[2];
  const auto each = static_cast<uint64_t>(channels * height * width);
  GW_CHECK(out.size() == each && samples.pixels.size() == samples.count * each);
  const uint8_t* in = samples.pixels.data() + sample * each;
  if (!augment || !(task.crops || task.flips)) {
    std::copy_n(in, each, out.begin());
    return;
  }
  // Mixed once more: the key itself says where in the epoch the sample stands.
  const uint64_t random = mix64(sample_key(seed, epoch, sample) + kGolden);
  constexpr uint64_t kPlaces = 2 * kPad + 1;
  const int64_t down = task.crops ? static_cast<int64_t>((random & 0xffffffffu) * kPlaces >> 32) - kPad : 0;
  const int64_t right = task.crops ? static_cast<int64_t>((random >> 32 & 0x7fffffffu) * kPlaces >> 31) - kPad : 0;
  const bool mirror = task.flips && random >> 63;
  uint8_t* to = out.data();
  for (int64_t c = 0; c < channels; ++c)
    for (int64_t y = 0; y < height; ++y)
      for (int64_t x = 0; x < width; ++x) {
        const int64_t from_y = y + down, from_x = (mirror ? width - 1 - x : x) + right;
        const bool inside = from_y >= 0 && from_y < height && from_x >= 0 && from_x < width;
        *to++ = inside ? in[(c * height + from_y) * width + from_x] : 0;
      }
}

}  // namespace gradwire::train
