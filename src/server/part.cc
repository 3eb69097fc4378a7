// SPDX-License-Identifier: Apache-2.0
#include "server/part.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "core/bits.h"
#include "gradwire/error.h"
#include "gradwire/message.h"
#include "server/ledger.h"

namespace gradwire::server {
namespace {

constexpr size_t kReaders = 4;

}  // namespace

Part::Part(const Signature& signature, const Cut& cut)
    : cut_(cut),
      sends_updates_(signature.sends_updates && cut.role == Role::weights),
      seed_(signature.seed),
      elements_(cut.elements()),
      up_(specs_of(signature, cut, Way::up)),
      down_plan_(specs_of(signature, cut, Way::down)),
      whole_plan_(specs_of(signature, cut, Way::whole)),
      down_runner_(make_runner(down_plan_, {})),
      whole_runner_(make_runner(whole_plan_, {})),
      x_(elements_),
      sum_(elements_) {
  for (const TensorSpec& spec : up_) name_hashes_.push_back(hash_name(spec.name));
  if (sends_updates_) {
    owed_.resize(elements_);
    owed_next_.resize(elements_);
  }
  ready_ = cut.role == Role::pool;  // begins with zeros, which nobody uses before the first mean
}

std::vector<void*> Part::pointers(std::vector<float>& values) const {
  std::vector<void*> list;
  float* at = values.data();
  for (const Piece& piece : cut_.pieces) {
    list.push_back(at);
    at += piece.count;
  }
  return list;
}

double Part::signed_sum_of(const std::vector<float>& values) const {
  double sum = 0;
  const float* at = values.data();
  for (size_t i = 0; i < cut_.pieces.size(); ++i) {
    sum += signed_sum({at, cut_.pieces[i].count}, name_hashes_[i], cut_.pieces[i].first);
    at += cut_.pieces[i].count;
  }
  return sum;
}

void Part::set(std::span<const std::byte> whole) {
  whole_runner_->decode(whole, pointers(sum_));
  if (!std::isfinite(signed_sum_of(sum_))) throw Error(ErrorKind::frame, "bad weights: they are not finite", "weights");
  x_ = sum_;
  ready_ = true;
}

void Part::set(std::span<const float> values) {
  GW_CHECK(values.size() == x_.size());
  x_.assign(values.begin(), values.end());
  ready_ = true;
}

// What a message says of its codecs is believed only where it says the same codecs as ours, perhaps with other tables.
Part::Reader& Part::reader_for(std::span<const std::byte> message) {
  const Head head = read_head(message, {.max_elements = elements_, .max_tensors = static_cast<uint32_t>(up_.size())});
  if (head.tensors.size() != up_.size())
    throw Error(ErrorKind::frame,
                fmt::format("bad message: it has {} tensors; expected {}", head.tensors.size(), up_.size()), "tensors");
  std::vector<Codec> codecs;
  for (const TensorSpec& tensor : head.tensors) codecs.push_back(tensor.codec);
  for (size_t i = 0; i < readers_.size(); ++i)
    if (readers_[i].codecs == codecs) {
      std::rotate(readers_.begin(), readers_.begin() + static_cast<std::ptrdiff_t>(i),
                  readers_.begin() + static_cast<std::ptrdiff_t>(i) + 1);
      return readers_.front();
    }
  std::vector<TensorSpec> specs = up_;
  for (size_t i = 0; i < specs.size(); ++i) {
    if (codecs[i].wire_spec() != specs[i].codec.wire_spec())
      throw Error(ErrorKind::frame,
                  fmt::format("bad message: tensor[{}] is coded by {}; expected {}", i, codecs[i].wire_spec(),
                              specs[i].codec.wire_spec()),
                  "spec");
    specs[i].codec = codecs[i];
  }
  Reader reader{codecs, std::make_unique<Plan>(std::move(specs)), nullptr};
  reader.runner = make_runner(*reader.plan, {});
  if (readers_.size() == kReaders) readers_.pop_back();
  readers_.insert(readers_.begin(), std::move(reader));
  return readers_.front();
}

void Part::decode(const Blob& message, std::vector<float>& to, Write write) {
  reader_for(*message).runner->decode(*message, pointers(to), write);
}

bool Part::knows(uint32_t slot, uint64_t sequence) const {
  const auto row = rows_.find(slot);
  return row != rows_.end() && sequence <= row->second.sequence;
}

void Part::forget(uint32_t slot) {
  const auto row = rows_.find(slot);
  if (row == rows_.end() || slot == kForgotten) return;
  rows_[kForgotten].tally += row->second.tally;
  rows_.erase(row);
}

Verdict Part::offer(uint32_t slot, const Frame& frame, Blob message) {
  if (knows(slot, frame.sequence)) return Verdict::again;
  if (frame.step < version_) return Verdict::late;
  if (frame.step > version_ && (cut_.role != Role::pool || frame.step - version_ > kMaxAhead)) return Verdict::early;
  try {  // what the head says is refused at once; the body is read once, by close()
    reader_for(*message);
  } catch (const Error&) {
    return Verdict::corrupt;
  }
  if (frame.step > version_) std::erase_if(offers_, [](const auto& one) { return one.second.again; });
  version_ = frame.step;
  offers_[slot] = {frame.sequence, frame.tally, std::move(message), cut_.role == Role::pool && (frame.flags & kQuiet)};
  return Verdict::none;
}

void Part::count(uint32_t slot, uint64_t sequence, const Tally& tally) { rows_[slot] = {sequence, tally}; }

// All offers, in the order of slots.
void Part::add_up() {
  Write write = Write::set;
  for (const auto& [slot, offer] : offers_) {
    decode(offer.message, sum_, write);
    write = Write::add;
  }
}

Part::Closed Part::close() {
  Closed result;
  // The fast way: everything is decoded straight into the sum. One look at the sum then tells whether all was well.
  bool fine = true;
  try {
    add_up();
  } catch (const Error&) {
    fine = false;
  }
  double sum = offers_.empty() ? 0 : signed_sum_of(sum_);
  if (!fine || !std::isfinite(sum)) {
    // Somebody sent what no encoder writes, or a not-a-number: each alone, to find out who.
    std::vector<float> one(elements_);
    for (auto entry = offers_.begin(); entry != offers_.end();) {
      bool good = true;
      try {
        decode(entry->second.message, one, Write::set);
        good = std::isfinite(signed_sum_of(one));
      } catch (const Error&) {
        good = false;
      }
      if (good) {
        ++entry;
      } else {
        result.verdicts.emplace_back(entry->first, Verdict::corrupt);
        entry = offers_.erase(entry);
      }
    }
    add_up();
    sum = offers_.empty() ? 0 : signed_sum_of(sum_);
  }
  result.contributors = contributors_ = static_cast<uint32_t>(offers_.size());
  if (!offers_.empty() &&
      (!std::isfinite(sum) || !take_off(contributors_))) {  // finite each, but not together: nothing of it can count
    for (const auto& [slot, offer] : offers_) result.verdicts.emplace_back(slot, Verdict::corrupt);
    result.contributors = contributors_ = 0;
    offers_.clear();
  }
  for (const auto& [slot, offer] : offers_) {
    count(slot, offer.sequence, offer.tally);
    result.verdicts.emplace_back(slot, Verdict::applied);
  }
  if (!offers_.empty()) applied_ += cut_.role == Role::weights ? sum : 0;
  offers_.clear();
  ++version_;
  advance();
  return result;
}

bool Part::take_off(uint32_t divisor) {
  const float by = static_cast<float>(divisor);
  if (cut_.role == Role::pool) {
    for (size_t i = 0; i < x_.size(); ++i) x_[i] = sum_[i] / by;
    return true;
  }
  // The greatest exponent tells whether all is finite; with updates down, what is owed comes on top, and a grid may go
  // a little beyond.
  uint32_t top = 0;
  if (sends_updates_) {
    for (size_t i = 0; i < x_.size(); ++i)
      top = std::max(top, float_bits(4 * (std::fabs(x_[i]) + std::fabs(owed_[i]) + std::fabs(sum_[i] / by))));
    if (top >= kInfBits) return false;
    for (size_t i = 0; i < x_.size(); ++i) sum_[i] = -(sum_[i] / by);
    return true;
  }
  for (size_t i = 0; i < x_.size(); ++i) {
    sum_[i] = x_[i] - sum_[i] / by;
    top = std::max(top, float_bits(sum_[i]) & 0x7fffffffu);
  }
  if (top >= kInfBits) return false;
  std::swap(x_, sum_);
  return true;
}

// A new version: what goes down is made when the first asks for it, except for a change, which is part of the
// arithmetic.
void Part::advance() {
  down_ = whole_ = change_ = nullptr;
  if (!sends_updates_) return;
  if (contributors_ == 0) std::fill(sum_.begin(), sum_.end(), 0.0f);  // what is owed goes on being paid
  std::vector<std::byte> message(down_plan_.message_bytes());
  std::vector<const void*> in, before;
  for (void* p : pointers(sum_)) in.push_back(p);
  for (void* p : pointers(owed_)) before.push_back(p);
  const std::vector<void*> after = pointers(owed_next_);
  const Residuals residuals{before, after, DType::f32};
  down_runner_->encode(in, {.seed = seed_, .step = version_, .stage = 1}, message, &residuals);
  std::swap(owed_, owed_next_);
  down_runner_->decode(message, pointers(x_), Write::add);
  change_ = make_blob(std::move(message));
}

// The weights as `runner` sends them, made once a version.
const Blob& Part::encoded(Blob& kept, Runner& runner) {
  if (!kept) {
    std::vector<std::byte> message(runner.plan().message_bytes());
    std::vector<const void*> in;
    for (void* p : pointers(x_)) in.push_back(p);
    runner.encode(in, {.seed = seed_, .step = version_, .stage = 1}, message);
    kept = make_blob(std::move(message));
  }
  return kept;
}

Blob Part::down(uint64_t held, Frame& frame) {
  if (sends_updates_) {
    if (change_ && held != kNone && held + 1 == version_) return change_;
    frame.flags |= kWhole;
    return encoded(whole_, *whole_runner_);
  }
  return encoded(down_, *down_runner_);
}

Verdict Part::apply(uint32_t slot, const Frame& frame, const Blob& message, uint32_t workers) {
  if (knows(slot, frame.sequence)) return Verdict::again;
  try {  // after a restart versions may be lower than what the worker saw: its sequence alone decides
    decode(message, sum_, Write::set);
  } catch (const Error&) {
    return Verdict::corrupt;
  }
  const double sum = signed_sum_of(sum_);
  if (!std::isfinite(sum) || !take_off(workers)) return Verdict::corrupt;
  applied_ += sum;
  count(slot, frame.sequence, frame.tally);
  contributors_ = 1;
  ++version_;
  advance();
  return Verdict::applied;
}

Verdict Part::take_over(uint32_t slot, const Frame& frame, const Blob& message, uint32_t workers) {
  if (knows(slot, frame.sequence)) return Verdict::again;
  // The sum of an open step is not made before it closes: this place is free.
  try {
    whole_runner_->decode(*message, pointers(sum_));
  } catch (const Error&) {
    return Verdict::corrupt;
  }
  const double sum = signed_sum_of(sum_);
  if (!std::isfinite(sum)) return Verdict::corrupt;
  const float by = static_cast<float>(std::max(workers, 1u));
  std::vector<float>& to = sends_updates_ ? owed_ : x_;
  for (size_t i = 0; i < to.size(); ++i)
    if (!std::isfinite(to[i] - sum_[i] / by)) return Verdict::corrupt;
  applied_ += sum;
  count(slot, frame.sequence, frame.tally);
  // What others hold of this version does not change: what it has been sent as stays as it is.
  down_ = workers > 1 ? down_ : nullptr;
  if (!sends_updates_ && workers > 1) {
    Frame unused;
    down(kNone, unused);
  }
  for (size_t i = 0; i < to.size(); ++i) to[i] -= sum_[i] / by;
  return Verdict::applied;
}

PartState Part::state() const { return {version_, applied_, x_, owed_, rows_}; }

void Part::restore(PartState state) {
  if (state.weights.size() != x_.size() || state.owed.size() != owed_.size())
    throw Error(ErrorKind::frame,
                fmt::format("bad state: a part has {} weights; expected {}", state.weights.size(), x_.size()),
                "weights");
  version_ = state.version;
  applied_ = state.applied;
  x_ = std::move(state.weights);
  owed_ = std::move(state.owed);
  rows_ = std::move(state.rows);
  ready_ = true;
}

uint64_t Part::bytes() const {
  uint64_t bytes = 4 * (x_.size() + sum_.size() + owed_.size() + owed_next_.size());
  for (const auto& [slot, offer] : offers_) bytes += offer.message->size();
  for (const Blob& blob : {down_, change_, whole_})
    if (blob) bytes += blob->size();
  return bytes;
}

}  // namespace gradwire::server
