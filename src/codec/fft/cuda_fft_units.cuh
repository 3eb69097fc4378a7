// SPDX-License-Identifier: Apache-2.0
// Units of the codec `fft` on a GPU: read once, transformed, thinned out, packed and written by one team of
// cuda_fft.cuh. What error feedback keeps needs the inverse as well, in the same kernel.
//
// Included by codec/cuda_fft.cu inside an anonymous namespace, after cuda_fft.cuh.

struct FftLaunch {
  CudaFft fft;
  RangeFloat range;
  uint32_t kept;  // of a full chunk
};

// A unit and where it is worked on.
struct FftUnit {
  CudaPiece piece;
  uint64_t at;     // its first element in the piece
  uint64_t index;  // its first word in the body
  uint32_t kept;   // bins
};

// Values 2 j and 2 j + 1 of a unit, feedback added; zero beyond the tensor's end.
template <bool kFeedback, bool kTail, bool kFast>
__device__ __forceinline__ float2 load_pair(const CudaJob& job, const FftUnit& u, uint32_t j) {
  const void* in = job.in[u.piece.tensor];
  const uint64_t at = u.at + 2 * j;
  float2 x{0.0f, 0.0f};
  if constexpr (kFast) {
    const float2* from = reinterpret_cast<const float2*>(static_cast<const float*>(in) + at);
    x = kFeedback ? *from : __ldcs(from);
  } else {
    if (!kTail || at < u.piece.count) x.x = widen_at(in, job.dtype, at);
    if (!kTail || at + 1 < u.piece.count) x.y = widen_at(in, job.dtype, at + 1);
  }
  if constexpr (kFeedback) {
    const void* before = job.before[u.piece.tensor];
    if (before == nullptr) return x;
    if (!kTail || at < u.piece.count) x.x = x.x + widen_at(before, job.residual, at) * job.loss_scale;
    if (!kTail || at + 1 < u.piece.count) x.y = x.y + widen_at(before, job.residual, at + 1) * job.loss_scale;
  }
  return x;
}

// The unit's words from shared memory to the body, each by the lane of its place there.
template <int kBins>
__device__ __forceinline__ void write_words(const CudaJob& job, const FftTeam<kBins>& team, const FftUnit& u,
                                            uint32_t count, Check& check) {
  for (uint64_t i = (u.index & ~uint64_t{31}) + team.t; i < u.index + count; i += FftTeam<kBins>::kTeam)
    if (i >= u.index) {
      const uint32_t word = team.words[i - u.index];
      job.body[i] = word;
      check.row(word, i >> 5);
    }
}

__device__ __forceinline__ float fft_value(float y, float scale) { return FftP::clamp(y * scale, 0x1.fffffep127f); }

// --- encode ------------------------------------------------------------------------------------------------------

