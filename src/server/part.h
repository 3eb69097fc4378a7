// SPDX-License-Identifier: Apache-2.0
// One part of the weights at the server, and everything that is done to it. A part knows steps, updates and arithmetic;
// it knows nothing of connections, threads or clocks: its owner calls it from one thread at a time.
//
// Quantized Adam (arXiv 2004.14180): the server keeps x in full precision, takes the mean of the workers' quantised
// updates off it and sends it down quantised. With sends_updates (the authors' Efficient-Adam) what goes down is the
// quantised change, the server keeps what it owes, and x is the sum of what was sent: exactly what every worker holds.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <vector>

#include "gradwire/runner.h"
#include "server/frame.h"
#include "server/signature.h"

namespace gradwire::server {

// What the part knows of a worker.
struct Row {
  uint64_t sequence = 0;  // of the last update that was applied
  Tally tally;            // as of then
};

// The row of all workers that the server does not remember any more.
inline constexpr uint32_t kForgotten = ~0u;

// A part as it is saved.
struct PartState {
  uint64_t version = 0;
  double applied = 0;  // signed sum of all updates that were applied
  std::vector<float> weights, owed;
  std::map<uint32_t, Row> rows;
};

class Part {
 public:
  Part(const Signature& signature, const Cut& cut);

  bool ready() const { return ready_; }        // has weights
  void set(std::span<const std::byte> whole);  // the first ones; Error{frame}
  void set(std::span<const float> values);
  uint64_t version() const { return version_; }  // the step that the weights are for
  Role role() const { return cut_.role; }
  uint64_t elements() const { return elements_; }

  // Takes an update of the current step and keeps it until close(): Verdict::none. Any other verdict is final. A pool's
  // rounds do not build on each other: one that is ahead, because the server was restarted, becomes the current one.
  // What was offered goes along, except what somebody sent again for a round that is over now.
  Verdict offer(uint32_t slot, const Frame& frame, Blob message);
  bool knows(uint32_t slot, uint64_t sequence) const;  // this update, or a later one, was applied
  void forget(uint32_t slot);                          // its row goes into that of all who were forgotten
  bool offered(uint32_t slot) const { return offers_.contains(slot); }
  size_t offers() const { return offers_.size(); }

  // Ends the step: all that was offered is added in the order of slots, the mean is taken off the weights. Slots whose
  // update turned out to be unreadable or not finite are left out, and named.
  struct Closed {
    std::vector<std::pair<uint32_t, Verdict>> verdicts;
    uint32_t contributors = 0;
  };
  Closed close();
  // Without steps: one update at once, as one of `workers`.
  Verdict apply(uint32_t slot, const Frame& frame, const Blob& message, uint32_t workers);
  // What a leaving worker owed, as one of `workers`; into the weights at once, seen from the next step on.
  Verdict take_over(uint32_t slot, const Frame& frame, const Blob& message, uint32_t workers);

  // What goes down: for a worker that holds `held`. Sets flags of `frame`.
  Blob down(uint64_t held, Frame& frame);
  uint32_t contributors() const { return contributors_; }

  std::span<const float> weights() const { return x_; }
  const std::map<uint32_t, Row>& rows() const { return rows_; }
  double applied() const { return applied_; }
  PartState state() const;
  void restore(PartState state);  // Error{frame} if it does not fit
  uint64_t bytes() const;         // of memory

 private:
  struct Reader {
    std::vector<Codec> codecs;
    std::unique_ptr<Plan> plan;
    std::unique_ptr<Runner> runner;
  };
  Reader& reader_for(std::span<const std::byte> message);
  void decode(const Blob& message, std::vector<float>& to, Write write);
  std::vector<void*> pointers(std::vector<float>& values) const;
  double signed_sum_of(const std::vector<float>& values) const;
  bool take_off(uint32_t divisor);  // sum_ / divisor; false, and nothing changed, if weights would not stay finite
  void add_up();
  const Blob& encoded(Blob& kept, Runner& runner);
  void advance();
  void count(uint32_t slot, uint64_t sequence, const Tally& tally);

  Cut cut_;
  bool sends_updates_;
  uint64_t seed_, elements_;
  std::vector<uint64_t> name_hashes_;
  std::vector<TensorSpec> up_;
  Plan down_plan_, whole_plan_;
  std::unique_ptr<Runner> down_runner_, whole_runner_;
  std::vector<Reader> readers_;  // a few, the newest first: codecs that learn have other tables now and then

  bool ready_ = false;
  uint64_t version_ = 0;
  uint32_t contributors_ = 0;
  double applied_ = 0;
  std::vector<float> x_, sum_, owed_, owed_next_;
  std::map<uint32_t, Row> rows_;
  struct Offer {
    uint64_t sequence;
    Tally tally;
    Blob message;
    bool again;  // of a pool: for others, by one who has its answer
  };
  std::map<uint32_t, Offer> offers_;
  Blob down_, change_, whole_;  // of this version, once somebody wants them; a change is made when its step closes
};

}  // namespace gradwire::server
