// SPDX-License-Identifier: Apache-2.0
// Residuals by (side, tensor name, first element). Each has two buffers: the current one, which encode reads, and the
// other, where encode writes what will be owed if the step is taken. A step that began all of a residual is
// committed by swapping the two; where only pieces were begun, their new values are copied into the current buffer, so
// the rest keeps what it had. Rolling back forgets what was begun: the current buffer was never written to.
#include "gradwire/feedback.h"

#include <fmt/format.h>
#include <xxhash.h>

#include <algorithm>
#include <cmath>
#include <compare>
#include <optional>
#include <set>
#include <utility>

#include "core/bits.h"
#include "core/float_mode.h"
#include "device/memory.h"
#include "device/verdict.h"
#include "feedback/owners.h"
#include "feedback/residual_file.h"
#include "gradwire/error.h"

namespace gradwire {
namespace {

struct Key {
  Side side;
  std::string name;
  uint64_t first;
  friend auto operator<=>(const Key&, const Key&) = default;
};

class Buffer {
 public:
  Buffer(std::shared_ptr<Memory> memory, size_t bytes) : memory_(std::move(memory)), data_(memory_->allocate(bytes)) {}
  Buffer(Buffer&& other) noexcept : memory_(std::move(other.memory_)), data_(std::exchange(other.data_, nullptr)) {}
  Buffer& operator=(Buffer&& other) noexcept {
    std::swap(memory_, other.memory_);
    std::swap(data_, other.data_);
    return *this;
  }
  ~Buffer() {
    if (data_) memory_->release(data_);
  }
  std::byte* at(uint64_t byte) const { return static_cast<std::byte*>(data_) + byte; }

 private:
  std::shared_ptr<Memory> memory_;
  void* data_;
};

struct Residual {
  uint64_t count;
  Buffer current, next;
  std::map<uint64_t, uint64_t> begun{};  // first element (of the tensor) -> count; disjoint
};

std::string_view name_of(Side side) { return side == Side::up ? "up" : "down"; }

[[noreturn]] void refuse(const std::string& message, const char* field) {
  throw Error(ErrorKind::usage, message, field);
}

// A double rounded once to f32 or bf16. Going to bf16 through f32 would round twice; rounding the first time to odd
// (inexact results get an odd last bit) leaves the second rounding right.
float round_to(double x, DType dtype) {
  float f = static_cast<float>(x);
  if (dtype == DType::f32) return f;
  if (static_cast<double>(f) != x && (float_bits(f) & 1u) == 0)
    f = std::nextafter(f, static_cast<double>(f) < x ? HUGE_VALF : -HUGE_VALF);
  return bf16_to_f32(f32_to_bf16(f));
}

}  // namespace

struct ErrorFeedback::State {
  State(DType d, const Device& on) : dtype(d), device(on), memory(memory_of(on)) {}

  DType dtype;
  Device device;
  std::shared_ptr<Memory> memory;
  std::map<Key, Residual> residuals;
  std::optional<uint64_t> open;  // the step that was begun and not yet decided
  std::map<std::string, std::vector<std::byte>> notes;

  uint64_t bytes(uint64_t count) const { return count * bytes_of(dtype); }

  Residual& add(const Key& key, uint64_t count) {
    Residual fresh{count, Buffer(memory, bytes(count)), Buffer(memory, bytes(count))};
    return residuals.emplace(key, std::move(fresh)).first->second;
  }

  // The residual that holds all of [first, first + count); null if no part of it is held.
  std::pair<const Key, Residual>* find(Side side, const std::string& name, uint64_t first, uint64_t count) {
    auto after = residuals.upper_bound(Key{side, name, first});
    if (after != residuals.begin()) {
      auto& [key, residual] = *std::prev(after);
      if (key.side == side && key.name == name && first - key.first < residual.count) {
        if (residual.count - (first - key.first) >= count) return &*std::prev(after);
        refuse(fmt::format("tensor '{}': elements {} to {} cross the end of the {} residual {} to {}", name, first,
                           first + count, name_of(side), key.first, key.first + residual.count),
               "first");
      }
    }
    if (after != residuals.end() && after->first.side == side && after->first.name == name &&
        after->first.first - first < count)
      refuse(fmt::format("tensor '{}': elements {} to {} cross the start of the {} residual at {}", name, first,
                         first + count, name_of(side), after->first.first),
             "first");
    return nullptr;
  }

