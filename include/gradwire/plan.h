// SPDX-License-Identifier: Apache-2.0
// A Plan is a list of named tensors with a codec each, and the layout of the one message that carries them. It is
// built once (a model has hundreds of small tensors: one plan, one launch, one message); encoding and decoding then
// neither allocate nor, on a GPU, synchronise. A single frame is a message of one tensor.
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

// Elements between two places where a tensor may be cut in pieces: a multiple of every unit (bucket, tile).
inline constexpr uint64_t kPieceGrain = 32768;

uint64_t hash_name(std::string_view name);

struct TensorSpec {
  std::string name;
  uint64_t count = 0;
  DType dtype = DType::f32;
  Codec codec;
  uint64_t first = 0;                   // of a piece of a larger tensor: index of its first element in that tensor
  std::optional<uint64_t> name_hash{};  // read from a message, which carries the hash alone
};

// Who sends what when. Written into the header; with the seed, the key of the random bits.
struct Stamp {
  uint64_t seed = 0;  // does not travel
  uint64_t step = 0;
  uint32_t stage = 0;  // 0 up (worker to owner), 1 down (owner to all); other numbers are the caller's
  uint32_t rank = 0;
  uint32_t world = 1;
};

struct Layout;  // src/message/layout.h

class Plan {
 public:
  explicit Plan(std::vector<TensorSpec> tensors);
  ~Plan();
  Plan(Plan&&) noexcept;
  Plan& operator=(Plan&&) noexcept;

  const std::vector<TensorSpec>& tensors() const;
  uint64_t elements() const;
  size_t message_bytes() const;  // exact, and so also the bound
  const Layout& layout() const;

 private:
  std::unique_ptr<Layout> layout_;
};

// Bytes of a message that carries one tensor: Plan({{"", count, dtype, codec}}).message_bytes().
size_t bound(const Codec& codec, uint64_t count);

}  // namespace gradwire
