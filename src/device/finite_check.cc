// SPDX-License-Identifier: Apache-2.0
#include "device/finite_check.h"

#include <array>
#include <cstring>

#include "core/bits.h"

namespace gradwire {
namespace {

// A value is not finite if all bits of its exponent are set. The loop over a run of values has no branch, so that it
// is vectorised and runs at the speed of memory; it can only stop between runs.
template <class Word>
bool finite(const Word* data, uint64_t count, Word exponent) {
  constexpr uint64_t kRun = 4096;
  for (uint64_t at = 0; at < count; at += kRun) {
    const uint64_t end = at + kRun < count ? at + kRun : count;
    Word bad = 0;
    for (uint64_t i = at; i < end; ++i)
      bad = static_cast<Word>(bad | ((data[i] & exponent) == exponent ? ~Word{0} : Word{0}));
    if (bad) return false;
  }
  return true;
}

bool finite(const ResultSpan& span) {
  if (span.dtype == DType::f32) return finite(static_cast<const uint32_t*>(span.data), span.count, kInfBits);
  const uint16_t exponent = span.dtype == DType::f16 ? 0x7c00 : 0x7f80;
  return finite(static_cast<const uint16_t*>(span.data), span.count, exponent);
}

bool on_gpu(const Device& device) { return device.kind == Device::Kind::cuda; }

}  // namespace

FiniteCheck::FiniteCheck(const Device& device)
    : memory_(memory_of(device)), words_(static_cast<uint32_t*>(memory_->allocate(3 * sizeof(uint32_t)))) {
  memory_->zero(words_, 3 * sizeof(uint32_t));
}
FiniteCheck::~FiniteCheck() { memory_->release(words_); }

void FiniteCheck::check(const Device& device, std::span<const ResultSpan> results) {
  if (on_gpu(device)) return cuda_check_finite(device.index, device.stream, results, words_);
  for (const ResultSpan& span : results)
    if (!words_[0] && !finite(span)) words_[0] = 1;
}

void FiniteCheck::fail() {
  const uint32_t bad = 1;
  memory_->from_host(words_, &bad, sizeof bad);
}

void FiniteCheck::copy_if_bad(const Device& device, std::span<const CopySpan> spans) {
  if (on_gpu(device)) return cuda_copy_if_bad(device.index, device.stream, spans, words_);
  if (!words_[0]) return;
  for (const CopySpan& span : spans) std::memcpy(span.to, span.from, span.count);
}

void FiniteCheck::end_step(const Device& device) {
  if (on_gpu(device)) return cuda_end_check(device.index, device.stream, words_);
  words_[1] += words_[0];
  words_[2] = words_[0];
  words_[0] = 0;
}

bool FiniteCheck::bad() const {
  uint32_t flag = 0;
  memory_->to_host(&flag, words_, sizeof flag);
  return flag != 0;
}

bool FiniteCheck::last_bad() const {
  uint32_t flag = 0;
  memory_->to_host(&flag, words_ + 2, sizeof flag);
  return flag != 0;
}

uint64_t FiniteCheck::skipped() const {
  std::array<uint32_t, 2> both{};
  memory_->to_host(both.data(), words_, sizeof both);
  return both[1];
}

#if !defined(GRADWIRE_HAS_CUDA)
void cuda_check_finite(int, void*, std::span<const ResultSpan>, uint32_t*) { no_cuda(); }
void cuda_copy_if_bad(int, void*, std::span<const CopySpan>, const uint32_t*) { no_cuda(); }
void cuda_end_check(int, void*, uint32_t*) { no_cuda(); }
#endif

}  // namespace gradwire
