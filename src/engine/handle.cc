// SPDX-License-Identifier: Apache-2.0
// A Handle gives its operation up exactly once: by wait(), or by being dropped, which waits too, because the buffers
// belong to the engine until then.
#include <utility>

#include "gradwire/engine.h"
#include "gradwire/error.h"

namespace gradwire {

namespace {

void drop(std::unique_ptr<Handle::State> state) noexcept {
  if (!state) return;
  try {
    state->wait();
  } catch (...) {
    // The engine stays poisoned: the next call on it says why.
  }
}

}  // namespace

Handle::Handle(std::unique_ptr<State> state) : state_(std::move(state)) {}

Handle::Handle(Handle&&) noexcept = default;

Handle& Handle::operator=(Handle&& other) noexcept {
  if (this != &other) drop(std::exchange(state_, std::move(other.state_)));
  return *this;
}

Handle::~Handle() { drop(std::move(state_)); }

void Handle::wait() {
  const std::unique_ptr<State> state = std::move(state_);
  if (!state)
    throw Error(ErrorKind::usage, "wait() on a handle that has nothing under way (it may be called once)", "handle");
  state->wait();
}

}  // namespace gradwire