  // Ends the open step if it is `step`; says whether there is anything to decide.
  bool close(uint64_t step, const char* how) {
    if (!open) return false;
    if (*open != step)
      refuse(fmt::format("{} of step {}: step {} is open; commit it or roll it back first", how, step, *open), "step");
    open.reset();
    return true;
  }

  void check_closed(const char* what) const {
    if (open) refuse(fmt::format("{}: step {} is open; commit it or roll it back first", what, *open), "step");
  }

  std::vector<float> values(const Residual& residual) const {
    std::vector<float> out(residual.count);
    if (dtype == DType::f32) {
      memory->to_host(out.data(), residual.current.at(0), bytes(residual.count));
      return out;
    }
    std::vector<uint16_t> raw(residual.count);
    memory->to_host(raw.data(), residual.current.at(0), bytes(residual.count));
    std::transform(raw.begin(), raw.end(), out.begin(), bf16_to_f32);
    return out;
  }

  void set(Residual& residual, std::span<const float> values) {
    if (dtype == DType::f32) return memory->from_host(residual.current.at(0), values.data(), bytes(values.size()));
    std::vector<uint16_t> raw(values.size());
    std::transform(values.begin(), values.end(), raw.begin(), f32_to_bf16);
    memory->from_host(residual.current.at(0), raw.data(), bytes(raw.size()));
  }
};

ErrorFeedback::ErrorFeedback(DType dtype, const Device& device) {
  if (dtype == DType::f16) refuse("residual dtype is f16; allowed are f32 and bf16", "residual");
  state_ = std::make_unique<State>(dtype, device);
}
ErrorFeedback::~ErrorFeedback() = default;
ErrorFeedback::ErrorFeedback(ErrorFeedback&&) noexcept = default;
ErrorFeedback& ErrorFeedback::operator=(ErrorFeedback&&) noexcept = default;

void ErrorFeedback::add(Side side, const std::string& name, uint64_t count, uint64_t first) {
  const auto same = state_->residuals.find(Key{side, name, first});
  if (same != state_->residuals.end() && same->second.count == count) return;
  if (first > UINT64_MAX - count || count > SIZE_MAX / 8)
    refuse(fmt::format("tensor '{}': {} elements from {} on are more than memory can hold", name, count, first),
           "count");
  if (same != state_->residuals.end() || state_->find(side, name, first, count))
    refuse(fmt::format("tensor '{}': the {} residual was added with other numbers than count {}, first {}", name,
                       name_of(side), count, first),
           "count");
  Residual& fresh = state_->add(Key{side, name, first}, count);
  state_->memory->zero(fresh.current.at(0), state_->bytes(count));
}

bool ErrorFeedback::holds(Side side, const std::string& name, uint64_t count, uint64_t first) const {
  const auto after = state_->residuals.upper_bound(Key{side, name, first});
  if (after == state_->residuals.begin()) return false;
  const auto& [key, residual] = *std::prev(after);
  return key.side == side && key.name == name && first - key.first <= residual.count &&
         residual.count - (first - key.first) >= count;
}

std::unique_ptr<ErrorFeedback::Pointers> ErrorFeedback::begin(Side side, uint64_t step,
                                                              std::span<const TensorSpec> tensors, float loss_scale) {
  if (!(loss_scale > 0) || !std::isfinite(loss_scale))
    refuse(fmt::format("loss_scale is {}; it must be finite and above 0", loss_scale), "loss_scale");
  if (state_->open && *state_->open != step)
    refuse(fmt::format("step {} cannot begin: step {} is open; commit it or roll it back first", step, *state_->open),
           "step");
  auto pointers = std::make_unique<Pointers>();
  std::vector<std::pair<Residual*, uint64_t>> marked;
  try {
    for (const TensorSpec& tensor : tensors) {
      auto* found = tensor.count ? state_->find(side, tensor.name, tensor.first, tensor.count) : nullptr;
      if (!found) {
        pointers->before.push_back(nullptr);
        pointers->after.push_back(nullptr);
        continue;
      }
      Residual& residual = found->second;
      const auto next = residual.begun.lower_bound(tensor.first);
      const bool clear =
          (next == residual.begun.end() || next->first - tensor.first >= tensor.count) &&
          (next == residual.begun.begin() || tensor.first - std::prev(next)->first >= std::prev(next)->second);
      if (!clear)
        refuse(fmt::format("tensor '{}': elements {} to {} were begun before in step {}", tensor.name, tensor.first,
                           tensor.first + tensor.count, step),
               "step");
      residual.begun.emplace_hint(next, tensor.first, tensor.count);
      marked.emplace_back(&residual, tensor.first);
      const uint64_t at = state_->bytes(tensor.first - found->first.first);
      pointers->before.push_back(residual.current.at(at));
      pointers->after.push_back(residual.next.at(at));
    }
  } catch (...) {
    for (auto [residual, first] : marked) residual->begun.erase(first);
    throw;
  }
  if (!marked.empty()) state_->open = step;
  pointers->residuals = {pointers->before, pointers->after, state_->dtype, loss_scale};
  return pointers;
}

void ErrorFeedback::commit(uint64_t step) {
  if (!state_->close(step, "commit")) return;
  for (auto& [key, residual] : state_->residuals) {
    uint64_t covered = 0;
    for (auto [first, count] : residual.begun) covered += count;
    if (covered == residual.count) {
      std::swap(residual.current, residual.next);
    } else {
      for (auto [first, count] : residual.begun) {
        const uint64_t at = state_->bytes(first - key.first);
        state_->memory->copy(residual.current.at(at), residual.next.at(at), state_->bytes(count));
      }
    }
    residual.begun.clear();
  }
}

void ErrorFeedback::rollback(uint64_t step) {
  if (!state_->close(step, "rollback")) return;
  for (auto& [key, residual] : state_->residuals) residual.begun.clear();
}

void ErrorFeedback::decide(uint64_t step, Verdict& verdict, const Device& device) {
  if (state_->memory->on_host()) return verdict.bad() ? rollback(step) : commit(step);
  std::vector<KeepSpan> kept;
  bool whole = true;
  for (const auto& [key, residual] : state_->residuals) {
    uint64_t covered = 0;
    for (auto [first, count] : residual.begun) covered += count;
    whole &= covered == 0 || covered == residual.count;
    if (covered > 0) kept.push_back({residual.current.at(0), residual.next.at(0), state_->bytes(residual.count)});
  }
  if (!whole) return verdict.bad() ? rollback(step) : commit(step);  // pieces are copied by the host
  verdict.keep_if_bad(device, kept);
  commit(step);
}

void ErrorFeedback::save(const std::string& path) const {
  state_->check_closed("save");
  std::vector<ResidualEntry> entries;
  std::vector<const Residual*> sources;
  for (const auto& [key, residual] : state_->residuals) {
    entries.push_back({key.side, key.name, key.first, residual.count});
    sources.push_back(&residual);
  }
  std::vector<const std::vector<std::byte>*> notes;
  for (const auto& [name, bytes] : state_->notes) {
    entries.push_back({kNote, name, 0, bytes.size() / bytes_of(state_->dtype)});
    notes.push_back(&bytes);
  }
  write_residual_file(path, state_->dtype, entries, [&](size_t entry, uint64_t offset, std::span<std::byte> chunk) {
    if (entry < sources.size())
      state_->memory->to_host(chunk.data(), sources[entry]->current.at(offset), chunk.size());
    else
      std::copy_n(notes[entry - sources.size()]->begin() + static_cast<ptrdiff_t>(offset), chunk.size(), chunk.begin());
  });
}

ErrorFeedback ErrorFeedback::load(const std::string& path, const Device& device) {
  ResidualReader reader(path);
  ErrorFeedback feedback(reader.dtype(), device);
  std::vector<Residual*> targets;  // null: a note
  for (const ResidualEntry& entry : reader.entries())
    targets.push_back(
        entry.side == kNote ? nullptr : &feedback.state_->add(Key{entry.side, entry.name, entry.first}, entry.count));
  reader.read_bodies([&](size_t entry, uint64_t offset, std::span<const std::byte> chunk) {
    if (targets[entry])
      return feedback.state_->memory->from_host(targets[entry]->current.at(offset), chunk.data(), chunk.size());
    std::vector<std::byte>& note = feedback.state_->notes[reader.entries()[entry].name];
    note.insert(note.end(), chunk.begin(), chunk.end());
  });
  return feedback;
}

std::vector<ErrorFeedback> ErrorFeedback::redistribute(std::span<const ErrorFeedback> ranks, int new_world) {
  const FloatMode ieee;
  if (ranks.empty()) refuse("redistribute: no states were given; pass one of every rank", "ranks");
  if (new_world < 1)
    refuse(fmt::format("redistribute: new_world is {}; it must be at least 1", new_world), "new_world");
  const State& model = *ranks.front().state_;
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    ranks[rank].state_->check_closed("redistribute");
    if (ranks[rank].state_->dtype != model.dtype)
      refuse(fmt::format("redistribute: residuals of rank {} are {}, those of rank 0 {}", rank,
                         gradwire::name_of(ranks[rank].state_->dtype), gradwire::name_of(model.dtype)),
             "residual");
  }
  std::vector<ErrorFeedback> fresh;
  for (int rank = 0; rank < new_world; ++rank) fresh.emplace_back(model.dtype, model.device);

