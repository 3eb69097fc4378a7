// SPDX-License-Identifier: Apache-2.0
// The coding core with three threads a rank, as gradwire.torch has them: one encodes up, one reduces and encodes down,
// one decodes; meanwhile the caller hands over the next bucket. ThreadSanitizer watches this test. What must hold
// besides: ranks have the same bits, and the residuals are those of one thread.
#include <algorithm>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <optional>
#include <thread>

#include "collective/collective_fixture.h"
#include "gradwire/coder.h"

namespace gradwire {
namespace {

using namespace test;
using Buffer = std::vector<std::byte>;

// Where ranks lay down what they send; a rank takes it when all have.
class Table {
 public:
  explicit Table(size_t world) : world_(world) {}
  std::vector<Buffer> meet(const std::string& what, size_t rank, Buffer mine) {
    std::unique_lock lock(mutex_);
    std::vector<std::optional<Buffer>>& laid = laid_[what];
    laid.resize(world_);
    laid[rank] = std::move(mine);
    all_.notify_all();
    all_.wait(lock, [&] { return std::all_of(laid.begin(), laid.end(), [](const auto& one) { return one; }); });
    std::vector<Buffer> copies;
    for (const auto& one : laid) copies.push_back(*one);
    return copies;
  }

 private:
  size_t world_;
  std::mutex mutex_;
  std::condition_variable all_;
  std::map<std::string, std::vector<std::optional<Buffer>>> laid_;
};

// A thread that runs tasks in the order in which they come.
class Lane {
 public:
  ~Lane() {
    put({});
    thread_.join();
  }
  void put(std::function<void()> task) {
    const std::lock_guard lock(mutex_);
    tasks_.push_back(std::move(task));
    more_.notify_one();
  }

 private:
  void work() {
    for (;;) {
      std::unique_lock lock(mutex_);
      more_.wait(lock, [this] { return !tasks_.empty(); });
      const std::function<void()> task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      if (!task) return;
      task();
    }
  }
  std::mutex mutex_;
  std::condition_variable more_;
  std::deque<std::function<void()>> tasks_;
  std::thread thread_{[this] { work(); }};
};

Buffer slot_of(const std::vector<Buffer>& all, const std::vector<size_t>& slots, size_t p) {
  const auto at =
      static_cast<ptrdiff_t>(std::accumulate(slots.begin(), slots.begin() + static_cast<ptrdiff_t>(p), 0UL));
  Buffer received;
  for (const Buffer& one : all)
    received.insert(received.end(), one.begin() + at, one.begin() + at + static_cast<ptrdiff_t>(slots[p]));
  return received;
}

class PipelinedRank {
 public:
  PipelinedRank(size_t rank, size_t world, Table& table, const std::vector<NamedTensor>& tensors,
                const ReduceOptions& options)
      : rank_(rank),
        table_(table),
        tensors_(tensors),
        model_(tensors,
               CoderOptions{CoderOptions::Kind::all_reduce, options, static_cast<int>(rank), static_cast<int>(world)}),
        buckets_(tensors.size()) {}

  // One tensor a bucket, the last tensor first, as in a backward pass.
  TensorValues step(uint64_t number, const StepOptions& how) {
    TensorValues in = gradients(tensors_, static_cast<int>(rank_), number), out(tensors_);
    std::mutex mutex;
    std::condition_variable changed;
    size_t done = 0;
    for (size_t i = tensors_.size(); i-- > 0;) {
      const std::string name = std::to_string(number) + "/" + std::to_string(i);
      up_.put([&, i, name] {
        if (i + 1 == tensors_.size()) model_.begin(number, how);
        if (!buckets_[i]) buckets_[i] = std::make_unique<BucketCoder>(model_, std::vector<size_t>{i}, Device{});
        BucketCoder& bucket = *buckets_[i];
        bucket.begin();
        Buffer send(std::accumulate(bucket.up_send().begin(), bucket.up_send().end(), size_t{0}));
        bucket.encode_up(std::vector<const void*>{in.in()[i]}, send);
        down_.put([&, i, name, send] {
          BucketCoder& bucket = *buckets_[i];
          bucket.decode_up(slot_of(table_.meet("up/" + name, rank_, send), bucket.up_send(), rank_));
          Buffer mine(bucket.down_recv()[rank_]);
          bucket.encode_down(mine);
          end_.put([&, i, name, mine] {
            Buffer all;
            for (const Buffer& one : table_.meet("down/" + name, rank_, mine))
              all.insert(all.end(), one.begin(), one.end());
            buckets_[i]->decode_down(all, std::vector<void*>{out.out()[i]});
            const std::lock_guard lock(mutex);
            ++done;
            changed.notify_one();
          });
        });
      });
      EXPECT_EQ(model_.divisible(i), true);
    }
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return done == tensors_.size(); });
    lock.unlock();
    finish(number);
    return out;
  }

  uint64_t hash() { return model_.feedback().hash(); }

 private:
  void finish(uint64_t number) {
    model_.end();
    if (model_.stats_bytes() == 0) return;
    Buffer mine(model_.stats_bytes()), all;
    model_.take_stats(mine);
    for (const Buffer& one : table_.meet("stats/" + std::to_string(number), rank_, mine))
      all.insert(all.end(), one.begin(), one.end());
    model_.learn(all);
  }

  size_t rank_;
  Table& table_;
  const std::vector<NamedTensor>& tensors_;
  ModelCoder model_;
  std::vector<std::unique_ptr<BucketCoder>> buckets_;
  Lane end_, down_, up_;  // destroyed in the order in which tasks go
};

TEST(CoderThreads, ThreeThreadsARankGiveTheBitsOfAReducer) {
  const std::vector<NamedTensor> tensors = {{"embed", 9'000, DType::f32, 2},
                                            {"bias", 33, DType::f32, 1},
                                            {"attention", 4'100, DType::f32, 2},
                                            {"head", 1'025, DType::bf16, 2}};
  constexpr size_t kWorld = 2;
  constexpr uint64_t kSteps = 12;
  for (const char* spec :
       {"optquant:bits=4,refit=2", "casq:bits=2", "dqsgd:budget=3", "onebit", "fft:theta=0.85", "qsgd:bits=4"}) {
    ReduceOptions options;
    options.up = std::string("bias=fp32;*=") + spec;
    options.feedback = Feedback::on;
    options.seed = 5;
    std::vector<TensorValues> expected(kWorld, TensorValues(tensors)), got(kWorld, TensorValues(tensors));
    std::vector<uint64_t> hashes(kWorld), hashes_expected(kWorld);
    run_loopback(kWorld, [&](Engine& engine) {
      Reducer reducer(engine, tensors, options);
      const auto rank = static_cast<size_t>(engine.rank());
      for (uint64_t step = 0; step < kSteps; ++step)
        reducer.run(step, gradients(tensors, engine.rank(), step).in(), expected[rank].out());
      hashes_expected[rank] = reducer.feedback().hash();
    });
    Table table(kWorld);
    std::vector<std::thread> ranks;
    for (size_t r = 0; r < kWorld; ++r)
      ranks.emplace_back([&, r] {
        PipelinedRank rank(r, kWorld, table, tensors, options);
        for (uint64_t step = 0; step < kSteps; ++step) got[r] = rank.step(step, {});
        hashes[r] = rank.hash();
      });
    for (std::thread& rank : ranks) rank.join();
    for (size_t r = 0; r < kWorld; ++r) EXPECT_TRUE(got[r] == expected[r]) << spec << " rank " << r;
    EXPECT_EQ(hashes, hashes_expected) << spec;
  }
}

}  // namespace
}  // namespace gradwire
