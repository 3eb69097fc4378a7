// SPDX-License-Identifier: Apache-2.0
// Units of the codec `fft` on a GPU: read once, transformed, thinned out, packed and written by one team of
// cuda_team.cuh. What error feedback keeps needs the inverse as well, in the same kernel. The kernels go by units, not
// by the items of a job.
//
// Included by cuda.cu inside an anonymous namespace, after cuda_team.cuh.

struct FftLaunch {
  FftScheme scheme;
  const float2* table = nullptr;         // fft_table(), re beside im
  const uint32_t* unit_piece = nullptr;  // unit of the group -> piece; unused where there is one piece
  const uint64_t* first_unit = nullptr;  // piece -> number of its first unit in the group; as above
  uint64_t units = 0;                    // of all pieces, fft_units() each
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

// Values 2 j and 2 j + 1 of a unit, feedback not yet added; zero beyond the tensor's end.
template <bool kTail, bool kFast>
__device__ __forceinline__ float2 load_pair(const CudaJob& job, const FftUnit& u, uint32_t j) {
  const void* in = job.in[u.piece.tensor];
  const uint64_t at = u.at + 2 * j;
  if constexpr (kFast) return __ldcs(reinterpret_cast<const float2*>(static_cast<const float*>(in) + at));
  float2 x{0.0f, 0.0f};
  if (!kTail || at < u.piece.count) x.x = widen_at(in, job.dtype, at);
  if (!kTail || at + 1 < u.piece.count) x.y = widen_at(in, job.dtype, at + 1);
  return x;
}

// Adds what error feedback has kept of them.
template <bool kTail>
__device__ __forceinline__ float2 add_residual_pair(const CudaJob& job, const FftUnit& u, uint32_t j, float2 x) {
  const void* before = job.before[u.piece.tensor];
  const uint64_t at = u.at + 2 * j;
  if (before == nullptr) return x;
  if (!kTail || at < u.piece.count) x.x = x.x + widen_at(before, job.residual, at) * job.loss_scale;
  if (!kTail || at + 1 < u.piece.count) x.y = x.y + widen_at(before, job.residual, at + 1) * job.loss_scale;
  return x;
}

// Whether the residuals of a full unit can be read and written in pairs.
__device__ __forceinline__ bool residuals_in_pairs(const CudaJob& job, const FftUnit& u) {
  const auto before = reinterpret_cast<uintptr_t>(job.before[u.piece.tensor]),
             after = reinterpret_cast<uintptr_t>(job.after[u.piece.tensor]);
  return before != 0 && job.residual == DType::f32 && (before | after) % sizeof(float2) == 0;
}
__device__ __forceinline__ void store_residual_pair(const CudaJob& job, const FftUnit& u, uint32_t j, float2 r,
                                                    bool in_pairs) {
  const uint64_t at = u.at + 2 * j;
  if (in_pairs && r.x == r.x && r.y == r.y) {
    __stcs(reinterpret_cast<float2*>(static_cast<float*>(job.after[u.piece.tensor]) + at), r);
  } else {
    store_residual(job, u.piece, at, r.x);
    store_residual(job, u.piece, at + 1, r.y);
  }
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

// What is known of a unit while it is encoded or decoded.
template <int kBins>
struct FftParams {
  uint32_t kept, code_words, side;  // side: where the scale stands, behind bitmap and codes
  __device__ __forceinline__ FftParams(const FftScheme& scheme, const FftUnit& u)
      : kept(u.kept), code_words(fft_code_words(scheme, u.kept)), side(FftTeam<kBins>::kWords + code_words) {}
};

// With feedback, where values can be read in pairs, the sums of gradient and residual stay in shared memory: the new
// residual wants them once more.
template <bool kFeedback, bool kTail, bool kFast>
constexpr bool kKeepsSums = kFeedback&& kFast && !kTail;

// Adds the residuals to the values of a unit, and keeps the sums.
template <int kBins, bool kTail, bool kFast>
__device__ __forceinline__ void add_unit_residuals(const CudaJob& job, FftTeam<kBins>& team, const FftUnit& u,
                                                   FftC (&a)[16]) {
  if (kFast && !kTail && residuals_in_pairs(job, u)) {
    const float2* from =
        reinterpret_cast<const float2*>(static_cast<const float*>(job.before[u.piece.tensor]) + u.at) + team.t;
    float2 e[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) e[i] = __ldcs(from + kBins / 16 * i);
#pragma unroll
    for (int i = 0; i < 16; ++i) a[i] = {a[i].r + e[i].x * job.loss_scale, a[i].i + e[i].y * job.loss_scale};
  } else {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const float2 x = add_residual_pair<kTail>(job, u, team.t + kBins / 16 * i, {a[i].r, a[i].i});
      a[i] = {x.x, x.y};
    }
  }
  if constexpr (kKeepsSums<true, kTail, kFast>) {
#pragma unroll
    for (int i = 0; i < 16; ++i) team.staged[team.t + kBins / 16 * i] = make_float2(a[i].r, a[i].i);
  }
}

// The values of a unit as the first pass wants them; returns the largest magnitude. kFast: f32 that can be read in
// pairs. kAhead: the values are in team.staged, and those of the next unit, if there is one, are sent for as soon as
// these are taken out. All loads come before all that is done with them, so that they wait together.
template <int kBins, bool kFeedback, bool kTail, bool kFast, bool kAhead>
__device__ __forceinline__ uint32_t load_unit(const CudaJob& job, FftTeam<kBins>& team, const FftUnit& u,
                                              const float* next, FftC (&a)[16]) {
  uint32_t top = 0;
  if constexpr (kAhead) {
    __pipeline_wait_prior(0);
    team.sync();
  }
  if (team.first_works()) {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const uint32_t j = team.t + kBins / 16 * i;
      const float2 x = kAhead ? team.staged[j] : load_pair<kTail, kFast>(job, u, j);
      a[i] = {x.x, x.y};
    }
    if constexpr (kFeedback) add_unit_residuals<kBins, kTail, kFast>(job, team, u, a);
#pragma unroll
    for (int i = 0; i < 16; ++i)
      top = max(top, max(float_bits(a[i].r) & 0x7fffffffu, float_bits(a[i].i) & 0x7fffffffu));
  }
  if constexpr (kAhead) {
    team.sync();
    if (next) team.fetch(next);
  }
  return team.team_max(top);
}

