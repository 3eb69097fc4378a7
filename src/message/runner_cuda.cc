// SPDX-License-Identifier: Apache-2.0
// Runs a plan on a GPU. Tables and workspace are made once, on the device; a call then only enqueues: the tensors'
// addresses (they may change every step), one launch per group of tensors with the same codec and element type, and a
// small kernel for the head and the checks. Nothing is allocated, nothing waits.
#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <cstring>
#include <map>
#include <utility>

#include "codec/cuda_unit.h"
#include "codec/unit.h"
#include "core/random.h"
#include "device/cuda_job.h"
#include "gradwire/error.h"
#include "message/layout.h"
#include "message/runners.h"

namespace gradwire {
namespace {

// One allocation, handed out in aligned parts: sizes are added up first, then addresses are given.
class Arena {
 public:
  Arena() = default;
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
  ~Arena() { cudaFree(base_); }

  template <class T>
  size_t reserve(size_t count) {
    const size_t at = bytes_;
    bytes_ = div_up(bytes_ + count * sizeof(T), 256) * 256;
    return at;
  }
  void allocate(cudaStream_t stream) {
    stream_ = stream;  // not the default one: that would wait for everybody else's
    cuda_throw(cudaMalloc(&base_, bytes_ ? bytes_ : 256), "cudaMalloc");
    cuda_throw(cudaMemsetAsync(base_, 0, bytes_ ? bytes_ : 256, stream_), "cudaMemsetAsync");
  }
  template <class T>
  T* at(size_t offset) const {
    return reinterpret_cast<T*>(static_cast<std::byte*>(base_) + offset);
  }
  template <class T>
  void fill(size_t offset, const std::vector<T>& values) {
    if (values.empty()) return;
    cuda_throw(
        cudaMemcpyAsync(at<T>(offset), values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice, stream_),
        "cudaMemcpyAsync");
    cuda_throw(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");  // `values` may go
  }

 private:
  void* base_ = nullptr;
  size_t bytes_ = 0;
  cudaStream_t stream_ = nullptr;
};

// Memory of the host that a GPU can write to while the host goes on. Grows only.
class Pinned {
 public:
  Pinned() = default;
  Pinned(const Pinned&) = delete;
  Pinned& operator=(const Pinned&) = delete;
  ~Pinned() { cudaFreeHost(data_); }

  template <class T>
  T* room(size_t count) {
    if (count * sizeof(T) > bytes_) {
      cudaFreeHost(data_);
      data_ = nullptr;
      bytes_ = count * sizeof(T);
      cuda_throw(cudaMallocHost(&data_, bytes_), "cudaMallocHost");
    }
    return static_cast<T*>(data_);
  }

