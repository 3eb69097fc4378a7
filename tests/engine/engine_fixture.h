// SPDX-License-Identifier: Apache-2.0
// Operations that check what they receive: used by the tests of every engine.
//
// Byte i of what rank `from` sends to rank `to` in operation `op` is a hash of (op, from, to, i). wrong() names the
// first byte that is not as it must be, or is empty. Buffers begin filled with kUnwritten.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "engine/outcome.h"
#include "gradwire/engine.h"

namespace gradwire::test {

inline constexpr int kAllRanks = 1000;
inline constexpr std::byte kUnwritten{0xA5};

inline std::byte expected_byte(uint64_t op, int from, int to, size_t i) {
  uint64_t h = (op * 0x9E3779B97F4A7C15ull) ^ (uint64_t(from) << 40) ^ (uint64_t(to) << 20) ^ (i >> 3);
  h = (h ^ (h >> 31)) * 0xBF58476D1CE4E5B9ull;
  return std::byte((h >> 24) >> ((i & 7) * 4));
}

inline void fill_expected(std::span<std::byte> bytes, uint64_t op, int from, int to) {
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = expected_byte(op, from, to, i);
}

inline std::string first_wrong_byte(ConstBytes bytes, uint64_t op, int from, int to) {
  for (size_t i = 0; i < bytes.size(); ++i) {
    if (bytes[i] != expected_byte(op, from, to, i)) {
      return "operation " + std::to_string(op) + ": byte " + std::to_string(i) + " from rank " + std::to_string(from) +
             " is wrong; ";
    }
  }
  return {};
}

using Buffers = std::vector<std::vector<std::byte>>;

template <typename Span>
std::vector<Span> spans_of(Buffers& buffers) {
  return {buffers.begin(), buffers.end()};
}

class CheckedOperation {
 public:
  virtual ~CheckedOperation() = default;
  virtual Handle start(Engine& engine) = 0;
  virtual std::string wrong() const = 0;
};

class CheckedAllToAll : public CheckedOperation {
 public:
  CheckedAllToAll(const Engine& engine, uint64_t op, const std::function<size_t(int from, int to)>& length)
      : op_(op), me_(engine.rank()), send_(engine.size()), recv_(engine.size()) {
    for (int p = 0; p < engine.size(); ++p) {
      send_[p].resize(length(me_, p));
      fill_expected(send_[p], op_, me_, p);
      recv_[p].resize(length(p, me_), kUnwritten);
    }
  }
  Handle start(Engine& engine) override {
    return engine.all_to_all(spans_of<ConstBytes>(send_), spans_of<Bytes>(recv_));
  }
  std::string wrong() const override {
    std::string words;
    for (size_t p = 0; p < recv_.size(); ++p) words += first_wrong_byte(recv_[p], op_, static_cast<int>(p), me_);
    return words;
  }

 private:
  uint64_t op_;
  int me_;
  Buffers send_, recv_;
};

class CheckedAllGather : public CheckedOperation {
 public:
  CheckedAllGather(const Engine& engine, uint64_t op, const std::function<size_t(int from)>& length)
      : op_(op), mine_(length(engine.rank())), recv_(engine.size()) {
    fill_expected(mine_, op_, engine.rank(), kAllRanks);
    for (int p = 0; p < engine.size(); ++p) recv_[p].resize(length(p), kUnwritten);
  }
  Handle start(Engine& engine) override { return start_from(engine, mine_); }
  Handle start_from(Engine& engine, ConstBytes mine) { return engine.all_gather(mine, spans_of<Bytes>(recv_)); }
  std::vector<std::byte>& received(int from) { return recv_[from]; }
  std::string wrong() const override {
    std::string words;
    for (size_t p = 0; p < recv_.size(); ++p) words += first_wrong_byte(recv_[p], op_, static_cast<int>(p), kAllRanks);
    return words;
  }

 private:
  uint64_t op_;
  std::vector<std::byte> mine_;
  Buffers recv_;
};

class CheckedBroadcast : public CheckedOperation {
 public:
  CheckedBroadcast(const Engine& engine, uint64_t op, size_t length, int root)
      : op_(op), root_(root), data_(length, kUnwritten) {
    if (engine.rank() == root) fill_expected(data_, op_, root_, kAllRanks);
  }
  Handle start(Engine& engine) override { return engine.broadcast(data_, root_); }
  std::string wrong() const override { return first_wrong_byte(data_, op_, root_, kAllRanks); }
  bool untouched() const { return data_ == std::vector<std::byte>(data_.size(), kUnwritten); }

 private:
  uint64_t op_;
  int root_;
  std::vector<std::byte> data_;
};

// A long random run: operations and lengths from one seed, alike on all ranks; up to 8 in flight, waited in an order
// of each rank's own.
inline void random_operations(Engine& engine, int operations, uint64_t seed) {
  std::mt19937_64 shared(seed);
  std::mt19937_64 own(seed + 1 + static_cast<uint64_t>(engine.rank()));
  struct Flying {
    std::unique_ptr<CheckedOperation> operation;
    Handle handle;
  };
  std::deque<Flying> flying;
  for (int op = 0; op < operations; ++op) {
    const uint64_t draw = shared();
    const uint64_t kind = draw % 8;
    const size_t scale = (draw >> 8) % 16 == 0 ? 60'000 : (draw >> 8) % 2 == 0 ? 900 : 3;
    const auto length = [=](int from, int to) {
      return static_cast<size_t>(std::to_integer<uint64_t>(expected_byte(draw, from, to, 1)) * scale / 200);
    };
    std::unique_ptr<CheckedOperation> operation;
    if (kind < 3)
      operation = std::make_unique<CheckedAllToAll>(engine, op, length);
    else if (kind < 6)
      operation = std::make_unique<CheckedAllGather>(engine, op, [&](int from) { return length(from, 0); });
    else if (kind < 7) {
      const int root = static_cast<int>((draw >> 16) % static_cast<uint64_t>(engine.size()));
      operation = std::make_unique<CheckedBroadcast>(engine, op, length(root, root), root);
    }
    Handle handle = operation ? operation->start(engine) : engine.barrier();
    flying.push_back({std::move(operation), std::move(handle)});
    while (flying.size() > 8 || (op + 1 == operations && !flying.empty())) {
      const auto it = flying.begin() + static_cast<std::ptrdiff_t>(own() % flying.size());
      it->handle.wait();
      if (it->operation) {
        ASSERT_EQ(it->operation->wrong(), "");
      }
      flying.erase(it);
    }
  }
}

}  // namespace gradwire::test