// A unit with a NaN or an Inf: words of zero and the marker; residuals stay.
template <int kBins>
__device__ __forceinline__ void encode_marked_unit(const CudaJob& job, const FftTeam<kBins>& team, const FftUnit& u,
                                                   uint32_t side, bool residual, Check& check) {
  using Team = FftTeam<kBins>;
  for (uint32_t w = team.t; w <= side; w += Team::kTeam) team.words[w] = w == side ? kMarker : 0;
  team.sync();
  write_words(job, team, u, side + 1, check);
  if (residual)
    for (uint32_t j = team.t; j < kBins; j += Team::kTeam) {
      store_residual(job, u.piece, u.at + 2 * j, bits_float(kMarker));
      store_residual(job, u.piece, u.at + 2 * j + 1, bits_float(kMarker));
    }
  team.sync();
}

__device__ __forceinline__ void bring_to_grid(Grid grid, FftC (&a)[16]) {
  if (grid.pre == 1.0f) {
#pragma unroll
    for (int i = 0; i < 16; ++i) a[i] = {a[i].r * grid.grid, a[i].i * grid.grid};
  } else {
#pragma unroll
    for (int i = 0; i < 16; ++i) a[i] = {a[i].r * grid.pre * grid.grid, a[i].i * grid.pre * grid.grid};
  }
}

