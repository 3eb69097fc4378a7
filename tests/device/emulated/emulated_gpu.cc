// SPDX-License-Identifier: Apache-2.0
#undef _FORTIFY_SOURCE  // it takes a jump to another stack for an error
#include "emulated_gpu.h"

#include <ucontext.h>

#include <algorithm>
#include <csetjmp>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <new>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "cuda_runtime_api.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

namespace gradwire::emulated {
namespace {

constexpr unsigned kWarp = 32;

// A stack, and where to go on with it. Contexts of ucontext.h start a stack; from then on jumps switch between stacks,
// because swapcontext() asks the kernel for the mask of signals each time.
struct Stack {
  static constexpr size_t kBytes = 256 << 10;
  std::unique_ptr<std::byte[]> memory;  // none for the main one
  ucontext_t context;
  jmp_buf at;
  bool fresh = false;  // not entered yet
  void* fake = nullptr;
};

#if defined(__SANITIZE_ADDRESS__)
const void* main_stack = nullptr;  // known once the first fiber was entered
size_t main_bytes = 0;
#endif

// `last`: `from` is done, and is not come back to.
void go(Stack& from, Stack& to, [[maybe_unused]] bool last) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(last ? nullptr : &from.fake, to.memory ? to.memory.get() : main_stack,
                                 to.memory ? Stack::kBytes : main_bytes);
#endif
  if (_setjmp(from.at)) {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(from.fake, nullptr, nullptr);
#endif
    return;
  }
  if (!to.fresh) _longjmp(to.at, 1);
  to.fresh = false;
  setcontext(&to.context);
}

enum class State { ready, at_warp, at_block, at_part, done };

struct Copy {
  void* to;
  const void* from;
  size_t bytes;
  void perform() const { std::memcpy(to, from, bytes); }
};

struct Thread {
  Stack stack;
  State state = State::ready;
  uint64_t value = 0;
  Place place;
  std::vector<Copy> copies;                 // since the last commit
  std::deque<std::vector<Copy>> committed;  // not waited for yet
};

std::string name_of(const Place& place) { return std::string(place.file_name()) + ":" + std::to_string(place.line()); }
bool same(const Place& a, const Place& b) {
  return a.line() == b.line() && a.column() == b.column() && !std::strcmp(a.file_name(), b.file_name());
}

class ThreadBlock {
 public:
  void run(unsigned threads, const std::function<void()>& kernel) {
    while (threads_.size() < threads) threads_.push_back(std::make_unique<Thread>());
    kernel_ = &kernel;
    count_ = threads;
    warps_.resize((threads + kWarp - 1) / kWarp);
    for (unsigned i = 0; i < threads; ++i) start(*threads_[i]);
    while (!all_are(State::done, 0, count_)) {
      bool moved = false;
      for (unsigned warp : shuffled(static_cast<unsigned>(warps_.size())))
        while (run_warp(warp)) moved = true;
      if (all_are(State::at_block, 0, count_)) {
        sum_ = 0;
        for (unsigned i = 0; i < count_; ++i) sum_ += threads_[i]->value, threads_[i]->state = State::ready;
      } else if (!moved && !release_part()) {
        fail();
      }
    }
  }

  void wait(State state, uint64_t value, const Place& place) {
    Thread& waits = self();
    waits.state = state;
    waits.value = value;
    waits.place = place;
    go(waits.stack, main_, false);
  }
  Thread& self() { return *threads_[current_]; }
  bool chance() { return random_() % 2; }
  const uint64_t* warp_values() const { return warps_[current_ / kWarp].values; }
  uint64_t sum() const { return sum_; }

 private:
  struct Warp {
    uint64_t values[kWarp];
  };

  static void enter();
  void start(Thread& thread) {
    thread.state = State::ready;
    thread.copies.clear();
    thread.committed.clear();
    if (!thread.stack.memory) thread.stack.memory.reset(new std::byte[Stack::kBytes]);
    getcontext(&thread.stack.context);
    thread.stack.context.uc_stack.ss_sp = thread.stack.memory.get();
    thread.stack.context.uc_stack.ss_size = Stack::kBytes;
    thread.stack.context.uc_link = nullptr;
    makecontext(&thread.stack.context, enter, 0);
    thread.stack.fresh = true;
  }

  // Lets those lanes run that can; true if there were some.
  bool run_warp(unsigned warp) {
    bool moved = false;
    const unsigned lanes = std::min(kWarp, count_ - warp * kWarp);
    for (unsigned lane : shuffled(lanes)) {
      const unsigned i = warp * kWarp + lane;
      if (threads_[i]->state != State::ready) continue;
      current_ = i;
      threadIdx = {i, 0, 0};
      go(main_, threads_[i]->stack, false);
      moved = true;
    }
    if (all_are(State::at_warp, warp * kWarp, lanes)) {
      for (unsigned lane = 0; lane < lanes; ++lane) {
        Thread& thread = *threads_[warp * kWarp + lane];
        warps_[warp].values[lane] = thread.value;
        thread.state = State::ready;
      }
    }
    return moved;
  }

