// SPDX-License-Identifier: Apache-2.0
#include "message/changing_runner.h"

#include <algorithm>
#include <atomic>
#include <iterator>
#include <utility>

namespace gradwire {

std::vector<Codec> codecs_of(const std::vector<TensorSpec>& specs) {
  std::vector<Codec> codecs;
  for (const TensorSpec& spec : specs) codecs.push_back(spec.codec);
  return codecs;
}

ChangingRunner::ChangingRunner(std::vector<TensorSpec> specs, const Device& device)
    : device_(device), codings_{std::make_shared<Coding>(std::move(specs), device)} {}

uint64_t ChangingRunner::next_id() {
  static std::atomic<uint64_t> last{0};
  return ++last;
}

void ChangingRunner::recode(std::vector<TensorSpec> specs) {
  const std::vector<Codec> wanted = codecs_of(specs);
  const auto found = std::find_if(codings_.begin(), codings_.end(), [&](const std::shared_ptr<Coding>& coding) {
    return codecs_of(coding->plan->tensors()) == wanted;
  });
  if (found != codings_.end()) return codings_.splice(codings_.begin(), codings_, found);
  auto next = std::make_unique<Plan>(specs);
  if (runner().retable(*next)) {
    now().plan = std::move(next);
    now().id = next_id();  // some numbers that follow from a table are arguments of kernels
    return;
  }
  if (codings_.size() == kKept) codings_.pop_back();  // before another is made
  codings_.push_front(std::make_shared<Coding>(std::move(specs), device_));
}

void ChangingRunner::wait() {
  for (const auto& coding : codings_) coding->runner->wait();
}

void ChangingRunner::poll() {
  runner().poll();
  if (codings_.size() > 1) (*std::next(codings_.begin()))->runner->poll();  // that of the step before, if it changed
}

}  // namespace gradwire
