// SPDX-License-Identifier: Apache-2.0
// Runs a plan on the CPU. The plan is cut into tasks once: runs of blocks, units of several blocks, parts of a
// whole-tensor unit, or the tasks of a codec with units of its own. Tasks are independent but for whole-tensor units,
// whose statistics are gathered by all threads first; all sums are of integers, so the order in which threads finish
// does not matter.
#include <fmt/format.h>

#include <atomic>
#include <cstring>

#include "codec/regions.h"
#include "core/float_mode.h"
#include "core/pool.h"
#include "core/random.h"
#include "device/kernels.h"
#include "gradwire/error.h"
#include "message/layout.h"
#include "message/runners.h"

namespace gradwire {
namespace {

constexpr uint64_t kTaskBlocks = 64;  // 256 KiB of f32: large against a task's overhead, small against a cache
constexpr uint64_t kStreamBytes = 8 << 20;

// Half a megabyte, of the thread and not of the runner: a collective has a runner for every peer and bucket.
Scratch& scratch() {
  static thread_local const std::unique_ptr<Scratch> own = std::make_unique<Scratch>();
  return *own;
}

class CpuRunner final : public Runner {
 public:
  CpuRunner(const Plan& plan, const Device& device)
      : plan_(plan),
        layout_(layout_of(plan)),
        kernels_(kernels_named(device.simd)),
        pool_(device.threads),
        head_(make_head(layout_, {})) {
    for (uint32_t i = 0; i < layout_.regions.size(); ++i) cut(i);
    sums_.resize(pool_.threads());
    tops_.resize(tasks_.size());
    parts_.resize(tasks_.size());
    whole_params_.resize(layout_.regions.size());
  }

  const Plan& plan() const override { return plan_; }
  void wait() override {}
  void poll() override {}

  std::span<const float> sample(std::span<const void* const> tensors, const Residuals* residuals,
                                std::span<const Pick> picks) override {
    const FloatMode mode;
    sample_.resize(picks.size() * kBlock);
    for (size_t i = 0; i < picks.size(); ++i) {
      Span s = span({CpuTask::Kind::blocks, picks[i].tensor, picks[i].block, picks[i].block + 1, 0}, nullptr);
      s.in = tensors[picks[i].tensor];
      set_feedback(s, residuals, picks[i].tensor);
      float* to = sample_.data() + i * kBlock;
      const float* values = kernels_.load(s, picks[i].block, to);
      if (values != to) std::memcpy(to, values, kBlock * sizeof(float));
    }
    return sample_;
  }

  std::span<const uint32_t> scales(std::span<const std::byte> message, std::span<const uint32_t> which) override {
    const uint32_t* body = reinterpret_cast<const uint32_t*>(message.data() + head_.size());
    scales_.clear();
    for (uint32_t tensor : which) {
      const Scheme& scheme = layout_.regions[tensor].scheme;
      const uint64_t count = layout_.tensors[tensor].count,
                     at = layout_.regions[tensor].begin + scales_offset(scheme, count);
      if (scheme.scale_words)
        for (uint64_t unit = 0; unit < unit_count(scheme, count); ++unit)
          scales_.push_back(body[at + unit * scheme.scale_words]);
    }
    return scales_;
  }