  // The barrier of a part of the block, if all that it waits for are there.
  bool release_part() {
    std::vector<Thread*> part;
    for (unsigned i = 0; i < count_; ++i)
      if (threads_[i]->state == State::at_part) part.push_back(threads_[i].get());
    if (part.empty() || part.size() != part[0]->value) return false;
    for (Thread* thread : part) thread->state = State::ready;
    return true;
  }

  // All of them in this state and, where they wait, at the same place.
  bool all_are(State state, unsigned first, unsigned count) const {
    for (unsigned i = first; i < first + count; ++i)
      if (threads_[i]->state != state || (state != State::done && !same(threads_[i]->place, threads_[first]->place)))
        return false;
    return true;
  }

  // The first thread that waits for one that is elsewhere.
  [[noreturn]] void fail() const {
    for (unsigned i = 0; i < count_; ++i) {
      const Thread& a = *threads_[i];
      const bool warp = a.state == State::at_warp;
      if (a.state == State::done) continue;
      for (unsigned j = warp ? i / kWarp * kWarp : 0; j < (warp ? std::min(i / kWarp * kWarp + kWarp, count_) : count_);
           ++j) {
        const Thread& b = *threads_[j];
        if (b.state == a.state && same(a.place, b.place)) continue;
        throw std::runtime_error("thread " + std::to_string(i) + " waits at " + name_of(a.place) + " for thread " +
                                 std::to_string(j) + ", which " +
                                 (b.state == State::done ? "is done" : "waits at " + name_of(b.place)));
      }
    }
    throw std::logic_error("nothing moves");
  }

  std::vector<unsigned> shuffled(unsigned count) {
    std::vector<unsigned> order(count);
    std::iota(order.begin(), order.end(), 0u);
    for (unsigned i = count; i > 1; --i) std::swap(order[i - 1], order[random_() % i]);
    return order;
  }

  std::vector<std::unique_ptr<Thread>> threads_;
  std::vector<Warp> warps_;
  const std::function<void()>* kernel_ = nullptr;
  Stack main_;
  unsigned count_ = 0, current_ = 0;
  uint64_t sum_ = 0;
  std::minstd_rand random_;
};

ThreadBlock the_block;
std::mutex the_gpu;  // of the thread of the host whose kernel runs
uint64_t runs_so_far = 0;

constexpr std::align_val_t kSharedAlign{16};
struct FreeShared {
  void operator()(std::byte* bytes) const { ::operator delete[](bytes, kSharedAlign); }
};
std::unique_ptr<std::byte[], FreeShared> shared_bytes;

void ThreadBlock::enter() {
#if defined(__SANITIZE_ADDRESS__)
  const void* from = nullptr;
  size_t bytes = 0;
  __sanitizer_finish_switch_fiber(nullptr, &from, &bytes);
  if (!main_stack) main_stack = from, main_bytes = bytes;
#endif
  (*the_block.kernel_)();
  Thread& self = *the_block.threads_[the_block.current_];
  self.state = State::done;
  go(self.stack, the_block.main_, true);
}

}  // namespace

void run(dim3 blocks, unsigned threads, const std::function<void()>& kernel, size_t shared) {
  const std::lock_guard<std::mutex> only(the_gpu);
  ++runs_so_far;
#if defined(__SANITIZE_ADDRESS__)
  main_stack = nullptr;  // it may be that of another thread now
#endif
  shared_bytes.reset(static_cast<std::byte*>(::operator new[](shared, kSharedAlign)));
  if (shared) std::memset(shared_bytes.get(), 0xa5, shared);  // anything but zeros
  gridDim = blocks;
  blockDim = {threads, 1, 1};
  for (unsigned y = 0; y < blocks.y; ++y)
    for (unsigned x = 0; x < blocks.x; ++x) {
      blockIdx = {blocks.x - 1 - x, y, 0};
      the_block.run(threads, kernel);
    }
}

void perform(EmulatedStream* stream, std::function<void()> work) {
  if (stream && stream->captured)
    stream->captured->push_back(std::move(work));
  else
    work();
}

void copy_later(void* to, const void* from, size_t bytes) {
  // A GPU does not come back from such a copy.
  if ((bytes != 4 && bytes != 8 && bytes != 16) || reinterpret_cast<uintptr_t>(to) % bytes ||
      reinterpret_cast<uintptr_t>(from) % bytes)
    throw std::logic_error("a copy to shared memory that is not aligned to its size");
  const Copy copy{to, from, bytes};
  if (the_block.chance())
    copy.perform();
  else
    the_block.self().copies.push_back(copy);
}
void commit_copies() {
  Thread& self = the_block.self();
  self.committed.push_back(std::exchange(self.copies, {}));
}
void wait_for_copies(size_t left) {
  std::deque<std::vector<Copy>>& committed = the_block.self().committed;
  for (; committed.size() > left; committed.pop_front())
    for (const Copy& copy : committed.front()) copy.perform();
}

uint64_t runs() { return runs_so_far; }
void* dynamic_shared() { return shared_bytes.get(); }

const uint64_t* meet_warp(uint64_t value, Place place) {
  the_block.wait(State::at_warp, value, place);
  return the_block.warp_values();
}
void meet_part(unsigned count, Place place) { the_block.wait(State::at_part, count, place); }
uint64_t meet_block(uint64_t value, Place place) {
  the_block.wait(State::at_block, value, place);
  return the_block.sum();
}

}  // namespace gradwire::emulated