  for (ErrorFeedback& rank : fresh) rank.state_->notes = model.notes;

  // up: every new rank owes the mean of what the old ones owed, so the mean over the new world is the same.
  std::set<Key> keys;
  for (const ErrorFeedback& rank : ranks)
    for (const auto& [key, residual] : rank.state_->residuals)
      if (key.side == Side::up) keys.insert(key);
  for (const Key& key : keys) {
    std::vector<double> sum;
    for (size_t rank = 0; rank < ranks.size(); ++rank) {
      const auto found = ranks[rank].state_->residuals.find(key);
      if (found == ranks[rank].state_->residuals.end() || (rank > 0 && found->second.count != sum.size()))
        refuse(fmt::format("redistribute: rank {} has no up residual of tensor '{}' like the others (first {})", rank,
                           key.name, key.first),
               "ranks");
      const std::vector<float> owed = ranks[rank].state_->values(found->second);
      sum.resize(owed.size());
      for (size_t i = 0; i < owed.size(); ++i) sum[i] += owed[i];
    }
    std::vector<float> mean(sum.size());
    for (size_t i = 0; i < sum.size(); ++i) mean[i] = round_to(sum[i] / static_cast<double>(ranks.size()), model.dtype);
    for (ErrorFeedback& rank : fresh) rank.state_->set(rank.state_->add(key, mean.size()), mean);
  }