// Sets the bitmap to the strongest bins.
template <int kBins>
__device__ __forceinline__ void choose_bins(FftTeam<kBins>& team, const FftC (&slots)[FftTeam<kBins>::kSlots],
                                            uint32_t kept, int power, uint32_t& memory) {
  uint32_t weight[FftTeam<kBins>::kSlots];
#pragma unroll
  for (int i = 0; i < FftTeam<kBins>::kSlots; ++i) weight[i] = float_bits(FftP::weight(slots[i]));
  if (team.t == 0) weight[0] = float_bits(0.5f * FftP::weight(slots[0]));
  team.choose(weight, kept, power, memory);
}

// The kept bins, one after another, to the front of `numbers`, and zeros to the words of the codes. Returns the largest
// magnitude of the parts.
template <int kBins>
__device__ __forceinline__ uint32_t gather_bins(FftTeam<kBins>& team, const FftC (&slots)[FftTeam<kBins>::kSlots],
                                                uint32_t code_words) {
  using Team = FftTeam<kBins>;
  uint32_t most = 0;
#pragma unroll
  for (int i = 0; i < Team::kSlots; ++i) {
    const uint32_t rank = team.rank(i);
    if (rank != ~0u) {
      team.numbers[rank] = make_float2(slots[i].r, slots[i].i);
      most = max(most, max(float_bits(slots[i].r) & 0x7fffffffu, float_bits(slots[i].i) & 0x7fffffffu));
    }
  }
  for (uint32_t w = team.t; w < code_words; w += Team::kTeam) team.words[Team::kWords + w] = 0;
  return team.team_max(most);
}

// The codes of the kept bins, into the words of the unit. A pair of codes may share a word with its neighbours, hence
// the atomic or. With feedback the parts that the receiver will see take the place of those that were there.
template <int kBins, bool kFeedback>
__device__ __forceinline__ void encode_bins(const FftLaunch& l, FftTeam<kBins>& team, uint32_t kept, float times) {
  using Team = FftTeam<kBins>;
  const uint32_t bits = l.scheme.bits;
  uint32_t* codes = team.words + Team::kWords;
  for (uint32_t j = team.t; j < kept; j += Team::kTeam) {
    const float2 pair = team.numbers[j];
    if (bits == 32) {
      const float r = FftP::clamp(pair.x * times, 1.0f), i = FftP::clamp(pair.y * times, 1.0f);
      codes[2 * j] = float_bits(r);
      codes[2 * j + 1] = float_bits(i);
      if constexpr (kFeedback) team.numbers[j] = make_float2(r, i);
    } else {
      using Range = RangeLanes<ScalarLane>;
      const uint32_t r = Range::encode(pair.x * times, l.range), i = Range::encode(pair.y * times, l.range);
      const uint32_t both = r | i << bits, at = j * 2 * bits, shift = at % 32;
      atomicOr(codes + at / 32, both << shift);
      if (shift + 2 * bits > 32) atomicOr(codes + at / 32 + 1, both >> (32 - shift));
      if constexpr (kFeedback) team.numbers[j] = make_float2(Range::decode(r, l.range), Range::decode(i, l.range));
    }
  }
}

// The parts in `numbers` back to their bins; zeros where nothing was kept.
template <int kBins>
__device__ __forceinline__ void spread_bins(const FftTeam<kBins>& team, uint32_t kept,
                                            FftC (&slots)[FftTeam<kBins>::kSlots]) {
#pragma unroll
  for (int i = 0; i < FftTeam<kBins>::kSlots; ++i) {
    const uint32_t rank = team.rank(i);
    const float2 pair = rank < kept ? team.numbers[rank] : make_float2(0.0f, 0.0f);
    slots[i] = {pair.x, pair.y};
  }
  team.sync();
}

