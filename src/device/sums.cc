// SPDX-License-Identifier: Apache-2.0
// The sums of a processor, and who does those of a GPU. A build without CUDA refused such a device long before: there
// is no memory for its sums.
#include "device/sums.h"

#include <algorithm>

#include "core/bits.h"
#include "device/memory.h"

namespace gradwire {

void divide(const Device& device, std::span<const SumSpan> sums, float divisor) {
  if (device.kind == Device::Kind::cuda) return cuda_divide(device.index, device.stream, sums, divisor);
  if (divisor == 1.0f) return;
  for (const SumSpan& sum : sums)
    for (float* x = sum.data; x < sum.data + sum.count; ++x) *x /= divisor;
}

void narrow(const Device& device, std::span<const NarrowSpan> spans) {
  if (device.kind == Device::Kind::cuda) return cuda_narrow(device.index, device.stream, spans);
  for (const NarrowSpan& s : spans)
    std::transform(s.from, s.from + s.count, static_cast<uint16_t*>(s.to),
                   s.dtype == DType::f16 ? f32_to_f16 : f32_to_bf16);
}

void settle_nans(const Device& device, std::span<const SumSpan> values) {
  if (device.kind == Device::Kind::cuda) cuda_divide(device.index, device.stream, values, 1.0f);
}

#if !defined(GRADWIRE_HAS_CUDA)
void cuda_divide(int, void*, std::span<const SumSpan>, float) { no_cuda(); }
void cuda_narrow(int, void*, std::span<const NarrowSpan>) { no_cuda(); }
#endif

}  // namespace gradwire
