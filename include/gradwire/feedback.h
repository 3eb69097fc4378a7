// SPDX-License-Identifier: Apache-2.0
// Error feedback that survives. Residuals are kept by tensor name, unscaled, in f32 or bf16; encode writes the new
// residual beside the old one, and commit(step) or rollback(step) decides when all of the step's tensors are decoded:
// a skipped step changes no residual, on any rank. State is saved to one file and can be moved to another world size.
//
// Two sides. `up`: what a worker still owes (its own gradient less what it sent). `down`: what the owner of a shard
// still owes to everybody (the mean less what it sent down), kept only for the pieces this rank owns.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "gradwire/plan.h"
#include "gradwire/runner.h"

namespace gradwire {

class Verdict;  // src/device/verdict.h

enum class Side : uint8_t { up = 0, down = 1 };

// Per-tensor rules: "*.bias=fp32;1d=fp32;<1024=fp32;*=qsgd:bits=4". The first rule that matches wins; `1d` matches
// tensors with at most one dimension, `<COUNT` those with fewer elements, anything else is a glob over the name (`*`:
// any characters, `?`: any one). The last rule must be `*`. A plain spec is one rule.
class Rules {
 public:
  static Rules parse(std::string_view text);
  std::string str() const;
  const Codec& codec_for(std::string_view name, int dimensions, uint64_t count) const;

 private:
  struct Rule {
    std::string pattern;
    Codec codec;
    uint64_t below;  // of a rule `<COUNT`; otherwise 0
  };
  std::vector<Rule> rules_;
};

class ErrorFeedback {
 public:
  explicit ErrorFeedback(DType dtype = DType::f32, const Device& device = {});
  ~ErrorFeedback();
  ErrorFeedback(ErrorFeedback&&) noexcept;
  ErrorFeedback& operator=(ErrorFeedback&&) noexcept;

  // Makes room, filled with zeros, for `count` elements of tensor `name` from element `first` on. Again with the
  // same numbers: nothing; with others that overlap: Error{usage}.
  void add(Side side, const std::string& name, uint64_t count, uint64_t first = 0);

  bool holds(Side side, const std::string& name, uint64_t count, uint64_t first = 0) const;  // in one that was added

  // The residuals of `tensors` for one encode at `step`. Tensors that were not added get no feedback. A tensor may be
  // a piece of one that was added whole. The object must outlive the encode call.
  struct Pointers {
    std::vector<const void*> before;
    std::vector<void*> after;
    Residuals residuals;  // spans over the two vectors
  };
  std::unique_ptr<Pointers> begin(Side side, uint64_t step, std::span<const TensorSpec> tensors,
                                  float loss_scale = 1.0f);

  // The elements begun at `step` take their new residual, or keep the old one; the others keep what they have. Without
  // an open step nothing happens; Error{usage} if another one is open.
  void commit(uint64_t step);
  void rollback(uint64_t step);
  // One or the other, as the verdict says. On a GPU that is found out there, on the stream of `device`, and nobody
  // waits.
  void decide(uint64_t step, Verdict& verdict, const Device& device);

  void save(const std::string& path) const;  // atomic: the old file stays whole until the new one is complete
  static ErrorFeedback load(const std::string& path,
                            const Device& device = {});  // a truncated or altered file is refused

  // The states of all ranks of one world -> the states for another world. Keeps the debt in units of the mean:
  // (1/W) * sum of the workers' residuals + the owners' residuals, within f32 rounding.
  static std::vector<ErrorFeedback> redistribute(std::span<const ErrorFeedback> ranks, int new_world);

  // What else must survive with the residuals, by name: what codecs have learned. A multiple of 8 bytes each. Moving to
  // another world keeps rank 0's, since all ranks have the same.
  void set_note(const std::string& name, std::span<const std::byte> bytes);
  const std::map<std::string, std::vector<std::byte>>& notes() const;

  // What was added with this `first`, copied to the host, as f32.
  std::vector<float> residual(Side side, const std::string& name, uint64_t first = 0) const;
  // Everything that was added; and new values for one of them, rounded to dtype(). Error{usage} while a step is open.
  struct Entry {
    Side side;
    std::string name;
    uint64_t first, count;
  };
  std::vector<Entry> entries() const;
  void set_residual(Side side, const std::string& name, uint64_t first, std::span<const float> values);
  uint64_t hash() const;  // of every committed residual and note: two equal states have equal hashes

  DType dtype() const;
  const Device& device() const;  // where the residuals live
  uint64_t bytes() const;        // that they take there, both copies

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace gradwire
