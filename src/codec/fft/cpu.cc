// SPDX-License-Identifier: Apache-2.0
#include "codec/fft/cpu.h"

#include <bit>

#include "codec/blocks.h"

#if defined(GRADWIRE_HAS_CUDA)
#include "codec/fft/cuda.h"
#endif

namespace gradwire {
namespace {

// One unit of a group: where its values are in the group, and its words.
struct FftGroupUnit {
  uint64_t at;
  uint32_t size;
  uint32_t* words;
};

template <class Visit>
void for_units(const FftScheme& scheme, const Span& s, uint64_t group, Visit visit) {
  const uint64_t begin = group * fft_group(scheme), end = min_u64(s.count, begin + fft_group(scheme));
  const uint64_t words = fft_unit_words(scheme, scheme.chunk);
  for (uint64_t at = begin; at < end; at += scheme.chunk)
    visit(FftGroupUnit{at - begin, fft_size(scheme.chunk, end - at), s.region + at / scheme.chunk * words});
}

// The blocks of a group.
struct BlockRange {
  uint64_t begin, end;
};
BlockRange blocks_of(const FftScheme& scheme, const Span& s, uint64_t group) {
  const uint64_t from = group * fft_group(scheme);
  return {from / kBlock, div_up(min_u64(s.count, from + fft_group(scheme)), kBlock)};
}

const char* check_unit(const FftScheme& scheme, const RangeFloat& range, const FftGroupUnit& u) {
  const uint32_t bins = u.size / 2, kept = fft_kept(scheme, bins), code_words = fft_code_words(scheme, kept);
  const uint32_t *codes = u.words + bins / 32, *side = codes + code_words;
  if (*side == kMarker) {
    for (const uint32_t* word = u.words; word < side; ++word)
      if (*word != 0) return word < codes ? "bitmap" : "codes";
    return nullptr;
  }
  if (*side >= kInfBits) return "scales";
  uint32_t found = 0;
  for (const uint32_t* word = u.words; word < codes; ++word) found += static_cast<uint32_t>(std::popcount(*word));
  if (found != kept) return "bitmap";
  if (scheme.bits == 32) {
    for (uint32_t i = 0; i < 2 * kept; ++i)
      if ((codes[i] & 0x7fffffffu) > float_bits(1.0f)) return "codes";
    return nullptr;
  }
  const uint32_t used = 2 * kept * scheme.bits % 32;
  if (used && side[-1] >> used) return "padding";
  const uint32_t mask = (1u << scheme.bits) - 1;
  if (range.most() < mask)  // else every code is one
    for (uint32_t i = 0; i < 2 * kept; ++i) {
      const uint32_t at = i * scheme.bits;
      const uint64_t pair = codes[at / 32] | uint64_t{codes[at / 32 + 1]} << 32;
      if ((pair >> (at % 32) & mask) > range.most()) return "codes";
    }
  return nullptr;
}

}  // namespace

void encode_fft(const Kernels& kernels, const FftKernels& fft, const FftScheme& scheme, const Span& s, uint64_t begin,
                uint64_t end, Scratch& scratch, LaneSums& check) {
  const FftWork work(scratch);
  const RangeFloat range = range_float_of(scheme);
  const float unscale = s.unscale;
  uint32_t memory = 0;
  const uint32_t* last = s.region;
  for (uint64_t group = begin; group < end; ++group) {
    const BlockRange blocks = blocks_of(scheme, s, group);
    const bool whole = (group + 1) * fft_group(scheme) <= s.count;
    const float* x = work.x;
    if (s.dtype == DType::f32 && !s.before && whole) {
      x = static_cast<const float*>(s.in) + blocks.begin * kBlock;
    } else {
      load_blocks(kernels, s, blocks.begin, blocks.end, work.x);
      if (!whole)  // the last chunk may be padded beyond its last block
        for (uint64_t i = (blocks.end - blocks.begin) * kBlock; i < fft_group(scheme); ++i) work.x[i] = 0;
    }
    for_units(scheme, s, group, [&](const FftGroupUnit& u) {
      fft.encode(scheme, range, x + u.at, u.size, u.words, s.before ? work.y + u.at : nullptr, unscale, memory, work);
      last = u.words + fft_size_words(scheme, u.size);
    });
    if (s.before)
      for (uint64_t block = blocks.begin; block < blocks.end; ++block)
        kernels.put_residual(s, block, work.y + (block - blocks.begin) * kBlock);
  }
  if (begin >= end) return;
  const uint32_t* first = s.region + begin * fft_group(scheme) / scheme.chunk * fft_unit_words(scheme, scheme.chunk);
  add_words(kernels, first, static_cast<uint64_t>(last - first),
            s.region_index + static_cast<uint64_t>(first - s.region), check);
}

const char* check_fft(const FftScheme& scheme, const Span& s, uint64_t group) {
  const RangeFloat range = range_float_of(scheme);
  const char* field = nullptr;
  for_units(scheme, s, group, [&](const FftGroupUnit& u) {
    if (!field) field = check_unit(scheme, range, u);
  });
  return field;
}

void decode_fft(const Kernels& kernels, const FftKernels& fft, const FftScheme& scheme, const Span& s, uint64_t begin,
                uint64_t end, Scratch& scratch) {
  const FftWork work(scratch);
  const RangeFloat range = range_float_of(scheme);
  for (uint64_t group = begin; group < end; ++group) {
    const BlockRange blocks = blocks_of(scheme, s, group);
    const bool direct = s.dtype == DType::f32 && !s.add && (group + 1) * fft_group(scheme) <= s.count;
    float* y = direct ? static_cast<float*>(s.out) + blocks.begin * kBlock : work.y;
    for_units(scheme, s, group,
              [&](const FftGroupUnit& u) { fft.decode(scheme, range, u.words, u.size, y + u.at, work); });
    if (!direct)
      for (uint64_t block = blocks.begin; block < blocks.end; ++block)
        kernels.put(s, block, work.y + (block - blocks.begin) * kBlock);
  }
}

namespace {

// Groups of a task: as many as make 64 blocks, large against the cost of a call and small against a cache.
uint64_t task_groups(const FftScheme& scheme) { return 64 * kBlock / fft_group(scheme); }

uint64_t region_words_of(const Scheme& s, uint64_t count) { return fft_region_words(fft_scheme(s), count); }

uint64_t tasks_of(const Scheme& s, uint64_t count) {
  return div_up(fft_groups(fft_scheme(s), count), task_groups(fft_scheme(s)));
}

struct GroupRange {
  uint64_t begin, end;
};
GroupRange groups_of(const FftScheme& scheme, const Span& s, uint64_t task) {
  const uint64_t begin = task * task_groups(scheme);
  return {begin, min_u64(fft_groups(scheme, s.count), begin + task_groups(scheme))};
}

void encode_task(const Kernels& kernels, const Span& s, uint64_t task, Scratch& scratch, LaneSums& check) {
  const FftScheme scheme = fft_scheme(*s.scheme);
  const GroupRange groups = groups_of(scheme, s, task);
  encode_fft(kernels, fft_kernels(kernels), scheme, s, groups.begin, groups.end, scratch, check);
}

UnitProblem check_task(const Span& s, uint64_t task) {
  const FftScheme scheme = fft_scheme(*s.scheme);
  const GroupRange groups = groups_of(scheme, s, task);
  for (uint64_t group = groups.begin; group < groups.end; ++group)
    if (const char* field = check_fft(scheme, s, group)) return {field, group};
  return {};
}

void decode_task(const Kernels& kernels, const Span& s, uint64_t task, Scratch& scratch) {
  const FftScheme scheme = fft_scheme(*s.scheme);
  const GroupRange groups = groups_of(scheme, s, task);
  decode_fft(kernels, fft_kernels(kernels), scheme, s, groups.begin, groups.end, scratch);
}

}  // namespace

const UnitOps kFftUnits = {
    .words = region_words_of,
    .tasks = tasks_of,
    .encode = encode_task,
    .check = check_task,
    .decode = decode_task,
#if defined(GRADWIRE_HAS_CUDA)
    .cuda = &kFftCudaUnits,
#endif
};

}  // namespace gradwire
