// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include "core/bits.h"
#include "gradwire/error.h"
#include "message/runners.h"

namespace gradwire {

void check_arguments(const Layout& layout, size_t tensors, std::span<const std::byte> message, size_t alignment) {
  if (tensors != layout.tensors.size())
    throw Error(ErrorKind::usage, fmt::format("{} tensors given; the plan has {}", tensors, layout.tensors.size()),
                "tensors");
  if (message.size() != layout.message_bytes())
    throw Error(ErrorKind::frame,
                fmt::format("bad message: total_bytes: {} bytes given; the plan's message has {}", message.size(),
                            layout.message_bytes()),
                "total_bytes");
  if (reinterpret_cast<uintptr_t>(message.data()) % alignment)
    throw Error(ErrorKind::usage, fmt::format("the message buffer is not aligned to {} bytes", alignment), "message");
}

void check_residuals(const Layout& layout, const Residuals& r) {
  if (r.before.size() != layout.tensors.size() || r.after.size() != layout.tensors.size())
    throw Error(ErrorKind::usage,
                fmt::format("{} residuals given; the plan has {} tensors", r.before.size(), layout.tensors.size()),
                "residuals");
  if (r.dtype == DType::f16) throw Error(ErrorKind::usage, "residual is f16; allowed are f32 and bf16", "residual");
  if (!(r.loss_scale > 0) || float_bits(r.loss_scale) >= kInfBits)
    throw Error(ErrorKind::usage, fmt::format("loss_scale is {}; allowed is a finite number above 0", r.loss_scale),
                "loss_scale");
  if (!(r.decay > 0 && r.decay <= 1))
    throw Error(ErrorKind::usage, fmt::format("decay is {}; allowed is above 0, to 1", r.decay), "decay");
  for (size_t i = 0; i < r.before.size(); ++i)
    if (!r.before[i] != !r.after[i] || (r.before[i] && r.before[i] == r.after[i]))
      throw Error(ErrorKind::usage, fmt::format("residuals of tensor {} need two different buffers, or none", i),
                  "residuals");
}

void check_write(const Layout& layout, Write write) {
  if (write == Write::set) return;
  for (const TensorSpec& t : layout.tensors)
    if (t.dtype != DType::f32)
      throw Error(ErrorKind::usage, fmt::format("Write::add wants f32; tensor '{}' is {}", t.name, name_of(t.dtype)),
                  "dtype");
}

}  // namespace gradwire
