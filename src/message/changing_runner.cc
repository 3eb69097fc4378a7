// SPDX-License-Identifier: Apache-2.0
#include "message/changing_runner.h"

#include <utility>

namespace gradwire {

std::vector<Codec> codecs_of(const std::vector<TensorSpec>& specs) {
  std::vector<Codec> codecs;
  for (const TensorSpec& spec : specs) codecs.push_back(spec.codec);
  return codecs;
}

ChangingRunner::ChangingRunner(std::vector<TensorSpec> specs, const Device& device)
    : device_(device), now_(std::make_unique<Coding>(std::move(specs), device)) {}

void ChangingRunner::recode(std::vector<TensorSpec> specs) {
  const std::vector<Codec> wanted = codecs_of(specs);
  std::vector<Codec> present = codecs_of(plan().tensors());
  if (wanted == present) return;
  const bool again = wanted == before_;
  before_ = std::move(present);
  if (again && other_) {
    std::swap(now_, other_);
    return;
  }
  other_.reset();  // before a third is made
  auto fresh = std::make_unique<Coding>(std::move(specs), device_);
  if (again) other_ = std::move(now_);
  now_ = std::move(fresh);
}

void ChangingRunner::wait() {
  runner().wait();
  if (other_) other_->runner->wait();
}

void ChangingRunner::poll() {
  runner().poll();
  if (other_) other_->runner->poll();
}

}  // namespace gradwire
