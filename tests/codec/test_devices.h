// SPDX-License-Identifier: Apache-2.0
// A place to run a plan on: the reference loop, each vector target of this processor, and a GPU where there is one.
// Hides where memory lives, so that one test speaks for every device.
#pragma once

#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/bits.h"
#include "device/memory.h"
#include "gradwire/runner.h"

namespace gradwire::test {

using Raw = std::vector<std::byte>;  // a tensor's bytes, in its own element type

inline Raw raw_of(const std::vector<float>& values, DType dtype = DType::f32) {
  Raw raw(values.size() * bytes_of(dtype));
  for (size_t i = 0; i < values.size(); ++i) {
    if (dtype == DType::f32) {
      std::memcpy(raw.data() + i * 4, &values[i], 4);
    } else {
      const uint16_t h = dtype == DType::f16 ? f32_to_f16(values[i]) : f32_to_bf16(values[i]);
      std::memcpy(raw.data() + i * 2, &h, 2);
    }
  }
  return raw;
}

inline std::vector<float> values_of(const Raw& raw, DType dtype = DType::f32) {
  std::vector<float> values(raw.size() / bytes_of(dtype));
  for (size_t i = 0; i < values.size(); ++i) {
    if (dtype == DType::f32) {
      std::memcpy(&values[i], raw.data() + i * 4, 4);
    } else {
      uint16_t h;
      std::memcpy(&h, raw.data() + i * 2, 2);
      values[i] = dtype == DType::f16 ? f16_to_f32(h) : bf16_to_f32(h);
    }
  }
  return values;
}

struct TestFeedback {
  std::vector<Raw> before;  // one a tensor
  DType dtype = DType::f32;
  float loss_scale = 1;
};

class TestDevice {
 public:
  // shift: tensors begin so many bytes behind an address that is aligned to all there is.
  explicit TestDevice(Device device, size_t shift = 0) : device_(device), shift_(shift), memory_(memory_of(device)) {}

  std::string name() const {
    if (device_.kind == Device::Kind::cuda) return "cuda";
    return (device_.simd.empty() ? "best" : device_.simd) +
           (device_.threads > 1 ? "x" + std::to_string(device_.threads) : "");
  }
  const Device& device() const { return device_; }

  // With feedback, `after` gets the new residuals.
  Raw encode(const Plan& plan, const std::vector<Raw>& tensors, const Stamp& stamp,
             const TestFeedback* feedback = nullptr, std::vector<Raw>* after = nullptr) const {
    auto runner = make_runner(plan, device_);
    std::vector<DeviceBytes> in, before, next;
    std::vector<const void*> in_p, before_p;
    std::vector<void*> after_p;
    for (size_t i = 0; i < tensors.size(); ++i) {
      in.push_back(upload(tensors[i], shift_));
      in_p.push_back(in.back().get() + shift_);
      if (feedback) {
        before.push_back(upload(feedback->before[i], shift_));
        next.push_back(upload(Raw(feedback->before[i].size(), std::byte{0xee}), shift_));
        before_p.push_back(before.back().get() + shift_);
        after_p.push_back(next.back().get() + shift_);
      }
    }
    DeviceBytes message = upload(Raw(plan.message_bytes(), std::byte{0xdd}));
    const std::span<std::byte> bytes(message.get(), plan.message_bytes());
    if (feedback) {
      const Residuals residuals{before_p, after_p, feedback->dtype, feedback->loss_scale};
      runner->encode(in_p, stamp, bytes, &residuals);
    } else {
      runner->encode(in_p, stamp, bytes);
    }
    runner->wait();
    if (feedback && after) {
      after->clear();
      for (size_t i = 0; i < tensors.size(); ++i)
        after->push_back(download(next[i].get() + shift_, feedback->before[i].size()));
    }
    return download(message.get(), plan.message_bytes());
  }

  // Outputs start as `start` (or as 0xcc everywhere, so that an element nobody writes is seen).
  std::vector<Raw> decode(const Plan& plan, const Raw& message, Write write = Write::set,
                          const std::vector<Raw>* start = nullptr, const Stamp* expected = nullptr) const {
    auto runner = make_runner(plan, device_);
    std::vector<DeviceBytes> out;
    std::vector<void*> out_p;
    for (size_t i = 0; i < plan.tensors().size(); ++i) {
      const TensorSpec& t = plan.tensors()[i];
      out.push_back(upload(start ? (*start)[i] : Raw(t.count * bytes_of(t.dtype), std::byte{0xcc}), shift_));
      out_p.push_back(out.back().get() + shift_);
    }
    DeviceBytes bytes = upload(message);
    runner->decode({bytes.get(), message.size()}, out_p, write, expected);
    runner->wait();
    std::vector<Raw> result;
    for (size_t i = 0; i < plan.tensors().size(); ++i)
      result.push_back(download(out[i].get() + shift_, plan.tensors()[i].count * bytes_of(plan.tensors()[i].dtype)));
    return result;
  }

 private:
  struct Release {
    std::shared_ptr<Memory> memory;
    void operator()(std::byte* data) const { memory->release(data); }
  };
  using DeviceBytes = std::unique_ptr<std::byte, Release>;

  DeviceBytes upload(const Raw& raw, size_t shift = 0) const {
    DeviceBytes buffer(static_cast<std::byte*>(memory_->allocate(raw.size() + shift)), Release{memory_});
    memory_->from_host(buffer.get() + shift, raw.data(), raw.size());
    return buffer;
  }
  Raw download(const std::byte* data, size_t bytes) const {
    Raw raw(bytes);
    memory_->to_host(raw.data(), data, bytes);
    return raw;
  }

  Device device_;
  size_t shift_;
  std::shared_ptr<Memory> memory_;
};

// The reference loop first.
inline std::vector<TestDevice> test_devices() {
  std::vector<TestDevice> all;
  all.emplace_back(Device{.simd = "scalar"});
  for (const std::string& target : simd_targets()) all.emplace_back(Device{.simd = target});
  if (cuda_devices() > 0) all.emplace_back(Device{.kind = Device::Kind::cuda});
  return all;
}

}  // namespace gradwire::test