// kFast: f32 that can be read in pairs. kStaged: the unit's values are in team.stage, and those of the next one, if there is
// one, are sent for as soon as they are taken out.
template <int kBins, bool kFeedback, bool kTail, bool kFast, bool kStaged = false>
__device__ __forceinline__ void fft_encode_unit(const CudaJob& job, const FftLaunch& l, FftTeam<kBins>& team,
                                                const FftUnit& u, uint32_t& memory, Check& check,
                                                const float* next = nullptr) {
  using Team = FftTeam<kBins>;
  const FftScheme& scheme = l.fft.scheme;
  const uint32_t t = team.t, kept = u.kept, code_words = fft_code_words(scheme, kept), side = Team::kWords + code_words;
  FftC a[16];
  uint32_t top = 0;
  if constexpr (kStaged) {
    __pipeline_wait_prior(0);
    team.sync();
  }
  if (team.first_works()) {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const float2 x =
          kStaged ? team.stage[t + kBins / 16 * i] : load_pair<kFeedback, kTail, kFast>(job, u, t + kBins / 16 * i);
      a[i] = {x.x, x.y};
    }
#pragma unroll
    for (int i = 0; i < 16; ++i)
      top = max(top, max(float_bits(a[i].r) & 0x7fffffffu, float_bits(a[i].i) & 0x7fffffffu));
  }
  if constexpr (kStaged) {
    team.sync();
    if (next) team.fetch(next);
  }
  top = team.team_max(top);
  const bool residual = kFeedback && job.before[u.piece.tensor] != nullptr;

  if (top >= kInfBits) {
    for (uint32_t w = t; w <= side; w += Team::kTeam) team.words[w] = w == side ? kMarker : 0;
    team.sync();
    write_words(job, team, u, side + 1, check);
    if (residual)
      for (uint32_t j = t; j < kBins; j += Team::kTeam) {
        store_residual(job, u.piece, u.at + 2 * j, bits_float(kMarker));
        store_residual(job, u.piece, u.at + 2 * j + 1, bits_float(kMarker));
      }
    team.sync();
    return;
  }

  const Grid grid = grid_for(top);
  if (grid.pre == 1.0f) {
#pragma unroll
    for (int i = 0; i < 16; ++i) a[i] = {a[i].r * grid.grid, a[i].i * grid.grid};
  } else {
#pragma unroll
    for (int i = 0; i < 16; ++i) a[i] = {a[i].r * grid.pre * grid.grid, a[i].i * grid.pre * grid.grid};
  }
  FftC slots[Team::kSlots];
  team.forward(a, l.fft.table, slots);
  {
    uint32_t weight[Team::kSlots];
#pragma unroll
    for (int i = 0; i < Team::kSlots; ++i) weight[i] = float_bits(FftP::weight(slots[i]));
    if (t == 0) weight[0] = float_bits(0.5f * FftP::weight(slots[0]));
    team.choose(weight, kept, fft_power(grid), memory);
  }

  // The kept bins, one after another, to the front of `numbers`.
  uint32_t most = 0;
#pragma unroll
  for (int i = 0; i < Team::kSlots; ++i) {
    const uint32_t rank = team.rank(i);
    if (rank != ~0u) {
      team.numbers[rank] = make_float2(slots[i].r, slots[i].i);
      most = max(most, max(float_bits(slots[i].r) & 0x7fffffffu, float_bits(slots[i].i) & 0x7fffffffu));
    }
  }
  for (uint32_t w = t; w < code_words; w += Team::kTeam) team.words[Team::kWords + w] = 0;
  most = team.team_max(most);
  const FftScale scale = fft_scale(bits_float(most), 2 * kBins, fft_power(grid));
  if (t == 0) team.words[side] = float_bits(scale.side);
  team.sync();
  for (uint32_t j = t; j < kept; j += Team::kTeam) {
    const float2 pair = team.numbers[j];
    uint32_t* codes = team.words + Team::kWords;
    if (scheme.bits == 32) {
      const float r = FftP::clamp(pair.x * scale.times, 1.0f), i = FftP::clamp(pair.y * scale.times, 1.0f);
      codes[2 * j] = float_bits(r);
      codes[2 * j + 1] = float_bits(i);
      if constexpr (kFeedback) team.numbers[j] = make_float2(r, i);
    } else {
      const uint32_t r = FftP::range_encode(pair.x * scale.times, l.range),
                     i = FftP::range_encode(pair.y * scale.times, l.range);
      const uint32_t both = r | i << scheme.bits, at = j * 2 * scheme.bits, shift = at % 32;
      atomicOr(codes + at / 32, both << shift);
      if (shift + 2 * scheme.bits > 32) atomicOr(codes + at / 32 + 1, both >> (32 - shift));
      if constexpr (kFeedback)
        team.numbers[j] = make_float2(FftP::range_decode(r, l.range), FftP::range_decode(i, l.range));
    }
  }
  team.sync();
  write_words(job, team, u, side + 1, check);

  if (residual) {
#pragma unroll
    for (int i = 0; i < Team::kSlots; ++i) {
      const uint32_t rank = team.rank(i);
      const float2 pair = rank != ~0u ? team.numbers[rank] : make_float2(0.0f, 0.0f);
      slots[i] = {pair.x, pair.y};
    }
    team.sync();
    team.inverse(l.fft.table, slots);
#pragma unroll
    for (int i = 0; i < Team::kSlots; ++i) {
      const uint32_t j = team.bin(i);
      const float2 x = load_pair<kFeedback, kTail, kFast>(job, u, j);
      store_residual(job, u.piece, u.at + 2 * j, (x.x - fft_value(slots[i].i, scale.side)) * job.unscale);
      store_residual(job, u.piece, u.at + 2 * j + 1, (x.y - fft_value(slots[i].r, scale.side)) * job.unscale);
    }
  }
  team.sync();
}

