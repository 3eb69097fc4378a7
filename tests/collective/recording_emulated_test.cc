// SPDX-License-Identifier: Apache-2.0
// The coding of a bucket that is recorded once and run again (device/recording.h), on an emulated GPU. What must hold:
// in every step the bits of a bucket that is not recorded, whatever changes between steps. A recording is chosen by
// BucketCoder::signature(), so what is missing there shows as wrong bits here.
#include <cmath>
#include <map>
#include <memory>
#include <numeric>

#include "collective/collective_fixture.h"
#include "device/emulated/cuda_runtime_api.h"
#include "device/recording.h"
#include "gradwire/coder.h"

namespace gradwire {
namespace {

using namespace test;

std::vector<NamedTensor> small_model() {
  return {{"conv.weight", 3'000, DType::f32, 4}, {"conv.bias", 33, DType::f32, 1}, {"half", 700, DType::bf16, 2},
          {"empty", 0, DType::f32, 2},           {"head", 1'025, DType::f32, 2},   {"embed", 33'500, DType::f32, 2}};
}
const std::vector<std::vector<size_t>> kBuckets{{5}, {0, 1, 2, 3, 4}};

size_t total(const std::vector<size_t>& slots) { return std::accumulate(slots.begin(), slots.end(), size_t{0}); }

// What a bucket enqueues between two exchanges: done, or recorded when its key comes for the second time.
class Segment {
 public:
  void run(const Device& device, bool may_record, uint64_t key, const std::function<void()>& work, int& replayed) {
    if (!may_record) return work();
    const auto known = recordings_.find(key);
    if (known != recordings_.end()) {
      ++replayed;
      return known->second->run();
    }
    if (seen_[key]++ == 0) return work();
    auto recording = std::make_unique<Recording>(device);
    recording->begin();
    work();
    recording->end();
    recording->run();
    recordings_[key] = std::move(recording);
  }
  void forget() { recordings_.clear(), seen_.clear(); }

 private:
  std::map<uint64_t, std::unique_ptr<Recording>> recordings_;
  std::map<uint64_t, int> seen_;
};

// A bucket of a rank, whose buffers keep their addresses as long as their sizes stay.
struct Bucket {
  std::unique_ptr<BucketCoder> coder;
  std::vector<const void*> in;
  std::vector<void*> out;
  std::vector<std::byte> sent, received, mine, all;
  uint64_t sizes = 0;  // how often one has changed
  uint64_t key = 0;    // of the open step
  Segment up, down, end;

  void resize(std::vector<std::byte>& buffer, size_t bytes) {
    if (buffer.size() == bytes) return;
    buffer.resize(bytes);
    ++sizes;
  }
};

struct Rank {
  EmulatedStream stream;
  uint64_t clock = 0;
  Device device;
  TensorValues in, out;
  std::unique_ptr<ModelCoder> model;
  std::vector<Bucket> buckets;

  Rank(const std::vector<NamedTensor>& tensors, ReduceOptions reduce, int rank, int world, bool records)
      : in(tensors), out(tensors) {
    device = {.kind = Device::Kind::cuda, .stream = &stream, .clock = records ? &clock : nullptr};
    reduce.device = device;
    model = std::make_unique<ModelCoder>(tensors, CoderOptions{CoderOptions::Kind::all_reduce, reduce, rank, world});
    for (const std::vector<size_t>& which : kBuckets) {
      Bucket& bucket = buckets.emplace_back();
      bucket.coder = std::make_unique<BucketCoder>(*model, which, device);
      for (const size_t t : which) {
        bucket.in.push_back(in.in()[t]);
        bucket.out.push_back(out.out()[t]);
      }
    }
  }
};

// All ranks, in one thread; the exchanges are copies.
struct RecordedWorld {
  RecordedWorld(int n, const ReduceOptions& reduce, bool record) : records(record) {
    for (int rank = 0; rank < n; ++rank)
      ranks.push_back(std::make_unique<Rank>(small_model(), reduce, rank, n, record));
  }

  void step(uint64_t number, const StepOptions& how, const std::function<TensorValues(int)>& inputs) {
    for (size_t r = 0; r < ranks.size(); ++r) {
      const TensorValues values = inputs(static_cast<int>(r));
      for (size_t t = 0; t < values.bytes.size(); ++t)
        std::copy(values.bytes[t].begin(), values.bytes[t].end(), ranks[r]->in.bytes[t].begin());
      ranks[r]->model->begin(number, how);
    }
    for (size_t b = 0; b < kBuckets.size(); ++b) reduce(b);
    std::vector<std::byte> stats;
    for (auto& rank : ranks) {
      rank->model->end();
      const size_t at = stats.size();
      stats.resize(at + rank->model->stats_bytes());
      if (stats.size() > at) rank->model->take_stats(std::span(stats).subspan(at));
    }
    if (!stats.empty())
      for (auto& rank : ranks) rank->model->learn(stats);
  }

  // In three parts, because a rank's exchange needs what the others have encoded.
  void reduce(size_t b) {
    const auto run = [&](Segment Bucket::*segment, const std::function<void(Bucket&)>& work) {
      for (auto& rank : ranks) {
        Bucket& bucket = rank->buckets[b];
        const bool may = records && !rank->model->teaches();
        (bucket.*segment)
            .run(
                rank->device, may, bucket.key, [&] { work(bucket); }, replayed);
      }
    };
    bool scatter = false;
    for (auto& rank : ranks) {
      Bucket& bucket = rank->buckets[b];
      bucket.coder->begin();
      bucket.coder->poll();
      scatter = !bucket.coder->down_recv().empty();
      bucket.resize(bucket.sent, total(bucket.coder->up_send()));
      bucket.resize(bucket.received, total(bucket.coder->up_recv()));
      bucket.resize(bucket.all, total(bucket.coder->down_recv()));
      const size_t self = static_cast<size_t>(&rank - ranks.data());
      bucket.resize(bucket.mine, scatter ? bucket.coder->down_recv()[self] : 0);
      bucket.key = mix64(bucket.coder->signature()) + bucket.sizes;
    }
    run(&Bucket::up, [](Bucket& bucket) { bucket.coder->encode_up(bucket.in, bucket.sent); });
    std::vector<size_t> read(ranks.size());
    for (size_t to = 0; to < ranks.size(); ++to) {
      auto at = ranks[to]->buckets[b].received.begin();
      for (size_t from = 0; from < ranks.size(); ++from) {
        const Bucket& bucket = ranks[from]->buckets[b];
        const size_t slot = bucket.coder->up_send()[to];
        const auto begin = bucket.sent.begin() + static_cast<ptrdiff_t>(read[from]);
        at = std::copy(begin, begin + static_cast<ptrdiff_t>(slot), at);
        read[from] += slot;
      }
      if (damage) damage(ranks[to]->buckets[b].received);
    }
    run(&Bucket::down, [&](Bucket& bucket) {
      bucket.coder->decode_up(bucket.received, scatter ? std::vector<void*>{} : bucket.out);
      if (scatter) bucket.coder->encode_down(bucket.mine);
    });
    if (!scatter) return;
    for (auto& rank : ranks) {
      auto at = rank->buckets[b].all.begin();
      for (const auto& owner : ranks) at = std::copy(owner->buckets[b].mine.begin(), owner->buckets[b].mine.end(), at);
    }
    run(&Bucket::end, [](Bucket& bucket) { bucket.coder->decode_down(bucket.all, bucket.out); });
  }

  bool records;
  std::function<void(std::vector<std::byte>&)> damage;  // of what a rank receives
  int replayed = 0;                                     // segments that were run from a recording
  std::vector<std::unique_ptr<Rank>> ranks;
};

struct Changes {
  uint64_t steps = 30;
  std::function<StepOptions(uint64_t)> how = [](uint64_t) { return StepOptions{}; };
  std::function<void(RecordedWorld&, uint64_t)> before = [](RecordedWorld&, uint64_t) {};
  std::function<void(TensorValues&, int, uint64_t)> spoil = [](TensorValues&, int, uint64_t) {};
};

// Both ways side by side. Returns how many segments were run from a recording.
int compare(const ReduceOptions& reduce, const Changes& changes, const std::string& what) {
  constexpr int kRanks = 2;
  RecordedWorld plain(kRanks, reduce, false), recorded(kRanks, reduce, true);
  for (uint64_t step = 0; step < changes.steps; ++step) {
    const auto inputs = [&](int rank) {
      TensorValues values = gradients(small_model(), rank, step);
      changes.spoil(values, rank, step);
      return values;
    };
    for (RecordedWorld* world : {&plain, &recorded}) {
      changes.before(*world, step);
      world->step(step, changes.how(step), inputs);
    }
    for (int rank = 0; rank < kRanks; ++rank) {
      Rank &a = *plain.ranks[static_cast<size_t>(rank)], &b = *recorded.ranks[static_cast<size_t>(rank)];
      EXPECT_TRUE(a.out == b.out) << what << ": results of rank " << rank << " in step " << step;
      EXPECT_EQ(a.model->feedback().hash(), b.model->feedback().hash()) << what << ", step " << step;
      EXPECT_EQ(a.model->skipped(), b.model->skipped()) << what << ", step " << step;
    }
    if (testing::Test::HasFailure()) return 0;
  }
  EXPECT_EQ(plain.replayed, 0);
  return recorded.replayed;
}

ReduceOptions options_of(const std::string& spec, Method method, Feedback feedback = Feedback::on) {
  ReduceOptions options{.method = method, .up = "1d=fp32;*=" + spec, .seed = 5};
  options.feedback = feedback;
  return options;
}

// Codecs that learn do so in their first steps. dqsgd learns in every step, so no step of its buckets is recorded.
void compare_every_method(const std::string& spec, uint64_t steps) {
  for (const Method method : kMethods) {
    const int replayed = compare(options_of(spec, method), {.steps = steps}, spec + " " + name_of(method));
    EXPECT_EQ(replayed > 0, spec != "dqsgd") << spec << " " << name_of(method);
  }
}

TEST(Recorded, ABucketHasTheBitsOfOneThatIsNot) {
  for (const char* spec : {"fp32", "qsgd:bits=4", "topk", "dqsgd"}) compare_every_method(spec, 8);
  EXPECT_GT(compare(options_of("qsgd:bits=3", Method::scatter, Feedback::off), {.steps = 6}, "no feedback"), 0);
}

TEST(Recorded, LongEveryCodec) {
  for (const std::string& spec : all_specs())
    if (spec != "lowrank") compare_every_method(spec, 24);
}

TEST(Recorded, TablesThatAreLearnedInBetween) {
  for (const char* spec : {"optquant:bits=3,refit=9", "fft:theta=0.9,schedule=rate,smooth=2"}) {
    Changes changes{.steps = 28};
    changes.how = [](uint64_t step) { return StepOptions{.rate = step < 14 ? 0.1 : 0.05}; };
    EXPECT_GT(compare(options_of(spec, Method::scatter), changes, spec), 20) << spec;
  }
}

TEST(Recorded, WhateverChangesBetweenSteps) {
  for (const Method method : kMethods) {
    Changes changes{.steps = 56};
    changes.how = [](uint64_t step) {
      StepOptions how;
      how.loss_scale = step < 20 ? 1.0f : std::ldexp(1.0f, static_cast<int>(step / 13));
      how.rate = step < 30 ? 0.1 : 0.1 / static_cast<double>(step);
      how.exact = step < 3 || step == 47;
      return how;
    };
    changes.before = [](RecordedWorld& world, uint64_t step) {
      for (auto& rank : world.ranks) {
        if (step == 33) rank->model->exempt(4);
        if (step == 40) {
          ErrorFeedback state = ErrorFeedback(DType::f32, rank->device);
          rank->model->restore(std::move(state));
        }
      }
    };
    changes.spoil = [](TensorValues& values, int rank, uint64_t step) {
      if (rank == 1 && (step == 9 || step == 10 || step == 52)) values.set(0, 2'999, HUGE_VALF);
      if (rank == 0 && step == 25) values.set(2, 7, NAN);
    };
    EXPECT_GT(compare(options_of("optquant:bits=2,refit=11", method), changes, name_of(method)), 60);
  }
}

TEST(Recorded, LongTrainingsOfSeveralKinds) {
  for (const char* spec : {"qsgd:bits=4", "onebit", "optquant:bits=3,refit=50"})
    for (const Method method : kMethods) {
      Changes changes{.steps = 1000};
      changes.how = [](uint64_t step) { return StepOptions{.loss_scale = step % 400 < 200 ? 1.0f : 1024.0f}; };
      changes.spoil = [](TensorValues& values, int rank, uint64_t step) {
        if (rank == static_cast<int>(step % 2) && step % 37 == 0) values.set(5, 7 * step, HUGE_VALF);
      };
      EXPECT_GT(compare(options_of(spec, method), changes, spec), 3000);
    }
}

// The decoding that finds the damage was recorded, so nobody looks at once; the poll of the next step tells.
TEST(Recorded, ADamagedMessageIsTold) {
  RecordedWorld world(2, options_of("qsgd:bits=4", Method::scatter), true);
  const auto inputs = [](int rank) { return gradients(small_model(), rank, 0); };
  for (uint64_t step = 0; step < 6; ++step) world.step(step, {}, inputs);
  const int before = world.replayed;
  world.damage = [](std::vector<std::byte>& received) { received[received.size() / 3] ^= std::byte{1}; };
  world.step(6, {}, inputs);
  EXPECT_EQ(world.replayed, before + 12);
  EXPECT_TRUE(std::isnan(world.ranks[0]->out.get(5, 33'499)));
  EXPECT_EQ(world.ranks[0]->model->skipped(), 1u);
  world.damage = {};
  EXPECT_THROW(world.step(7, {}, inputs), Error);
}

TEST(Recording, WhatIsOpenCanBeForgotten) {
  EmulatedStream stream;
  const Device device{.kind = Device::Kind::cuda, .stream = &stream};
  Recording recording(device);
  EXPECT_THROW(recording.run(), Error);
  recording.begin();
  recording.forget();
  EXPECT_EQ(stream.captured, nullptr);
  EXPECT_THROW(recording.run(), Error);
  EXPECT_THROW(Recording(Device{}), Error);
}

}  // namespace
}  // namespace gradwire