  // down: owed once, by whoever owns the element: the pieces are joined and cut again for the new owners.
  std::set<std::string> names;
  for (const ErrorFeedback& rank : ranks)
    for (const auto& [key, residual] : rank.state_->residuals)
      if (key.side == Side::down) names.insert(key.name);
  for (const std::string& name : names) {
    std::map<uint64_t, std::vector<float>> pieces;
    uint64_t total = 0, end = 0;
    for (const ErrorFeedback& rank : ranks)
      for (const auto& [key, residual] : rank.state_->residuals)
        if (key.side == Side::down && key.name == name && residual.count > 0) {
          pieces.emplace(key.first, rank.state_->values(residual));
          total += residual.count;
          end = std::max(end, key.first + residual.count);
        }
    std::vector<float> whole;
    whole.reserve(total);
    for (const auto& [first, piece] : pieces) {
      if (first != whole.size()) break;
      whole.insert(whole.end(), piece.begin(), piece.end());
    }
    if (whole.size() != end || total != end)
      refuse(
          fmt::format("redistribute: the down residuals of tensor '{}' do not cover its elements exactly once", name),
          "ranks");
    for (const OwnedRun& run : owners(name, whole.size(), new_world)) {
      State& owner = *fresh[static_cast<size_t>(run.owner)].state_;
      owner.set(owner.add(Key{Side::down, name, run.first}, run.count), std::span(whole).subspan(run.first, run.count));
    }
  }
  return fresh;
}