// --- decode ------------------------------------------------------------------------------------------------------

template <int kBins, bool kTail>
__device__ __forceinline__ uint32_t fft_decode_unit(const CudaJob& job, const FftLaunch& l, FftTeam<kBins>& team,
                                                    const FftUnit& u, Check& check) {
  using Team = FftTeam<kBins>;
  const FftScheme& scheme = l.fft.scheme;
  const uint32_t t = team.t, kept = u.kept, code_words = fft_code_words(scheme, kept),
                 side_at = Team::kWords + code_words;
  uint32_t problem = 0, if_marked = 0;
  for (uint64_t i = (u.index & ~uint64_t{31}) + t; i < u.index + side_at + 1; i += Team::kTeam)
    if (i >= u.index) {
      const uint32_t word = __ldcs(job.body + i), w = static_cast<uint32_t>(i - u.index);
      check.row(word, i >> 5);
      team.words[w] = word;
      if (word != 0 && w < side_at) if_marked |= w < Team::kWords ? kBadBitmap : kBadCodes;
    }
  team.sync();
  const uint32_t side = team.words[side_at];
  void* out = job.out[u.piece.tensor];
  FftC slots[Team::kSlots];
  float scale = bits_float(side);
  if (side == kMarker) {
    problem |= if_marked;
#pragma unroll
    for (int i = 0; i < Team::kSlots; ++i) slots[i] = {scale, scale};
  } else {
    if (side >= kInfBits) {
      problem |= kBadSide;
      scale = 0;
    }
    const uint32_t found = team.count_before();
    if (found != kept) problem |= kBadBitmap;
    const uint32_t* codes = team.words + Team::kWords;
    const uint32_t used = 2 * kept * scheme.bits % 32;
    if (t == 0 && used && codes[code_words - 1] >> used) problem |= kBadPadding;
    for (uint32_t j = t; j < kept; j += Team::kTeam) {
      if (scheme.bits == 32) {
        const uint32_t r = codes[2 * j], i = codes[2 * j + 1];
        if (max(r & 0x7fffffffu, i & 0x7fffffffu) > 0x3f800000u) problem |= kBadCodes;
        team.numbers[j] = make_float2(bits_float(r), bits_float(i));
      } else {
        // The word after the last code is the side value, so two words can be read.
        const uint32_t at = j * 2 * scheme.bits, mask = (1u << scheme.bits) - 1;
        const uint32_t both = __funnelshift_r(codes[at / 32], codes[at / 32 + 1], at % 32);
        const uint32_t r = both & mask, i = both >> scheme.bits & mask;
        if (max(r, i) > l.range.most()) problem |= kBadCodes;
        team.numbers[j] = make_float2(FftP::range_decode(r, l.range), FftP::range_decode(i, l.range));
      }
    }
    team.sync();
#pragma unroll
    for (int i = 0; i < Team::kSlots; ++i) {
      const uint32_t rank = team.rank(i);
      const float2 pair = rank < kept ? team.numbers[rank] : make_float2(0.0f, 0.0f);
      slots[i] = {pair.x, pair.y};
    }
    team.sync();
    team.inverse(l.fft.table, slots);
#pragma unroll
    for (int i = 0; i < Team::kSlots; ++i) slots[i] = {fft_value(slots[i].r, scale), fft_value(slots[i].i, scale)};
  }
  if (!kTail && job.aligned && job.dtype == DType::f32 && !job.add) {
    float2* to = reinterpret_cast<float2*>(static_cast<float*>(out) + u.at);
#pragma unroll
    for (int i = 0; i < Team::kSlots; ++i) __stcs(to + team.bin(i), make_float2(slots[i].i, slots[i].r));
  } else {
#pragma unroll
    for (int i = 0; i < Team::kSlots; ++i) {
      const uint64_t at = u.at + 2 * team.bin(i);
      if (!kTail || at < u.piece.count) store_value(out, job.dtype, job.add, at, slots[i].i);
      if (!kTail || at + 1 < u.piece.count) store_value(out, job.dtype, job.add, at + 1, slots[i].r);
    }
  }
  team.sync();
  return problem;
}

