// SPDX-License-Identifier: Apache-2.0
// A Plan is a list of named tensors, each with a codec, and the layout of the one message that carries them. A plan is
// built once, and calls of encode and decode then neither allocate nor, on a GPU, synchronise. A model has hundreds of
// small tensors: with one plan they take one launch and one message. A frame is a message of one tensor.
//
// Threads: a Plan never changes, but by assignment or a move. Any number of threads, and of runners, may use one at
// once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "gradwire/codec.h"
#include "gradwire/tensor.h"

namespace gradwire {

// The elements of a tile. A tensor may be cut into chunks at multiples of it, which every unit (bucket, tile) divides.
inline constexpr uint64_t kTileElements = 32768;

// A message carries the shape of a tensor with at most this many dimensions.
inline constexpr size_t kMaxDims = 8;

uint64_t hash_name(std::string_view name);

struct TensorSpec {
  std::string name;
  uint64_t count = 0;
  DType dtype = DType::f32;
  Codec codec;
  uint64_t first = 0;                   // of a chunk of a larger tensor: index of its first element in that tensor
  std::optional<uint64_t> name_hash{};  // set where the tensor was read from a message, which carries the hash alone
  std::vector<uint64_t> shape{};        // extents, whose product is `count`; empty: the message carries no shape
};

// Which rank sends, in which step and direction. The header carries it; together with the seed it is the key of the
// random bits.
struct Stamp {
  uint64_t seed = 0;  // no part of a message: decoding needs no random bits
  uint64_t step = 0;
  uint32_t stage = 0;  // 0 up (worker to owner), 1 down (owner to all); other numbers are the caller's
  uint32_t rank = 0;
  uint32_t world = 1;
};

struct Layout;  // where everything stands in the message: the library's own

class Plan {
 public:
  explicit Plan(std::vector<TensorSpec> tensors);
  ~Plan();
  Plan(Plan&&) noexcept;
  Plan& operator=(Plan&&) noexcept;

  const std::vector<TensorSpec>& tensors() const;
  uint64_t elements() const;
  size_t message_bytes() const;  // exact, and so also the bound

 private:
  friend const Layout& layout_of(const Plan& plan);
  std::unique_ptr<Layout> layout_;
};

// The bytes of a message that carries one tensor without a shape: Plan({{"", count, dtype, codec}}).message_bytes().
size_t bound(const Codec& codec, uint64_t count);

}  // namespace gradwire