  void encode(std::span<const void* const> tensors, const Stamp& stamp, std::span<std::byte> message,
              const Residuals* residuals) override {
    check_arguments(layout_, tensors.size(), message, alignof(uint32_t));
    if (residuals) check_residuals(layout_, *residuals);
    const FloatMode mode;
    set_stamp(head_, stamp);
    std::memcpy(message.data(), head_.data(), head_.size());
    uint32_t* body = reinterpret_cast<uint32_t*>(message.data() + head_.size());
    const uint64_t call = call_key(stamp.seed, stamp.step, stamp.stage, stamp.rank);
    zero_gaps(body);
    for (LaneSums& sums : sums_) sums = {};

    const auto span_of = [&](const CpuTask& task) {
      const TensorSpec& t = layout_.tensors[task.tensor];
      const Region& region = layout_.regions[task.tensor];
      Span s = span(task, body);
      s.in = tensors[task.tensor];
      s.key = tensor_key(call, region.name_hash);
      s.mask = rank_mask(stamp.rank);
      set_feedback(s, residuals, task.tensor);
      s.stream = t.count * sizeof(float) >= kStreamBytes;
      return s;
    };
    gather_whole_units(body, span_of);
    run([&](const CpuTask& task, size_t, Scratch& scratch, LaneSums& check) {
      const Span s = span_of(task);
      if (task.kind == CpuTask::Kind::blocks)
        kernels_.encode(s, nullptr, scratch, check);
      else if (task.kind == CpuTask::Kind::whole)
        kernels_.encode(s, &whole_params_[task.tensor], scratch, check);
      else if (task.kind == CpuTask::Kind::unit)
        encode_unit(s, scratch, check);
      else
        unit_ops(task)->encode(kernels_, s, task.unit, scratch, check);
    });
    uint64_t h = whole_scales_;
    for (const LaneSums& sums : sums_) h += sums.total();
    set_body_check(message, seal(h, layout_.body_words));
  }

  void decode(std::span<const std::byte> message, std::span<void* const> tensors, Write write,
              const Stamp* expected) override {
    check_arguments(layout_, tensors.size(), message, alignof(uint32_t));
    check_write(layout_, write);
    check_head(message, layout_, head_, expected);
    const FloatMode mode;
    // Only read, but Span serves both directions.
    uint32_t* body = const_cast<uint32_t*>(reinterpret_cast<const uint32_t*>(message.data() + head_.size()));
    verify(body, head_body_check(message));

    const auto span_of = [&](const CpuTask& task) {
      Span s = span(task, body);
      s.out = tensors[task.tensor];
      s.add = write == Write::add;
      s.stream = layout_.tensors[task.tensor].count * sizeof(float) >= kStreamBytes;
      return s;
    };
    std::atomic<uint32_t> malformed{0xffffffffu};  // a tensor with a code that is none
    run([&](const CpuTask& task, size_t, Scratch& scratch, LaneSums&) {
      const Span s = span_of(task);
      bool bad = false;
      if (task.kind == CpuTask::Kind::blocks) {
        bad = kernels_.decode(s, nullptr, scratch);
      } else if (task.kind == CpuTask::Kind::own) {
        unit_ops(task)->decode(kernels_, s, task.unit, scratch);
      } else {
        const UnitParams params = scale_ops(*s.scheme).make_params(
            *s.scheme, s.region + scales_offset(*s.scheme, s.count) + task.unit * s.scheme->scale_words);
        bad = kernels_.decode(s, &params, scratch);
      }
      if (bad) malformed = task.tensor;
    });
    if (malformed != 0xffffffffu) refuse(malformed, "codes", "hold a code that no encoder writes");
  }

 private:
  struct CpuTask {
    // own: a task of a codec with units of its own
    enum class Kind { blocks, unit, whole, own } kind;
    uint32_t tensor;
    uint64_t begin, end;  // blocks
    uint64_t unit;        // the number of the unit, or of the codec's task; else 0
  };
  const UnitOps* unit_ops(const CpuTask& task) const { return layout_.regions[task.tensor].unit; }

  void cut(uint32_t tensor) {
    const Scheme& scheme = layout_.regions[tensor].scheme;
    const uint64_t count = layout_.tensors[tensor].count, blocks = div_up(count, kBlock);
    if (const UnitOps* ops = layout_.regions[tensor].unit) {
      const uint64_t own = count ? ops->tasks(scheme, count) : 0;
      for (uint64_t task = 0; task < own; ++task) tasks_.push_back({CpuTask::Kind::own, tensor, 0, 0, task});
    } else if (scheme.unit > kBlock) {
      const uint64_t step = scheme.unit / kBlock;
      for (uint64_t unit = 0; unit * step < blocks; ++unit)
        tasks_.push_back({CpuTask::Kind::unit, tensor, unit * step, min_u64(blocks, (unit + 1) * step), unit});
    } else {
      const auto kind = scheme.unit == 0 ? CpuTask::Kind::whole : CpuTask::Kind::blocks;
      for (uint64_t begin = 0; begin < blocks; begin += kTaskBlocks)
        tasks_.push_back({kind, tensor, begin, min_u64(blocks, begin + kTaskBlocks), 0});
    }
  }