 private:
  void* data_ = nullptr;
  size_t bytes_ = 0;
};

// The tensors of a plan that share a codec and an element type: one launch, or a few, for all of them.
struct LaunchGroup {
  Scheme scheme;
  DType dtype = DType::f32;
  const UnitOps* ops = nullptr;          // codecs with units of their own,
  std::unique_ptr<CudaUnitGroup> units;  // and what they keep for this group
  std::vector<CudaPiece> pieces;
  std::vector<uint32_t> item_piece;
  uint64_t items = 0;
  uint32_t region = 0;  // one of the layout's that has this scheme
  bool tails = false;
  uint32_t first_pointer = 0;
  size_t pieces_at = 0, items_at = 0, table_at = 0, tops_at = 0, sums_at = 0, params_at = 0,
         units_at = 0;  // in the arena
};

class CudaRunner final : public Runner {
 public:
  CudaRunner(const Plan& plan, const Device& device)
      : plan_(&plan),
        layout_(&layout_of(plan)),
        index_(device.index),
        stream_(static_cast<cudaStream_t>(device.stream)),
        clock_(device.clock),
        head_(make_head(*layout_, {})) {
    use();
    make_groups();
    std::vector<uint64_t> gaps;
    uint64_t end = 0;
    for (const Region& region : layout_->regions) {
      if (end < region.begin) gaps.insert(gaps.end(), {end, region.begin});
      end = region.begin + region.words;
    }
    gap_count_ = static_cast<uint32_t>(gaps.size() / 2);
    const size_t tensors = layout_->tensors.size();
    const size_t head_at = arena_.reserve<std::byte>(head_.size()), gaps_at = arena_.reserve<uint64_t>(gaps.size());
    const size_t pointers_at = arena_.reserve<void*>(3 * tensors), words_at = arena_.reserve<uint64_t>(4);
    const size_t hashes_at = arena_.reserve<uint64_t>(tensors), keys_at = arena_.reserve<uint64_t>(tensors);
    std::vector<uint64_t> hashes;
    hashes.resize(tensors);
    for (size_t i = 0; i < tensors; ++i) hashes[place_of_[i]] = layout_->regions[i].name_hash;
    for (LaunchGroup& g : groups_) {
      const bool whole = g.scheme.unit == 0;
      g.pieces_at = arena_.reserve<CudaPiece>(g.pieces.size());
      g.items_at = arena_.reserve<uint32_t>(g.item_piece.size());
      g.table_at = arena_.reserve<float>(g.scheme.table_size);
      g.tops_at = arena_.reserve<uint32_t>(whole ? g.pieces.size() : 0);
      g.sums_at = arena_.reserve<CudaSums>(whole ? g.pieces.size() : 0);
      g.params_at = arena_.reserve<UnitParams>(whole ? g.pieces.size() : 0);
      if (g.units) g.units_at = arena_.reserve<std::byte>(g.units->bytes());
    }
    arena_.allocate(stream_);
    arena_.fill(head_at, head_);
    arena_.fill(gaps_at, gaps);
    arena_.fill(hashes_at, hashes);
    for (LaunchGroup& g : groups_) {
      arena_.fill(g.pieces_at, g.pieces);
      arena_.fill(g.items_at, g.item_piece);
      if (g.units) g.units->place(arena_.at<std::byte>(g.units_at), stream_);
      arena_.fill(g.table_at, std::vector<float>(g.scheme.table, g.scheme.table + g.scheme.table_size));
    }
    cuda_throw(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
    device_head_ = arena_.at<std::byte>(head_at);
    device_gaps_ = arena_.at<uint64_t>(gaps_at);
    pointers_ = arena_.at<const void*>(pointers_at);
    check_ = arena_.at<unsigned long long>(words_at);
    hashes_ = arena_.at<uint64_t>(hashes_at);
    keys_ = arena_.at<uint64_t>(keys_at);
    status_ = reinterpret_cast<uint32_t*>(check_ + 1);
    host_pointers_.resize(3 * tensors);
    cuda_throw(cudaMallocHost(reinterpret_cast<void**>(&sticky_), sizeof(uint32_t)), "cudaMallocHost");
    *sticky_ = 0;
  }
  ~CudaRunner() override {
    cudaStreamSynchronize(stream_);  // the arena may still be in use
    cudaFreeHost(sticky_);
  }

  const Plan& plan() const override { return *plan_; }

  // The tables travel as arguments of a kernel, behind what is enqueued, so that learning neither allocates nor waits.
  bool retable(const Plan& plan) override {
    const Layout& next = layout_of(plan);
    if (!differ_in_tables(*layout_, next)) return false;
    use();
    plan_ = &plan;
    layout_ = &next;
    head_ = make_head(next, {});
    cuda_store(device_head_, head_, stream_);
    for (LaunchGroup& g : groups_) {
      g.scheme = next.regions[g.region].scheme;
      cuda_store(arena_.at<std::byte>(g.table_at), std::as_bytes(std::span(g.scheme.table, g.scheme.table_size)),
                 stream_);
    }
    return true;
  }

  std::span<const float> sample(std::span<const void* const> tensors, const Residuals* residuals,
                                std::span<const Pick> picks) override {
    use();
    std::vector<CudaPick> list;
    for (const Pick& pick : picks) {
      const TensorSpec& t = layout_->tensors[pick.tensor];
      list.push_back(
          {tensors[pick.tensor], residuals ? residuals->before[pick.tensor] : nullptr, pick.block, t.count, t.dtype});
    }
    const size_t values = picks.size() * kBlock;
    float* out = sample_.room<float>(values);
    cuda_sample(list, residuals ? residuals->dtype : DType::f32,
                residuals ? residuals->loss_scale * residuals->decay : 1.0f, out, stream_);
    return {out, values};
  }

  std::span<const uint32_t> scales(std::span<const std::byte> message, std::span<const uint32_t> which) override {
    use();
    size_t units = 0;
    for (uint32_t tensor : which) {
      const Scheme& scheme = layout_->regions[tensor].scheme;
      if (scheme.scale_words) units += unit_count(scheme, layout_->tensors[tensor].count);
    }
    uint32_t* out = scales_.room<uint32_t>(units);
    size_t at = 0;
    for (uint32_t tensor : which) {
      const Scheme& scheme = layout_->regions[tensor].scheme;
      const uint64_t count = layout_->tensors[tensor].count, here = scheme.scale_words ? unit_count(scheme, count) : 0;
      if (here == 0) continue;
      const std::byte* from =
          message.data() + layout_->head_bytes + (layout_->regions[tensor].begin + scales_offset(scheme, count)) * 4;
      if (scheme.scale_words == 1)
        cuda_throw(cudaMemcpyAsync(out + at, from, here * 4, cudaMemcpyDeviceToHost, stream_), "cudaMemcpyAsync");
      else
        cuda_throw(
            cudaMemcpy2DAsync(out + at, 4, from, scheme.scale_words * 4, 4, here, cudaMemcpyDeviceToHost, stream_),
            "cudaMemcpy2DAsync");
      at += here;
    }
    return {out, units};
  }

  void encode(std::span<const void* const> tensors, const Stamp& stamp, std::span<std::byte> message,
              const Residuals* residuals) override {
    check_arguments(*layout_, tensors.size(), message, 16);
    if (residuals) check_residuals(*layout_, *residuals);
    use();
    const size_t n = tensors.size();
    for (size_t i = 0; i < n; ++i) {
      const size_t at = place_of_[i];
      host_pointers_[at] = tensors[i];
      host_pointers_[n + at] = residuals ? residuals->before[i] : nullptr;
      host_pointers_[2 * n + at] = residuals ? residuals->after[i] : nullptr;
    }
    const CudaBegin begin{.check = check_,
                          .seed = stamp.seed,
                          .step = stamp.step,
                          .stage = stamp.stage,
                          .rank = stamp.rank,
                          .clock = clock_,
                          .name_hashes = hashes_,
                          .keys = keys_,
                          .tensors = static_cast<uint32_t>(n)};
    cuda_begin(begin, host_pointers_.data(), pointers_, residuals ? 3 * n : n, stream_);
    for (const LaunchGroup& g : groups_) {
      CudaJob job = job_of(g, message.data());
      job.in = pointers_;
      job.aligned = aligned(g);
      job.before = pointers_ + n;
      job.after = writable(pointers_ + 2 * n);
      job.feedback = residuals != nullptr;
      if (residuals) {
        job.residual = residuals->dtype;
        job.loss_scale = residuals->loss_scale * residuals->decay;
        job.unscale = 1.0f / residuals->loss_scale;
      }
      job.keys = keys_;
      job.mask = rank_mask(stamp.rank);
      if (g.units)
        g.units->encode(job, stream_);
      else
        cuda_encode(job, stream_);
    }
    CudaHead head = device_head(stamp);
    if (!clock_) {
      set_stamp(head_, stamp);
      std::memcpy(&head.head_check, head_.data() + wire::header::head_check, sizeof head.head_check);
    }
    cuda_finish_encode(head, message.data(), check_, stream_);
  }

  void decode(std::span<const std::byte> message, std::span<void* const> tensors, Write write,
              const Stamp* expected) override {
    check_arguments(*layout_, tensors.size(), message, 16);
    check_write(*layout_, write);
    use();
    for (size_t i = 0; i < tensors.size(); ++i) host_pointers_[place_of_[i]] = tensors[i];
    cuda_begin({.check = check_, .status = status_}, host_pointers_.data(), pointers_, tensors.size(), stream_);
    CudaHead head = device_head(expected ? *expected : Stamp{});
    head.has_stamp = expected != nullptr;
    std::vector<CudaJob>& jobs = jobs_;
    jobs.clear();
    for (const LaunchGroup& g : groups_) {
      jobs.push_back(job_of(g, const_cast<std::byte*>(message.data())));
      CudaJob& job = jobs.back();
      job.out = writable(pointers_);
      job.add = write == Write::add;
      job.aligned = aligned(g);
      job.head = head;
      job.message = message.data();
      CudaJob run = job;
      if (jobs.size() > 1) run.head.expected = nullptr;  // once is enough
      if (g.units)
        g.units->decode(run, stream_);
      else
        cuda_decode(run, stream_);
    }
    if (jobs.empty()) {  // no elements: a job without items carries the head
      jobs.emplace_back();
      jobs.back().head = head;
      jobs.back().message = message.data();
      jobs.back().check = check_;
      jobs.back().status = status_;
      cuda_check_head(jobs.back(), stream_);
    }
    for (size_t i = 0; i < jobs.size(); ++i) cuda_finish_decode(jobs[i], sticky_, i == 0, stream_);
  }

  void wait() override {
    use();
    cuda_throw(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
    raise(std::exchange(*sticky_, 0));
  }

  void poll() override { raise(*static_cast<volatile uint32_t*>(sticky_)); }

 private:
  static void raise(uint32_t status) {
    if (status == 0) return;
    // The head comes before what it describes.
    static constexpr struct {
      uint32_t bit;
      const char *field, *words;
    } kWords[] = {
        {kBadHead, "head", "is not this plan's, or was altered"},
        {kBadStamp, "stamp", "(step, stage, rank, world) is not the expected one"},
        {kBadBody, "body_check", "does not match: the body was altered"},
        {kBadScales, "scales", "are neither finite and of their sign nor the marker"},
        {kBadBitmap, "bitmap", "does not have as many bits as values are kept"},
        {kBadIndices, "indices", "are not increasing, or lie beyond the tensor"},
        {kBadValues, "values", "are not finite"},
        {kBadBuckets, "buckets", "have means that cannot come from an encoder"},
        {kBadPadding, "padding", "is not zero"},
        {kBadCodes, "codes", "hold a code that no encoder writes"},
    };
    for (const auto& w : kWords)
      if (status & w.bit) throw Error(ErrorKind::frame, fmt::format("bad message: {} {}", w.field, w.words), w.field);
  }

  // Of the tensors of this call.
  bool aligned(const LaunchGroup& g) const {
    bool all = true;
    for (const CudaPiece& piece : g.pieces) all &= reinterpret_cast<uintptr_t>(host_pointers_[piece.tensor]) % 16 == 0;
    return all;
  }
  static void* const* writable(const void** table) { return const_cast<void* const*>(table); }
  void use() const { cuda_throw(cudaSetDevice(index_), "cudaSetDevice"); }

  void make_groups() {
    std::map<std::pair<uint32_t, DType>, size_t> found;
    place_of_.assign(layout_->tensors.size(), 0);
    for (uint32_t i = 0; i < layout_->tensors.size(); ++i) {
      const TensorSpec& t = layout_->tensors[i];
      const Region& region = layout_->regions[i];
      if (t.count == 0) continue;
      const auto [it, fresh] = found.try_emplace({region.spec, t.dtype}, groups_.size());
      if (fresh) {
        groups_.emplace_back();
        groups_.back().scheme = region.scheme;
        groups_.back().region = i;
        groups_.back().ops = region.unit;
        groups_.back().dtype = t.dtype;
      }
      LaunchGroup& g = groups_[it->second];
      const uint64_t blocks = div_up(t.count, kBlock), items = chunked(region.scheme) ? div_up(t.count, kTile) : blocks;
      g.item_piece.insert(g.item_piece.end(), items, static_cast<uint32_t>(g.pieces.size()));
      g.pieces.push_back({t.count, t.first / kBlock, region.name_hash, region.begin, g.items, i});  // tensor: see below
      g.items += items;
      g.tails |= t.count % kBlock != 0;
    }
    // Pointer tables go by group, so that a kernel finds an address without looking at the piece first.
    uint32_t next = 0;
    for (LaunchGroup& g : groups_) {
      g.first_pointer = next;
      for (CudaPiece& piece : g.pieces) {
        place_of_[piece.tensor] = next;
        piece.tensor = next++;
      }
    }
    for (uint32_t i = 0; i < layout_->tensors.size(); ++i)
      if (layout_->tensors[i].count == 0) place_of_[i] = next++;
    for (LaunchGroup& g : groups_)
      if (g.ops) g.units = make_units(g);
  }

  std::unique_ptr<CudaUnitGroup> make_units(const LaunchGroup& g) const {
    if (!g.ops->cuda)
      throw Error(ErrorKind::unsupported, "device is cuda, but a codec of the plan has no kernels", "device");
    return g.ops->cuda->make(g.scheme, g.pieces);
  }

  CudaJob job_of(const LaunchGroup& g, std::byte* message) const {
    CudaJob job;
    job.scheme = g.scheme;
    if (g.scheme.table) job.scheme.table = arena_.at<float>(g.table_at);
    job.dtype = g.dtype;
    job.pieces = arena_.at<CudaPiece>(g.pieces_at);
    job.item_piece = arena_.at<uint32_t>(g.items_at);
    job.items = g.items;
    job.piece_count = static_cast<uint32_t>(g.pieces.size());
    job.tails = g.tails;
    job.first_pointer = g.first_pointer;
    while (g.scheme.unit > (kBlock << job.unit_shift)) ++job.unit_shift;
    job.body = reinterpret_cast<uint32_t*>(message + layout_->head_bytes);
    job.check = check_;
    job.status = status_;
    job.tops = arena_.at<uint32_t>(g.tops_at);
    job.sums = arena_.at<CudaSums>(g.sums_at);
    job.params = arena_.at<UnitParams>(g.params_at);
    return job;
  }

  CudaHead device_head(const Stamp& stamp) const {
    size_t specs = wire::header::size;
    for (const Codec& codec : layout_->specs) specs += spec_bytes(codec);
    return {device_head_,
            static_cast<uint32_t>(layout_->head_bytes),
            stamp.step,
            stamp.stage,
            stamp.rank,
            stamp.world,
            clock_,
            0,
            layout_->body_words,
            device_gaps_,
            gap_count_,
            true,
            static_cast<uint32_t>(specs),
            static_cast<uint32_t>(specs + layout_->tensors.size() * wire::row::size)};
  }

  const Plan* plan_;
  const Layout* layout_;
  int index_;
  cudaStream_t stream_;
  const uint64_t* clock_;
  std::vector<std::byte> head_;
  std::vector<LaunchGroup> groups_;
  std::vector<uint32_t> place_of_;  // tensor -> its place in the pointer tables
  Arena arena_;
  std::byte* device_head_ = nullptr;
  const uint64_t* device_gaps_ = nullptr;
  uint32_t gap_count_ = 0;
  const uint64_t* hashes_ = nullptr;
  uint64_t* keys_ = nullptr;
  const void** pointers_ = nullptr;
  unsigned long long* check_ = nullptr;
  uint32_t* status_ = nullptr;
  uint32_t* sticky_ = nullptr;  // in the host's memory, where the GPU writes while the host goes on
  std::vector<const void*> host_pointers_;
  std::vector<CudaJob> jobs_;
  Pinned sample_, scales_;
};

}  // namespace

bool cuda_built() { return true; }

int cuda_devices() {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) {
    cudaGetLastError();
    return 0;
  }
  return count;
}

std::string cuda_description() {
  int count = 0;
  const cudaError_t code = cudaGetDeviceCount(&count);
  cudaGetLastError();
  if (code != cudaSuccess) return fmt::format("built, not usable here: {}", cudaGetErrorString(code));
  std::string text;
  for (int i = 0; i < count; ++i) {
    cudaDeviceProp p{};
    if (cudaGetDeviceProperties(&p, i) == cudaSuccess)
      text += fmt::format("{}{} (sm_{}{}, {} SMs, {:.0f} GiB)", i ? "; " : "", p.name, p.major, p.minor,
                          p.multiProcessorCount, p.totalGlobalMem / double(1 << 30));
  }
  return count ? text : "built, no GPU here";
}

std::unique_ptr<Runner> make_cuda_runner(const Plan& plan, const Device& device) {
  if (cuda_devices() == 0)
    throw Error(ErrorKind::unsupported, fmt::format("device is cuda, but {}", cuda_description()), "device");
  if (device.index < 0 || device.index >= cuda_devices())
    throw Error(ErrorKind::usage, fmt::format("cuda device is {}; here are {}", device.index, cuda_devices()),
                "device");
  return std::make_unique<CudaRunner>(plan, device);
}

}  // namespace gradwire