// Encodes one unit. `memory` goes from unit to unit and only saves time.
template <int kBins, bool kFeedback, bool kTail, bool kFast, bool kAhead = false>
__device__ __forceinline__ void fft_encode_unit(const CudaJob& job, const FftLaunch& l, FftTeam<kBins>& team,
                                                const FftUnit& u, uint32_t& memory, Check& check,
                                                const float* next = nullptr) {
  const FftParams<kBins> p(l.scheme, u);
  FftC a[16];
  const uint32_t top = load_unit<kBins, kFeedback, kTail, kFast, kAhead>(job, team, u, next, a);
  const bool residual = kFeedback && job.before[u.piece.tensor] != nullptr;
  if (top >= kInfBits) return encode_marked_unit(job, team, u, p.side, residual, check);

  const Grid grid = grid_for(top);
  bring_to_grid(grid, a);
  FftC slots[FftTeam<kBins>::kSlots];
  team.forward(a, l.table, slots);
  choose_bins(team, slots, p.kept, fft_power(grid), memory);
  const uint32_t most = gather_bins(team, slots, p.code_words);
  const FftScale scale = fft_scale(bits_float(most), 2 * kBins, fft_power(grid));
  if (team.t == 0) team.words[p.side] = float_bits(scale.side);
  team.sync();
  encode_bins<kBins, kFeedback>(l, team, p.kept, scale.times);
  team.sync();
  write_words(job, team, u, p.side + 1, check);

  if (residual) {
    spread_bins(team, p.kept, slots);
    team.inverse(l.table, slots);
    const bool in_pairs = kFast && !kTail && residuals_in_pairs(job, u);
#pragma unroll
    for (int i = 0; i < FftTeam<kBins>::kSlots; ++i) {
      const uint32_t j = team.bin(i);
      const float2 x = kKeepsSums<kFeedback, kTail, kFast>
                           ? team.staged[j]
                           : add_residual_pair<kTail>(job, u, j, load_pair<kTail, kFast>(job, u, j));
      const float2 r{(x.x - fft_value(slots[i].i, scale.side)) * job.unscale,
                     (x.y - fft_value(slots[i].r, scale.side)) * job.unscale};
      store_residual_pair(job, u, j, r, in_pairs);
    }
  }
  team.sync();
}

// --- decode ------------------------------------------------------------------------------------------------------

// The words of a unit to shared memory. Returns what is wrong with them if the unit turns out to be marked, of which
// everything but the marker must be zero.
template <int kBins>
__device__ __forceinline__ uint32_t read_words(const CudaJob& job, const FftTeam<kBins>& team, const FftUnit& u,
                                               uint32_t side, Check& check) {
  using Team = FftTeam<kBins>;
  uint32_t if_marked = 0;
  for (uint64_t i = (u.index & ~uint64_t{31}) + team.t; i < u.index + side + 1; i += Team::kTeam)
    if (i >= u.index) {
      const uint32_t word = __ldcs(job.body + i), w = static_cast<uint32_t>(i - u.index);
      check.row(word, i >> 5);
      team.words[w] = word;
      if (word != 0 && w < side) if_marked |= w < Team::kWords ? kBadBitmap : kBadCodes;
    }
  team.sync();
  return if_marked;
}

// The parts of the kept bins to the front of `numbers`. Returns status bits.
template <int kBins>
__device__ __forceinline__ uint32_t decode_bins(const FftLaunch& l, FftTeam<kBins>& team, const FftParams<kBins>& p) {
  using Team = FftTeam<kBins>;
  const uint32_t bits = l.scheme.bits, *codes = team.words + Team::kWords, used = 2 * p.kept * bits % 32;
  uint32_t problem = 0;
  if (team.t == 0 && used && codes[p.code_words - 1] >> used) problem |= kBadPadding;
  for (uint32_t j = team.t; j < p.kept; j += Team::kTeam) {
    if (bits == 32) {
      const uint32_t r = codes[2 * j], i = codes[2 * j + 1];
      if (max(r & 0x7fffffffu, i & 0x7fffffffu) > 0x3f800000u) problem |= kBadCodes;
      team.numbers[j] = make_float2(bits_float(r), bits_float(i));
    } else {
      // The word after the last code is the scale, so that two words can be read.
      using Range = RangeLanes<ScalarLane>;
      const uint32_t at = j * 2 * bits, mask = (1u << bits) - 1;
      const uint32_t both = __funnelshift_r(codes[at / 32], codes[at / 32 + 1], at % 32);
      const uint32_t r = both & mask, i = both >> bits & mask;
      if (max(r, i) > l.range.most()) problem |= kBadCodes;
      team.numbers[j] = make_float2(Range::decode(r, l.range), Range::decode(i, l.range));
    }
  }
  team.sync();
  return problem;
}

