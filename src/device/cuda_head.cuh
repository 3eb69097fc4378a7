// SPDX-License-Identifier: Apache-2.0
// Checking the head of a message where it lies, on the device.
//
// Included by the files of kernels inside an anonymous namespace, before the drivers.

constexpr uint32_t kFull = 0xffffffffu;

__device__ __forceinline__ uint64_t step_of(const CudaHead& head) { return head.clock ? *head.clock : head.step; }

// XXH64 (seed 0) of a head without its two checks, which are the last 16 bytes of the header. The first warp of the
// block runs the hash's four chains side by side.
__device__ uint64_t device_head_check(const std::byte* head, uint32_t bytes) {
  constexpr uint64_t p1 = 0x9e3779b185ebca87ull, p2 = 0xc2b2ae3d27d4eb4full, p3 = 0x165667b19e3779f9ull,
                     p4 = 0x85ebca77c2b2ae63ull, p5 = 0x27d4eb2f165667c5ull;
  const auto rotate = [](uint64_t x, int r) { return x << r | x >> (64 - r); };
  const auto round = [&](uint64_t acc, uint64_t in) { return rotate(acc + in * p2, 31) * p1; };
  const uint64_t* words = reinterpret_cast<const uint64_t*>(head);
  const uint32_t count = bytes / 8 - 2, lane = threadIdx.x & 31, stripes = count / 4;  // without the two checks
  constexpr uint32_t kBefore = wire::header::head_check / 8;                           // words before the checks
  const auto word = [&](uint32_t i) { return i < count ? words[i < kBefore ? i : i + 2] : 0; };
  // Lane k of the first four keeps accumulator k; eight words are on their way while eight are worked in.
  const uint32_t k = lane & 3;
  uint64_t v = k == 0 ? p1 + p2 : k == 1 ? p2 : k == 2 ? 0 : 0 - p1, now[8], next[8];
#pragma unroll
  for (uint32_t s = 0; s < 8; ++s) now[s] = word(s * 4 + k);
  for (uint32_t from = 0; from < stripes; from += 8) {
#pragma unroll
    for (uint32_t s = 0; s < 8; ++s) next[s] = word((from + 8 + s) * 4 + k);
#pragma unroll
    for (uint32_t s = 0; s < 8; ++s)
      if (from + s < stripes) v = round(v, now[s]);
#pragma unroll
    for (uint32_t s = 0; s < 8; ++s) now[s] = next[s];
  }
  uint64_t h = p5;
  uint64_t all[4];
  for (int j = 0; j < 4; ++j) all[j] = __shfl_sync(kFull, v, j);
  if (stripes) {
    h = rotate(all[0], 1) + rotate(all[1], 7) + rotate(all[2], 12) + rotate(all[3], 18);
    for (int j = 0; j < 4; ++j) h = (h ^ round(0, all[j])) * p1 + p4;
  }
  h += uint64_t{count} * 8;
  for (uint32_t i = stripes * 4; i < count; ++i) h = rotate(h ^ round(0, word(i)), 27) * p1 + p4;
  h ^= h >> 33;
  h *= p2;
  h ^= h >> 29;
  h *= p3;
  return h ^ h >> 32;
}

// The head of a message against the plan's; one thread block. Returns status bits.
__device__ uint32_t check_head(const CudaJob& job) {
  const CudaHead& head = job.head;
  const std::byte* message = job.message;
  uint32_t problem = 0;
  // Every byte as planned, but for the stamp, the checks, and the element types, which only say what the sender had.
  // The first warp has the hash to do; the others look.
  for (uint32_t w = threadIdx.x - 32; threadIdx.x >= 32 && w < head.bytes / 4; w += blockDim.x - 32) {
    const uint32_t at = w * 4;
    if ((at >= wire::header::step && at < wire::header::spec_count) ||
        (at >= wire::header::head_check && at < wire::header::size))
      continue;
    const uint32_t got = reinterpret_cast<const uint32_t*>(message)[w];
    const bool type = at >= head.first_tensor_at && at < head.tensors_end &&
                      (at - head.first_tensor_at) % wire::row::size == wire::row::spec && (got >> 16 & 0xff) <= 2;
    if ((got ^ reinterpret_cast<const uint32_t*>(head.expected)[w]) & (type ? 0xff00ffffu : 0xffffffffu))
      problem |= kBadHead;
  }
  const uint32_t* body = reinterpret_cast<const uint32_t*>(message + head.bytes);
  for (uint32_t g = threadIdx.x - 32; threadIdx.x >= 32 && g < head.gap_count; g += blockDim.x - 32)
    for (uint64_t w = head.gaps[2 * g]; w < head.gaps[2 * g + 1]; ++w)  // a few words between two regions
      if (body[w] != 0) problem |= kBadPadding;
  const uint64_t found = threadIdx.x < 32 ? device_head_check(message, head.bytes) : 0;
  if (threadIdx.x == 0) {
    const uint32_t rank = *reinterpret_cast<const uint32_t*>(message + wire::header::rank),
                   world = *reinterpret_cast<const uint32_t*>(message + wire::header::world);
    if (found != *reinterpret_cast<const uint64_t*>(message + wire::header::head_check)) problem |= kBadHead;
    if (rank >= world) problem |= kBadStamp;
    if (head.has_stamp && (*reinterpret_cast<const uint64_t*>(message + wire::header::step) != step_of(head) ||
                           *reinterpret_cast<const uint32_t*>(message + wire::header::stage) != head.stage ||
                           rank != head.rank || world != head.world))
      problem |= kBadStamp;
  }
  return problem;
}