void ErrorFeedback::set_note(const std::string& name, std::span<const std::byte> bytes) {
  if (bytes.size() % 8 != 0)
    refuse(fmt::format("note '{}' has {} bytes; expected a multiple of 8", name, bytes.size()), "note");
  state_->notes[name].assign(bytes.begin(), bytes.end());
}
const std::map<std::string, std::vector<std::byte>>& ErrorFeedback::notes() const { return state_->notes; }

std::vector<float> ErrorFeedback::residual(Side side, const std::string& name, uint64_t first) const {
  const auto found = state_->residuals.find(Key{side, name, first});
  if (found == state_->residuals.end())
    refuse(fmt::format("tensor '{}' has no {} residual that starts at element {}", name, name_of(side), first), "name");
  return state_->values(found->second);
}

std::vector<ErrorFeedback::Entry> ErrorFeedback::entries() const {
  std::vector<Entry> all;
  for (const auto& [key, residual] : state_->residuals) all.push_back({key.side, key.name, key.first, residual.count});
  return all;
}

void ErrorFeedback::set_residual(Side side, const std::string& name, uint64_t first, std::span<const float> values) {
  state_->check_closed("set_residual");
  const auto found = state_->residuals.find(Key{side, name, first});
  if (found == state_->residuals.end() || found->second.count != values.size())
    refuse(fmt::format("tensor '{}' has no {} residual of {} elements that starts at element {}", name, name_of(side),
                       values.size(), first),
           "name");
  state_->set(found->second, values);
}

DType ErrorFeedback::dtype() const { return state_->dtype; }

uint64_t ErrorFeedback::hash() const {
  XXH64_state_t hash;
  XXH64_reset(&hash, static_cast<XXH64_hash_t>(state_->dtype));
  std::vector<std::byte> chunk(kResidualChunk);
  for (const auto& [key, residual] : state_->residuals) {
    const uint64_t head[] = {static_cast<uint64_t>(key.side), key.name.size(), key.first, residual.count};
    XXH64_update(&hash, head, sizeof head);
    XXH64_update(&hash, key.name.data(), key.name.size());
    for (uint64_t at = 0, bytes = state_->bytes(residual.count); at < bytes; at += chunk.size()) {
      const size_t n = std::min<uint64_t>(bytes - at, chunk.size());
      state_->memory->to_host(chunk.data(), residual.current.at(at), n);
      XXH64_update(&hash, chunk.data(), n);
    }
  }
  for (const auto& [name, bytes] : state_->notes) {
    XXH64_update(&hash, name.data(), name.size());
    XXH64_update(&hash, bytes.data(), bytes.size());
  }
  return XXH64_digest(&hash);
}

const Device& ErrorFeedback::device() const { return state_->device; }

uint64_t ErrorFeedback::bytes() const {
  uint64_t bytes = 0;
  for (const auto& [key, residual] : state_->residuals) bytes += 2 * state_->bytes(residual.count);
  return bytes;
}

}  // namespace gradwire