template <int kBins, bool kTail>
__device__ __forceinline__ void store_unit(const CudaJob& job, const FftTeam<kBins>& team, const FftUnit& u,
                                           const FftC (&slots)[FftTeam<kBins>::kSlots]) {
  using Team = FftTeam<kBins>;
  void* out = job.out[u.piece.tensor];
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
}

// Decodes one unit; returns status bits. A malformed unit is decoded to some value or other: what it writes is
// overwritten when the message is found to be bad.
template <int kBins, bool kTail>
__device__ __forceinline__ uint32_t fft_decode_unit(const CudaJob& job, const FftLaunch& l, FftTeam<kBins>& team,
                                                    const FftUnit& u, Check& check) {
  using Team = FftTeam<kBins>;
  const FftParams<kBins> p(l.scheme, u);
  uint32_t problem = 0;
  const uint32_t if_marked = read_words(job, team, u, p.side, check), side = team.words[p.side];
  FftC slots[Team::kSlots];
  float scale = bits_float(side);
  if (side == kMarker) {
    problem |= if_marked;
#pragma unroll
    for (int i = 0; i < Team::kSlots; ++i) slots[i] = {scale, scale};
  } else {
    if (side >= kInfBits) {
      problem |= kBadScales;
      scale = 0;
    }
    if (team.count_before() != p.kept) problem |= kBadBitmap;
    problem |= decode_bins(l, team, p);
    spread_bins(team, p.kept, slots);
    team.inverse(l.table, slots);
#pragma unroll
    for (int i = 0; i < Team::kSlots; ++i) slots[i] = {fft_value(slots[i].r, scale), fft_value(slots[i].i, scale)};
  }
  store_unit<kBins, kTail>(job, team, u, slots);
  team.sync();
  return problem;
}

// --- kernels -----------------------------------------------------------------------------------------------------

constexpr int kFftTailThreads = 128;

// The unit at place i of the group; false if it is a partial one, which is for fft_tails.
template <int kBins>
__device__ __forceinline__ bool full_unit(const CudaJob& job, const FftLaunch& l, uint64_t i, uint32_t words,
                                          FftUnit& u) {
  if (i >= l.units) return false;
  const uint32_t slot = job.piece_count == 1 ? 0 : __ldg(l.unit_piece + i);
  const CudaPiece& piece = job.pieces[slot];
  const uint64_t unit = i - (job.piece_count == 1 ? 0 : l.first_unit[slot]);
  if ((unit + 1) * (2 * kBins) > piece.count) return false;
  u = FftUnit{piece, unit * (2 * kBins), piece.region + unit * words, l.kept};
  return true;
}

