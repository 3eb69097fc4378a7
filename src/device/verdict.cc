// SPDX-License-Identifier: Apache-2.0
#include "device/verdict.h"

#include <array>
#include <cstring>

#include "core/bits.h"

namespace gradwire {
namespace {

// Exponents of all ones. No early end inside a stretch: without branches it runs at the speed of memory.
template <class Word>
bool finite(const Word* data, uint64_t count, Word exponent) {
  constexpr uint64_t kStretch = 4096;
  for (uint64_t at = 0; at < count; at += kStretch) {
    const uint64_t end = at + kStretch < count ? at + kStretch : count;
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

Verdict::Verdict(const Device& device)
    : memory_(memory_of(device)), words_(static_cast<uint32_t*>(memory_->allocate(2 * sizeof(uint32_t)))) {
  memory_->zero(words_, 2 * sizeof(uint32_t));
}
Verdict::~Verdict() { memory_->release(words_); }

void Verdict::look(const Device& device, std::span<const ResultSpan> results) {
  if (on_gpu(device)) return cuda_look(device.index, device.stream, results, words_);
  for (const ResultSpan& span : results)
    if (!words_[0] && !finite(span)) words_[0] = 1;
}

void Verdict::keep_if_bad(const Device& device, std::span<const KeepSpan> spans) {
  if (on_gpu(device)) return cuda_keep_if_bad(device.index, device.stream, spans, words_);
  if (!words_[0]) return;
  for (const KeepSpan& span : spans) std::memcpy(span.to, span.from, span.count);
}

void Verdict::close(const Device& device) {
  if (on_gpu(device)) return cuda_close(device.index, device.stream, words_);
  words_[1] += words_[0];
  words_[0] = 0;
}

bool Verdict::bad() const {
  uint32_t flag = 0;
  memory_->to_host(&flag, words_, sizeof flag);
  return flag != 0;
}

uint64_t Verdict::skipped() const {
  std::array<uint32_t, 2> both{};
  memory_->to_host(both.data(), words_, sizeof both);
  return both[1];
}

#if !defined(GRADWIRE_HAS_CUDA)
void cuda_look(int, void*, std::span<const ResultSpan>, uint32_t*) { no_cuda(); }
void cuda_keep_if_bad(int, void*, std::span<const KeepSpan>, const uint32_t*) { no_cuda(); }
void cuda_close(int, void*, uint32_t*) { no_cuda(); }
#endif

}  // namespace gradwire