// --- kernels -----------------------------------------------------------------------------------------------------

constexpr int kFftTailThreads = 128;

// The unit at place i of the group; false if it is a partial one, which is for fft_tails.
template <int kBins>
__device__ __forceinline__ bool full_unit(const CudaJob& job, const FftLaunch& l, uint64_t i, uint32_t words,
                                          FftUnit& u) {
  if (i >= l.fft.units) return false;
  const uint32_t slot = job.piece_count == 1 ? 0 : __ldg(l.fft.unit_piece + i);
  const CudaPiece& piece = job.pieces[slot];
  const uint64_t unit = i - (job.piece_count == 1 ? 0 : l.fft.first_unit[slot]);
  if ((unit + 1) * (2 * kBins) > piece.count) return false;
  u = FftUnit{piece, unit * (2 * kBins), piece.region + unit * words, l.kept};
  return true;
}

// work(team, unit, where the values of the next full unit are, or null).
template <int kBins, bool kStaged, class Work>
__device__ __forceinline__ void fft_full_units(const CudaJob& job, const FftLaunch& l, char* shared, const Work& work) {
  using Team = FftTeam<kBins>;
  constexpr uint32_t kTeams = Team::kBlockThreads / Team::kTeam;
  const uint32_t number = threadIdx.x / Team::kTeam, words = Team::kWords + fft_code_words(l.fft.scheme, l.kept) + 1;
  Team team(shared + number * Team::shared_bytes(words, kStaged), kStaged, threadIdx.x % Team::kTeam);
  const uint64_t stride = uint64_t{gridDim.x} * kTeams;
  uint64_t i = uint64_t{blockIdx.x} * kTeams + number;
  FftUnit u;
  const auto next_full = [&](uint64_t from, FftUnit& to) {  // the first full unit from there on
    while (from < l.fft.units && !full_unit<kBins>(job, l, from, words, to)) from += stride;
    return from;
  };
  const auto values = [&](const FftUnit& of) { return static_cast<const float*>(job.in[of.piece.tensor]) + of.at; };
  i = next_full(i, u);
  if (kStaged && i < l.fft.units) team.fetch(values(u));
  while (i < l.fft.units) {
    full_unit<kBins>(job, l, i, words, u);
    const float* ahead = nullptr;
    FftUnit next;
    i = next_full(i + stride, next);
    if (kStaged && i < l.fft.units) ahead = values(next);
    work(team, u, ahead);
  }
}