  template <class Body>
  void run(const Body& body) {
    pool_.run(tasks_.size(), [&](size_t i, int worker) {
      const FloatMode mode;
      body(tasks_[i], i, scratch(), sums_[worker]);
    });
  }

  Span span(const CpuTask& task, uint32_t* body) const {
    const TensorSpec& t = layout_.tensors[task.tensor];
    const Region& region = layout_.regions[task.tensor];
    Span s;
    s.scheme = &region.scheme;
    s.count = t.count;
    s.begin = task.begin;
    s.end = task.end;
    s.dtype = t.dtype;
    s.first_block = t.first / kBlock;
    s.region = body ? body + region.begin : nullptr;  // sample() has no message
    s.region_index = region.begin;
    return s;
  }

  static void set_feedback(Span& s, const Residuals* residuals, uint32_t tensor) {
    if (!residuals || !residuals->before[tensor]) return;
    s.before = residuals->before[tensor];
    s.after = residuals->after[tensor];
    s.residual = residuals->dtype;
    s.loss_scale = residuals->loss_scale * residuals->decay;
    s.unscale = 1.0f / residuals->loss_scale;
  }

  // A unit of several blocks, by one thread: the second and third pass over it find it in the cache.
  void encode_unit(const Span& s, Scratch& scratch, LaneSums& check) {
    const uint32_t top = kernels_.absmax(s, scratch);
    Sums sums;
    if (s.scheme->sums != SumKind::none) kernels_.sums(s, top, scratch, sums);
    const uint64_t n = min_u64(s.count, s.end * kBlock) - s.begin * kBlock;
    const uint64_t at = scales_offset(*s.scheme, s.count) + s.begin * kBlock / s.scheme->unit * s.scheme->scale_words;
    const UnitParams params = write_scales(s, at, top, sums, n, check.loose);
    kernels_.encode(s, &params, scratch, check);
  }

  UnitParams write_scales(const Span& s, uint64_t at, uint32_t top, const Sums& sums, uint64_t n, uint64_t& h) {
    uint32_t scales[2];
    const ScaleOps& ops = scale_ops(*s.scheme);
    ops.make_scales(*s.scheme, top, sums, n, scales);
    for (uint32_t w = 0; w < s.scheme->scale_words; ++w) {
      s.region[at + w] = scales[w];
      h += word_part(scales[w], s.region_index + at + w);
    }
    return ops.make_params(*s.scheme, scales);
  }

  template <class SpanOf>
  void gather_whole_units(uint32_t* body, const SpanOf& span_of) {
    whole_scales_ = 0;
    bool any = false, any_sums = false;
    for (const CpuTask& task : tasks_)
      if (task.kind == CpuTask::Kind::whole) {
        any = true;
        any_sums |= layout_.regions[task.tensor].scheme.sums != SumKind::none;
      }
    if (!any) return;
    std::vector<uint32_t>& top = whole_tops_;
    top.assign(layout_.regions.size(), 0);
    run([&](const CpuTask& task, size_t i, Scratch& scratch, LaneSums&) {
      if (task.kind == CpuTask::Kind::whole) tops_[i] = kernels_.absmax(span_of(task), scratch);
    });
    for (size_t i = 0; i < tasks_.size(); ++i)
      if (tasks_[i].kind == CpuTask::Kind::whole) top[tasks_[i].tensor] = std::max(top[tasks_[i].tensor], tops_[i]);
    if (any_sums)
      run([&](const CpuTask& task, size_t i, Scratch& scratch, LaneSums&) {
        parts_[i] = {};
        if (task.kind == CpuTask::Kind::whole) kernels_.sums(span_of(task), top[task.tensor], scratch, parts_[i]);
      });
    for (size_t i = 0; i < tasks_.size();) {
      const CpuTask& task = tasks_[i];
      if (task.kind != CpuTask::Kind::whole) {
        ++i;
        continue;
      }
      Sums sums;
      size_t next = i;
      for (; next < tasks_.size() && tasks_[next].tensor == task.tensor; ++next) {
        sums.first += parts_[next].first;
        sums.second += parts_[next].second;
        sums.negative += parts_[next].negative;
      }
      const Span s = span(task, body);
      whole_params_[task.tensor] =
          write_scales(s, scales_offset(*s.scheme, s.count), top[task.tensor], sums, s.count, whole_scales_);
      i = next;
    }
  }

