// SPDX-License-Identifier: Apache-2.0
#include "feedback/residual_store.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <utility>

#include "core/bits.h"
#include "core/check.h"
#include "core/refuse.h"
#include "gradwire/error.h"

namespace gradwire {
namespace {

std::string_view name_of(Direction direction) { return direction == Direction::up ? "up" : "down"; }

uint64_t begun_elements(const Residual& residual) {
  uint64_t covered = 0;
  for (auto [first, count] : residual.begun) covered += count;
  return covered;
}

uint64_t next_version() {
  static std::atomic<uint64_t> last{0};
  return ++last;
}

}  // namespace

ResidualStore::ResidualStore(DType dtype, const Device& device)
    : dtype_(dtype), device_(device), memory_(memory_of(device)), version_(next_version()) {
  if (dtype == DType::f16) refuse_usage("residual dtype is f16; allowed are f32 and bf16", "residual");
}

Residual& ResidualStore::make(const ResidualKey& key, uint64_t count) {
  version_ = next_version();
  const auto buffer = [&] { return Buffer(memory_, Buffer::Place::device, bytes(count)); };
  return residuals_.emplace(key, Residual{count, buffer(), buffer()}).first->second;
}

void ResidualStore::add(const ResidualKey& key, uint64_t count) {
  const auto same = residuals_.find(key);
  if (same != residuals_.end() && same->second.count == count) return;
  if (key.first > UINT64_MAX - count || count > SIZE_MAX / 8)
    refuse_usage(
        fmt::format("tensor '{}': {} elements from {} on are more than memory can hold", key.name, count, key.first),
        "count");
  uint64_t start = 0;
  if (same != residuals_.end() || find(key.direction, key.name, key.first, count, start))
    refuse_usage(fmt::format("tensor '{}': the {} residual was added with other numbers than count {}, first {}",
                             key.name, name_of(key.direction), count, key.first),
                 "count");
  memory_->zero(make(key, count).current.at(0), bytes(count));
}

bool ResidualStore::holds(const ResidualKey& wanted, uint64_t count) const {
  const auto after = residuals_.upper_bound(wanted);
  if (after == residuals_.begin()) return false;
  const auto& [key, residual] = *std::prev(after);
  return key.direction == wanted.direction && key.name == wanted.name && wanted.first - key.first <= residual.count &&
         residual.count - (wanted.first - key.first) >= count;
}

// The residual that holds all of [first, first + count), and the element that it starts at; null if it holds none of
// it.
Residual* ResidualStore::find(Direction direction, const std::string& name, uint64_t first, uint64_t count,
                              uint64_t& start) {
  const auto after = residuals_.upper_bound(ResidualKey{direction, name, first});
  if (after != residuals_.begin()) {
    auto& [key, residual] = *std::prev(after);
    if (key.direction == direction && key.name == name && first - key.first < residual.count) {
      start = key.first;
      if (residual.count - (first - key.first) >= count) return &residual;
      refuse_usage(fmt::format("tensor '{}': elements {} to {} cross the end of the {} residual {} to {}", name, first,
                               first + count, name_of(direction), key.first, key.first + residual.count),
                   "first");
    }
  }
  if (after != residuals_.end() && after->first.direction == direction && after->first.name == name &&
      after->first.first - first < count)
    refuse_usage(fmt::format("tensor '{}': elements {} to {} cross the start of the {} residual at {}", name, first,
                             first + count, name_of(direction), after->first.first),
                 "first");
  return nullptr;
}

std::unique_ptr<ErrorFeedback::Pointers> ResidualStore::begin(Direction direction, uint64_t step,
                                                              std::span<const TensorSpec> tensors, float loss_scale) {
  auto pointers = std::make_unique<ErrorFeedback::Pointers>();
  begin(places(direction, tensors), step, loss_scale, *pointers);
  return pointers;
}

ResidualPlaces ResidualStore::places(Direction direction, std::span<const TensorSpec> tensors) {
  ResidualPlaces places{.list = {}, .version = version_};
  for (const TensorSpec& tensor : tensors) {
    uint64_t from = 0;
    Residual* residual = tensor.count ? find(direction, tensor.name, tensor.first, tensor.count, from) : nullptr;
    places.list.push_back({residual, tensor.first, tensor.count, from});
  }
  return places;
}

void ResidualStore::begin(const ResidualPlaces& places, uint64_t step, float loss_scale,
                          ErrorFeedback::Pointers& pointers) {
  GW_CHECK(holds(places));
  if (!(loss_scale > 0) || !std::isfinite(loss_scale))
    refuse_usage(fmt::format("loss_scale is {}; it must be finite and above 0", loss_scale), "loss_scale");
  if (open_ && *open_ != step)
    refuse_usage(fmt::format("step {} cannot begin: step {} is open; commit it or roll it back first", step, *open_),
                 "step");
  pointers.before.clear();
  pointers.after.clear();
  bool any = false;
  size_t marked = 0;
  try {
    for (; marked < places.list.size(); ++marked) {
      const auto& [residual, first, count, from] = places.list[marked];
      if (!residual) {
        pointers.before.push_back(nullptr);
        pointers.after.push_back(nullptr);
        continue;
      }
      const auto next = residual->begun.lower_bound(first);
      const bool clear = (next == residual->begun.end() || next->first - first >= count) &&
                         (next == residual->begun.begin() || first - std::prev(next)->first >= std::prev(next)->second);
      if (!clear)
        refuse_usage(fmt::format("tensor '{}': elements {} to {} were begun before in step {}", name_at(*residual),
                                 first, first + count, step),
                     "step");
      residual->begun.emplace_hint(next, first, count);
      any = true;
      pointers.before.push_back(residual->current.at(bytes(first - from)));
      pointers.after.push_back(residual->next.at(bytes(first - from)));
    }
  } catch (...) {
    // All of the list or nothing of it is begun, so that the caller can correct it and begin again.
    for (size_t i = 0; i < marked; ++i)
      if (places.list[i].residual) places.list[i].residual->begun.erase(places.list[i].first);
    throw;
  }
  if (any) open_ = step;
  pointers.residuals = {pointers.before, pointers.after, dtype_, loss_scale};
}

const std::string& ResidualStore::name_at(const Residual& residual) const {
  return std::find_if(residuals_.begin(), residuals_.end(), [&](const auto& one) { return &one.second == &residual; })
      ->first.name;
}

// Ends the open step if it is `step`; says whether there is anything to decide.
bool ResidualStore::close(uint64_t step, const char* how) {
  if (!open_) return false;
  if (*open_ != step)
    refuse_usage(fmt::format("{} of step {}: step {} is open; commit it or roll it back first", how, step, *open_),
                 "step");
  open_.reset();
  return true;
}

void ResidualStore::check_closed(const char* what) const {
  if (open_) refuse_usage(fmt::format("{}: step {} is open; commit it or roll it back first", what, *open_), "step");
}

void ResidualStore::commit(uint64_t step) {
  if (!close(step, "commit")) return;
  for (auto& [key, residual] : residuals_) {
    if (begun_elements(residual) == residual.count) {
      std::swap(residual.current, residual.next);
    } else {
      for (auto [first, count] : residual.begun) {
        const uint64_t at = bytes(first - key.first);
        memory_->copy(residual.current.at(at), residual.next.at(at), bytes(count));
      }
    }
    residual.begun.clear();
  }
}

void ResidualStore::rollback(uint64_t step) {
  if (!close(step, "rollback")) return;
  for (auto& [key, residual] : residuals_) residual.begun.clear();
}

void ResidualStore::commit_if_finite(uint64_t step, FiniteCheck& finite, const Device& device) {
  std::vector<CopySpan> restored;
  bool whole = !memory_->on_host();
  for (const auto& [key, residual] : residuals_) {
    const uint64_t covered = begun_elements(residual);
    whole &= covered == 0 || covered == residual.count;
    if (covered > 0) restored.push_back({residual.current.at(0), residual.next.at(0), bytes(residual.count)});
  }
  // Parts are copied by the host, so it has to know.
  if (!whole) return finite.bad() ? rollback(step) : commit(step);
  // The buffers are swapped in any case; if the step is bad, the GPU first copies the old values over the new ones.
  finite.copy_if_bad(device, restored);
  commit(step);
}

const Residual& ResidualStore::at(const ResidualKey& key) const {
  const auto found = residuals_.find(key);
  if (found == residuals_.end())
    refuse_usage(fmt::format("tensor '{}' has no {} residual that starts at element {}", key.name,
                             name_of(key.direction), key.first),
                 "name");
  return found->second;
}

std::vector<float> ResidualStore::values(const ResidualKey& key) const {
  const Residual& residual = at(key);
  std::vector<float> out(residual.count);
  if (dtype_ == DType::f32) {
    memory_->to_host(out.data(), residual.current.at(0), bytes(residual.count));
    return out;
  }
  std::vector<uint16_t> raw(residual.count);
  memory_->to_host(raw.data(), residual.current.at(0), bytes(residual.count));
  std::transform(raw.begin(), raw.end(), out.begin(), bf16_to_f32);
  return out;
}

void ResidualStore::set(const ResidualKey& key, std::span<const float> values) {
  check_closed("set_residual");
  const auto found = residuals_.find(key);
  if (found == residuals_.end() || found->second.count != values.size())
    refuse_usage(fmt::format("tensor '{}' has no {} residual of {} elements that starts at element {}", key.name,
                             name_of(key.direction), values.size(), key.first),
                 "name");
  std::byte* const to = found->second.current.at(0);
  if (dtype_ == DType::f32) return memory_->from_host(to, values.data(), bytes(values.size()));
  std::vector<uint16_t> raw(values.size());
  std::transform(values.begin(), values.end(), raw.begin(), f32_to_bf16);
  memory_->from_host(to, raw.data(), bytes(raw.size()));
}

std::span<float> ResidualStore::floats(const ResidualKey& key) const {
  GW_CHECK(memory_->on_host() && dtype_ == DType::f32);
  const Residual& residual = at(key);
  return {residual.current.floats(), residual.count};
}

uint64_t ResidualStore::bytes() const {
  uint64_t sum = 0;
  for (const auto& [key, residual] : residuals_) sum += 2 * bytes(residual.count);
  return sum;
}

}  // namespace gradwire