// The partial chunks at the ends of pieces, a thread block each.
template <class Work>
__device__ __forceinline__ void fft_tails(const CudaJob& job, const FftLaunch& l, char* shared, const Work& work) {
  const FftScheme& scheme = l.fft.scheme;
  for (uint32_t slot = blockIdx.x; slot < job.piece_count; slot += gridDim.x) {
    const CudaPiece& piece = job.pieces[slot];
    const uint64_t units = piece.count / scheme.chunk, rest = piece.count % scheme.chunk;
    if (rest == 0) continue;
    const uint32_t kept = fft_kept(scheme, fft_size(scheme.chunk, rest) / 2);
    const FftUnit u{piece, units * scheme.chunk, piece.region + units * fft_unit_words(scheme, scheme.chunk), kept};
    const auto run = [&]<int kBins>() {
      if (threadIdx.x >= FftTeam<kBins>::kTeam) return;
      FftTeam<kBins> team(shared, false, threadIdx.x);
      work(team, u);
    };
    switch (fft_size(scheme.chunk, rest) / 2) {
      case 32:
        run.template operator()<32>();
        break;
      case 64:
        run.template operator()<64>();
        break;
      case 128:
        run.template operator()<128>();
        break;
      case 256:
        run.template operator()<256>();
        break;
      case 512:
        run.template operator()<512>();
        break;
      case 1024:
        run.template operator()<1024>();
        break;
      default:
        run.template operator()<2048>();
        break;
    }
    __syncthreads();
  }
}

// Thread blocks a multiprocessor shall hold, so that there are so many warps.
template <int kBins>
constexpr int fft_blocks(int warps) {
  return warps * 32 / FftTeam<kBins>::kBlockThreads;
}

extern __shared__ __align__(16) char fft_shared[];

template <int kBins, bool kFeedback, bool kFast>
__global__ void __launch_bounds__(FftTeam<kBins>::kBlockThreads, fft_blocks<kBins>(kFeedback ? 16 : 20))
    fft_encode_full(const __grid_constant__ CudaJob job, const __grid_constant__ FftLaunch l) {
  Check check;
  uint32_t memory = 0;
  constexpr bool kStaged = kFast && !kFeedback;
  fft_full_units<kBins, kStaged>(job, l, fft_shared, [&](FftTeam<kBins>& team, const FftUnit& u, const float* next) {
    fft_encode_unit<kBins, kFeedback, false, kFast, kStaged>(job, l, team, u, memory, check, next);
  });
  __syncthreads();
  check.flush(job.check);
}

template <bool kFeedback>
__global__ void __launch_bounds__(kFftTailThreads)
    fft_encode_tails(const __grid_constant__ CudaJob job, const __grid_constant__ FftLaunch l) {
  Check check;
  fft_tails(job, l, fft_shared, [&]<int kBins>(FftTeam<kBins>& team, const FftUnit& u) {
    uint32_t memory = 0;  // not from unit to unit: teams differ, and all of a team must search alike
    fft_encode_unit<kBins, kFeedback, true, false>(job, l, team, u, memory, check);
  });
  check.flush(job.check);
}

template <int kBins>
__global__ void __launch_bounds__(FftTeam<kBins>::kBlockThreads, fft_blocks<kBins>(24))
    fft_decode_full(const __grid_constant__ CudaJob job, const __grid_constant__ FftLaunch l) {
  Check check;
  uint32_t problem = 0;
  fft_full_units<kBins, false>(job, l, fft_shared, [&](FftTeam<kBins>& team, const FftUnit& u, const float*) {
    problem |= fft_decode_unit<kBins, false>(job, l, team, u, check);
  });
  __syncthreads();
  report(job, problem, check);
}

__global__ void __launch_bounds__(kFftTailThreads)
    fft_decode_tails(const __grid_constant__ CudaJob job, const __grid_constant__ FftLaunch l) {
  Check check;
  uint32_t problem = 0;
  fft_tails(job, l, fft_shared, [&]<int kBins>(FftTeam<kBins>& team, const FftUnit& u) {
    problem |= fft_decode_unit<kBins, true>(job, l, team, u, check);
  });
  report(job, problem, check);
}