// work(team, unit, where the values of the next full unit are, or null). kStaged: teams have room for values of a unit.
template <int kBins, bool kAhead, bool kStaged, class Work>
__device__ __forceinline__ void fft_full_units(const CudaJob& job, const FftLaunch& l, float4* memory,
                                               const Work& work) {
  using Team = FftTeam<kBins>;
  constexpr uint32_t kTeams = Team::kBlockThreads / Team::kTeam;
  const uint32_t number = threadIdx.x / Team::kTeam, words = Team::kWords + fft_code_words(l.scheme, l.kept) + 1;
  char* const shared = reinterpret_cast<char*>(memory);
  Team team(shared + number * Team::shared_bytes(words, kStaged), kStaged, threadIdx.x % Team::kTeam);
  const uint64_t stride = uint64_t{gridDim.x} * kTeams;
  uint64_t i = uint64_t{blockIdx.x} * kTeams + number;
  FftUnit u;
  const auto next_full = [&](uint64_t from, FftUnit& to) {  // the first full unit from there on
    while (from < l.units && !full_unit<kBins>(job, l, from, words, to)) from += stride;
    return from;
  };
  const auto values = [&](const FftUnit& of) { return static_cast<const float*>(job.in[of.piece.tensor]) + of.at; };
  i = next_full(i, u);
  if (kAhead && i < l.units) team.fetch(values(u));
  while (i < l.units) {
    full_unit<kBins>(job, l, i, words, u);
    const float* ahead = nullptr;
    FftUnit next;
    i = next_full(i + stride, next);
    if (kAhead && i < l.units) ahead = values(next);
    work(team, u, ahead);
  }
}

// The partial chunks at the ends of pieces, a thread block each.
template <class Work>
__device__ __forceinline__ void fft_tails(const CudaJob& job, const FftLaunch& l, float4* memory, const Work& work) {
  const FftScheme& scheme = l.scheme;
  for (uint32_t slot = blockIdx.x; slot < job.piece_count; slot += gridDim.x) {
    const CudaPiece& piece = job.pieces[slot];
    const uint64_t units = piece.count / scheme.chunk, rest = piece.count % scheme.chunk;
    if (rest == 0) continue;
    const uint32_t kept = fft_kept(scheme, fft_size(scheme.chunk, rest) / 2);
    const FftUnit u{piece, units * scheme.chunk, piece.region + units * fft_unit_words(scheme, scheme.chunk), kept};
    const auto run = [&]<int kBins>() {
      if (threadIdx.x >= FftTeam<kBins>::kTeam) return;
      FftTeam<kBins> team(reinterpret_cast<char*>(memory), false, threadIdx.x);
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

template <int kBins, bool kFeedback, bool kFast>
__global__ void __launch_bounds__(FftTeam<kBins>::kBlockThreads, fft_blocks<kBins>(kFeedback ? 16 : 20))
    fft_encode_full(const __grid_constant__ CudaJob job, const __grid_constant__ FftLaunch l) {
  GW_DYNAMIC_SHARED(float4, fft_shared);
  Check check;
  uint32_t memory = 0;
  constexpr bool kAhead = kFast && !kFeedback;
  fft_full_units<kBins, kAhead, kFast>(
      job, l, fft_shared, [&](FftTeam<kBins>& team, const FftUnit& u, const float* next) {
        fft_encode_unit<kBins, kFeedback, false, kFast, kAhead>(job, l, team, u, memory, check, next);
      });
  __syncthreads();
  check.flush(job.check);
}

template <bool kFeedback>
__global__ void __launch_bounds__(kFftTailThreads)
    fft_encode_tails(const __grid_constant__ CudaJob job, const __grid_constant__ FftLaunch l) {
  GW_DYNAMIC_SHARED(float4, fft_shared);
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
  GW_DYNAMIC_SHARED(float4, fft_shared);
  Check check;
  uint32_t problem = 0;
  fft_full_units<kBins, false, false>(job, l, fft_shared, [&](FftTeam<kBins>& team, const FftUnit& u, const float*) {
    problem |= fft_decode_unit<kBins, false>(job, l, team, u, check);
  });
  __syncthreads();
  report(job, problem, check);
}

__global__ void __launch_bounds__(kFftTailThreads)
    fft_decode_tails(const __grid_constant__ CudaJob job, const __grid_constant__ FftLaunch l) {
  GW_DYNAMIC_SHARED(float4, fft_shared);
  Check check;
  uint32_t problem = 0;
  fft_tails(job, l, fft_shared, [&]<int kBins>(FftTeam<kBins>& team, const FftUnit& u) {
    problem |= fft_decode_unit<kBins, true>(job, l, team, u, check);
  });
  report(job, problem, check);
}