  void zero_gaps(uint32_t* body) const {
    uint64_t end = 0;
    for (const Region& region : layout_.regions) {
      for (; end < region.begin; ++end) body[end] = 0;
      end = region.begin + region.words;
    }
  }

  [[noreturn]] void refuse(uint32_t tensor, const std::string& field, const std::string& words) const {
    throw Error(
        ErrorKind::frame,
        fmt::format("bad message: {} of tensor[{}] ('{}') {}", field, tensor, layout_.tensors[tensor].name, words),
        field);
  }

  // Before anything is written: the checksum, then all that can be seen without decoding.
  void verify(uint32_t* body, uint64_t expected) {
    constexpr uint64_t kPart = 1 << 16;  // words
    std::vector<uint64_t>& parts = check_parts_;
    parts.assign(div_up(layout_.body_words, kPart), 0);
    pool_.run(parts.size(), [&](size_t i, int) {
      parts[i] = kernels_.sum_words(body + i * kPart, min_u64(kPart, layout_.body_words - i * kPart), i * kPart);
    });
    uint64_t h = 0;
    for (uint64_t part : parts) h += part;
    if (seal(h, layout_.body_words) != expected)
      throw Error(ErrorKind::frame, "bad message: body_check does not match: the body was altered", "body_check");
    uint64_t end = 0;
    for (uint32_t i = 0; i < layout_.regions.size(); ++i) {
      const Region& region = layout_.regions[i];
      for (; end < region.begin; ++end)
        if (body[end] != 0) refuse(i, "padding", "is not zero");
      end = region.begin + region.words;
      const uint64_t count = layout_.tensors[i].count;
      const uint32_t* scales = body + region.begin + scales_offset(region.scheme, count);
      const uint64_t used = count % kBlock * region.scheme.bits % 32;  // bits of the partial block's last word
      if (in_blocks(region.unit) && used && scales[-1] >> used) refuse(i, "padding", "is not zero");
      if (region.scheme.scale_words) {
        const uint64_t units = unit_count(region.scheme, count),
                       invalid = scale_ops(region.scheme).first_invalid(region.scheme, scales, units);
        if (invalid < units)
          refuse(i, "scales", fmt::format("of unit {} are neither finite and of their sign nor the marker", invalid));
      }
    }
    for (const CpuTask& task : tasks_) {
      if (task.kind != CpuTask::Kind::own) continue;
      const UnitProblem problem = unit_ops(task)->check(span(task, body), task.unit);
      if (problem.field)
        refuse(task.tensor, problem.field, fmt::format("of unit {} cannot come from an encoder", problem.unit));
    }
  }

  const Plan& plan_;
  const Layout& layout_;
  const Kernels& kernels_;
  Pool pool_;
  std::vector<std::byte> head_;
  std::vector<LaneSums> sums_;
  std::vector<CpuTask> tasks_;
  std::vector<uint32_t> tops_;  // of each task
  std::vector<Sums> parts_;
  std::vector<uint32_t> whole_tops_;  // of each tensor
  std::vector<UnitParams> whole_params_;
  uint64_t whole_scales_ = 0;
  std::vector<uint64_t> check_parts_;
  std::vector<float> sample_;
  std::vector<uint32_t> scales_;
};

}  // namespace

std::unique_ptr<Runner> make_runner(const Plan& plan, const Device& device) {
  if (device.kind == Device::Kind::cuda) return make_cuda_runner(plan, device);
  return std::make_unique<CpuRunner>(plan, device);
}

}  // namespace gradwire
