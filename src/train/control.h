// SPDX-License-Identifier: Apache-2.0
// What workers send to each other besides gradients: small values, over an engine of their own. So the bytes of
// gradients are counted separately, and these calls need no order relative to theirs.
#pragma once

#include <cstring>
#include <exception>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "gradwire/engine.h"
#include "gradwire/error.h"

namespace gradwire::train {

class Control {
 public:
  Control(Engine& engine, std::chrono::milliseconds timeout) : engine_(engine.split(0)) {
    engine_->set_timeout(timeout);
  }
  Engine& engine() { return *engine_; }
  uint64_t bytes_sent() const { return engine_->bytes_sent(); }  // the engine it was split from counts them too
  int rank() const { return engine_->rank(); }
  int size() const { return engine_->size(); }

  // The values of all ranks, in rank order.
  template <class T>
  std::vector<T> gather(const T& mine) {
    static_assert(std::is_trivially_copyable_v<T>);
    std::vector<T> all(static_cast<size_t>(size()));
    std::vector<Bytes> places;
    for (T& one : all) places.push_back(std::as_writable_bytes(std::span(&one, 1)));
    engine_->all_gather(std::as_bytes(std::span(&mine, 1)), places).wait();
    return all;
  }

  // All ranks get the bytes of rank 0.
  void broadcast(std::span<std::byte> bytes) { engine_->broadcast(bytes, 0).wait(); }

  // Runs `work`, which may fail on one rank only. Then all ranks fail: that one with its own error, the others with an
  // error of the same text.
  void together(const std::function<void()>& work) {
    struct Words {
      ErrorKind kind = ErrorKind::usage;
      bool failed = false;
      char text[400] = {};
    } mine;
    std::exception_ptr failure;
    const auto note = [&](ErrorKind kind, const char* text) {
      failure = std::make_exception_ptr(Error(kind, text));
      mine.failed = true;
      mine.kind = kind;
      std::strncpy(mine.text, text, sizeof mine.text - 1);
    };
    try {
      work();
    } catch (const Error& error) {
      note(error.kind(), error.what());
    } catch (const std::exception& error) {
      note(ErrorKind::io, error.what());
    }
    const std::vector<Words> all = gather(mine);
    if (failure) std::rethrow_exception(failure);
    for (size_t rank = 0; rank < all.size(); ++rank)
      if (all[rank].failed)
        throw Error(all[rank].kind, "worker " + std::to_string(rank) + ": " + all[rank].text, {},
                    static_cast<int>(rank));
  }

 private:
  std::unique_ptr<Engine> engine_;
};

}  // namespace gradwire::train
