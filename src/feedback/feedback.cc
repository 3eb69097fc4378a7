// SPDX-License-Identifier: Apache-2.0
// ErrorFeedback is a ResidualStore that can be saved: residuals, and the extra state that must survive with them.
#include "gradwire/feedback.h"

#include <fmt/format.h>
#include <xxhash.h>

#include <algorithm>
#include <utility>

#include "feedback/feedback_state.h"
#include "feedback/residual_file.h"
#include "gradwire/error.h"

namespace gradwire {

ErrorFeedback::ErrorFeedback(DType dtype, const Device& device) : state_(std::make_unique<State>(dtype, device)) {}
ErrorFeedback::~ErrorFeedback() = default;
ErrorFeedback::ErrorFeedback(ErrorFeedback&&) noexcept = default;
ErrorFeedback& ErrorFeedback::operator=(ErrorFeedback&&) noexcept = default;

void ErrorFeedback::add(Direction direction, const std::string& name, uint64_t count, uint64_t first) {
  state_->store.add({direction, name, first}, count);
}
bool ErrorFeedback::holds(Direction direction, const std::string& name, uint64_t count, uint64_t first) const {
  return state_->store.holds({direction, name, first}, count);
}
std::unique_ptr<ErrorFeedback::Pointers> ErrorFeedback::begin(Direction direction, uint64_t step,
                                                              std::span<const TensorSpec> tensors, float loss_scale) {
  return state_->store.begin(direction, step, tensors, loss_scale);
}
void ErrorFeedback::commit(uint64_t step) { state_->store.commit(step); }
void ErrorFeedback::rollback(uint64_t step) { state_->store.rollback(step); }
std::optional<uint64_t> ErrorFeedback::open_step() const { return state_->store.open_step(); }

void ErrorFeedback::save(const std::string& path) const {
  const ResidualStore& store = state_->store;
  store.check_closed("save");
  std::vector<ResidualEntry> entries;
  std::vector<const Residual*> sources;
  for (const auto& [key, residual] : store.residuals()) {
    entries.push_back({key.direction, key.name, key.first, residual.count});
    sources.push_back(&residual);
  }
  std::vector<const std::vector<std::byte>*> extras;
  for (const auto& [name, bytes] : state_->extras) {
    entries.push_back({kExtra, name, 0, bytes.size() / bytes_of(store.dtype())});
    extras.push_back(&bytes);
  }
  write_residual_file(path, store.dtype(), entries, [&](size_t entry, uint64_t offset, std::span<std::byte> chunk) {
    if (entry < sources.size())
      store.memory().to_host(chunk.data(), sources[entry]->current.at(offset), chunk.size());
    else
      std::copy_n(extras[entry - sources.size()]->begin() + static_cast<ptrdiff_t>(offset), chunk.size(),
                  chunk.begin());
  });
}

ErrorFeedback ErrorFeedback::load(const std::string& path, const Device& device) {
  ResidualReader reader(path);
  ErrorFeedback feedback(reader.dtype(), device);
  State& state = *feedback.state_;
  std::vector<Residual*> targets;  // null: extra state
  for (const ResidualEntry& entry : reader.entries())
    targets.push_back(entry.direction == kExtra
                          ? nullptr
                          : &state.store.make({entry.direction, entry.name, entry.first}, entry.count));
  reader.read_bodies([&](size_t entry, uint64_t offset, std::span<const std::byte> chunk) {
    if (targets[entry])
      return state.store.memory().from_host(targets[entry]->current.at(offset), chunk.data(), chunk.size());
    std::vector<std::byte>& extra = state.extras[reader.entries()[entry].name];
    extra.insert(extra.end(), chunk.begin(), chunk.end());
  });
  return feedback;
}

void ErrorFeedback::set_extra(const std::string& name, std::span<const std::byte> bytes) {
  if (bytes.size() % 8 != 0)
    throw Error(ErrorKind::usage,
                fmt::format("extra state '{}' has {} bytes; expected a multiple of 8", name, bytes.size()), "extra");
  state_->extras[name].assign(bytes.begin(), bytes.end());
}
const std::map<std::string, std::vector<std::byte>>& ErrorFeedback::extras() const { return state_->extras; }

std::vector<float> ErrorFeedback::residual(Direction direction, const std::string& name, uint64_t first) const {
  return state_->store.values({direction, name, first});
}
void ErrorFeedback::set_residual(Direction direction, const std::string& name, uint64_t first,
                                 std::span<const float> values) {
  state_->store.set({direction, name, first}, values);
}

std::vector<ErrorFeedback::Entry> ErrorFeedback::entries() const {
  std::vector<Entry> all;
  for (const auto& [key, residual] : state_->store.residuals())
    all.push_back({key.direction, key.name, key.first, residual.count});
  return all;
}

uint64_t ErrorFeedback::hash() const {
  const ResidualStore& store = state_->store;
  XXH64_state_t hash;
  XXH64_reset(&hash, static_cast<XXH64_hash_t>(store.dtype()));
  std::vector<std::byte> chunk(kResidualChunk);
  for (const auto& [key, residual] : store.residuals()) {
    const uint64_t head[] = {static_cast<uint64_t>(key.direction), key.name.size(), key.first, residual.count};
    XXH64_update(&hash, head, sizeof head);
    XXH64_update(&hash, key.name.data(), key.name.size());
    for (uint64_t at = 0, bytes = store.bytes(residual.count); at < bytes; at += chunk.size()) {
      const size_t n = std::min<uint64_t>(bytes - at, chunk.size());
      store.memory().to_host(chunk.data(), residual.current.at(at), n);
      XXH64_update(&hash, chunk.data(), n);
    }
  }
  for (const auto& [name, bytes] : state_->extras) {
    XXH64_update(&hash, name.data(), name.size());
    XXH64_update(&hash, bytes.data(), bytes.size());
  }
  return XXH64_digest(&hash);
}

DType ErrorFeedback::dtype() const { return state_->store.dtype(); }
const Device& ErrorFeedback::device() const { return state_->store.device(); }
uint64_t ErrorFeedback::bytes() const { return state_->store.bytes(); }

}  // namespace gradwire
