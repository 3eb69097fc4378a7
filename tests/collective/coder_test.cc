// SPDX-License-Identifier: Apache-2.0
// The coding core without an engine: here the ranks take turns in one thread, and their bytes are moved by copying.
// What must hold: the bits of a Reducer for every codec, however tensors are grouped; a skipped step changes nothing.
#include "gradwire/coder.h"

#include <cmath>
#include <limits>
#include <memory>
#include <numeric>

#include "collective/collective_fixture.h"

namespace gradwire {
namespace {

using namespace test;
using Groups = std::vector<std::vector<size_t>>;

std::vector<NamedTensor> small_model() {
  return {{"conv.weight", 70'000, DType::f32, 4}, {"conv.bias", 33, DType::f32, 1}, {"embed", 40'000, DType::f32, 2},
          {"half", 5'000, DType::bf16, 2},        {"empty", 0, DType::f32, 2},      {"head", 1'025, DType::f32, 2}};
}

Groups one_group(const std::vector<NamedTensor>& tensors) {
  std::vector<size_t> all(tensors.size());
  std::iota(all.begin(), all.end(), size_t{0});
  return {all};
}

size_t total(const std::vector<size_t>& slots) { return std::accumulate(slots.begin(), slots.end(), size_t{0}); }
size_t before(const std::vector<size_t>& slots, size_t p) {
  return std::accumulate(slots.begin(), slots.begin() + static_cast<ptrdiff_t>(p), size_t{0});
}

// All ranks of a world, in one thread.
struct World {
  World(int n, std::vector<NamedTensor> list, const ReduceOptions& reduce,
        CoderOptions::Kind kind = CoderOptions::Kind::all_reduce)
      : tensors(std::move(list)) {
    for (int rank = 0; rank < n; ++rank)
      models.push_back(std::make_unique<ModelCoder>(tensors, CoderOptions{kind, reduce, rank, n}));
  }
  size_t size() const { return models.size(); }

  // Slot p of rank r's buffer becomes slot r of rank p's.
  static std::vector<std::vector<std::byte>> all_to_all(const std::vector<std::vector<std::byte>>& sent,
                                                        const std::vector<std::unique_ptr<BucketCoder>>& buckets) {
    std::vector<std::vector<std::byte>> got;
    for (size_t p = 0; p < sent.size(); ++p) {
      std::vector<std::byte> recv;
      for (size_t r = 0; r < sent.size(); ++r) {
        const auto from = sent[r].begin() + static_cast<ptrdiff_t>(before(buckets[r]->up_send(), p));
        EXPECT_EQ(buckets[r]->up_send()[p], buckets[p]->up_recv()[r]);
        recv.insert(recv.end(), from, from + static_cast<ptrdiff_t>(buckets[r]->up_send()[p]));
      }
      got.push_back(std::move(recv));
    }
    return got;
  }

  // One step; results of all ranks. `touch` may spoil what rank `to` receives.
  std::vector<TensorValues> step(uint64_t number, const Groups& groups, const std::function<TensorValues(int)>& inputs,
                                 const StepOptions& how = {}, const std::vector<uint8_t>& idle = {},
                                 const std::function<void(size_t to, std::vector<std::byte>&)>& touch = {}) {
    std::vector<TensorValues> in, out(size(), TensorValues(tensors));
    for (size_t r = 0; r < size(); ++r) {
      in.push_back(inputs(static_cast<int>(r)));
      models[r]->begin(number, how);
    }
    for (const std::vector<size_t>& group : groups)
      for (uint64_t part = 0; part < parts; ++part) {
        std::vector<std::unique_ptr<BucketCoder>> buckets;
        std::vector<std::vector<std::byte>> sent, downs;
        for (size_t r = 0; r < size(); ++r) {
          buckets.push_back(std::make_unique<BucketCoder>(*models[r], group, Device{}, part, parts));
          std::vector<uint8_t> own;
          for (size_t t : group)
            if (!idle.empty()) own.push_back(idle[t]);
          buckets[r]->begin(own);
          sent.emplace_back(total(buckets[r]->up_send()));
          buckets[r]->encode_up(pick<const void*>(in[r].in(), group), sent[r]);
        }
        std::vector<std::vector<std::byte>> got = all_to_all(sent, buckets);
        for (size_t r = 0; r < size(); ++r) {
          if (touch) touch(r, got[r]);
          const bool scatter = !buckets[r]->down_recv().empty();
          buckets[r]->decode_up(got[r], scatter ? std::vector<void*>{} : pick<void*>(out[r].out(), group));
          if (!scatter) continue;
          std::vector<std::byte> mine(buckets[r]->down_recv()[r]);
          buckets[r]->encode_down(mine);
          downs.push_back(std::move(mine));
        }
        std::vector<std::byte> all;
        for (const auto& mine : downs) all.insert(all.end(), mine.begin(), mine.end());
        if (!downs.empty())
          for (size_t r = 0; r < size(); ++r) buckets[r]->decode_down(all, pick<void*>(out[r].out(), group));
      }
    std::vector<std::byte> stats;
    for (auto& model : models) {
      model->end();
      const size_t at = stats.size();
      stats.resize(at + model->stats_bytes());
      if (model->stats_bytes()) model->take_stats(std::span(stats).subspan(at));
    }
    if (!stats.empty())
      for (auto& model : models) model->learn(stats);
    return out;
  }

  template <class Pointer>
  static std::vector<Pointer> pick(const std::vector<Pointer>& all, const std::vector<size_t>& group) {
    std::vector<Pointer> some;
    for (size_t t : group) some.push_back(all[t]);
    return some;
  }

  std::vector<uint64_t> hashes() {
    std::vector<uint64_t> all;
    for (auto& model : models) all.push_back(model->feedback().hash());
    return all;
  }

  std::vector<NamedTensor> tensors;
  std::vector<std::unique_ptr<ModelCoder>> models;
  uint64_t parts = 1;  // that every group travels in
};

ReduceOptions options_of(const std::string& spec, Method method = Method::scatter) {
  ReduceOptions options;
  options.up = "conv.bias=fp32;*=" + spec;
  options.method = method;
  options.seed = 5;
  options.feedback = Feedback::on;
  return options;
}

std::function<TensorValues(int)> gradients_of(const std::vector<NamedTensor>& tensors, uint64_t step) {
  return [&tensors, step](int rank) { return gradients(tensors, rank, step); };
}

TEST(Coder, GivesTheReducersBitsAndResiduals) {
  const std::vector<NamedTensor> tensors = small_model();
  for (const std::string& spec : all_specs())
    for (Method method : kMethods)
      for (int world : {1, 3}) {
        const ReduceOptions options = options_of(spec, method);
        World buckets(world, tensors, options);
        std::vector<std::vector<TensorValues>> expected(
            3, std::vector<TensorValues>(static_cast<size_t>(world), TensorValues(tensors)));
        std::vector<uint64_t> hashes(static_cast<size_t>(world));
        run_loopback(world, [&](Engine& engine) {
          Reducer reducer(engine, tensors, options);
          const auto rank = static_cast<size_t>(engine.rank());
          for (uint64_t step = 0; step < 3; ++step) {
            reducer.run(step, gradients(tensors, engine.rank(), step).in(), expected[step][rank].out());
          }
          hashes[rank] = reducer.feedback().hash();
        });
        for (uint64_t step = 0; step < 3; ++step) {
          const std::vector<TensorValues> got = buckets.step(step, one_group(tensors), gradients_of(tensors, step));
          for (size_t r = 0; r < got.size(); ++r)
            EXPECT_TRUE(got[r] == expected[step][r])
                << spec << ' ' << name_of(method) << " world " << world << " step " << step << " rank " << r;
        }
        EXPECT_EQ(buckets.hashes(), hashes) << spec << ' ' << name_of(method);
      }
}

TEST(Coder, WhatTravelsTogetherChangesNothing) {
  const std::vector<NamedTensor> tensors = small_model();
  const Groups whole = one_group(tensors), each = {{5}, {4}, {3}, {2}, {1}, {0}}, mixed = {{3, 0}, {5, 1, 4}, {2}};
  for (const std::string& spec : all_specs()) {
    World a(3, tensors, options_of(spec)), b(3, tensors, options_of(spec));
    for (uint64_t step = 0; step < 4; ++step) {
      const std::vector<TensorValues> x = a.step(step, whole, gradients_of(tensors, step));
      const std::vector<TensorValues> y = b.step(step, step % 2 ? each : mixed, gradients_of(tensors, step));
      expect_identical(x, spec);
      for (size_t r = 0; r < x.size(); ++r) EXPECT_TRUE(x[r] == y[r]) << spec << " step " << step << " rank " << r;
      EXPECT_EQ(a.hashes(), b.hashes()) << spec << " step " << step;
    }
  }
}

TEST(Coder, LargeTensorsMayTravelInParts) {
  const std::vector<NamedTensor> tensors = {{"w", 700'001, DType::f32, 2}, {"v", 40'000, DType::f32, 2}};
  for (const std::string& spec : all_specs()) {
    World a(3, tensors, options_of(spec)), b(3, tensors, options_of(spec));
    if (!b.models[0]->divisible(0)) continue;
    b.parts = 3;
    for (uint64_t step = 0; step < 2; ++step) {
      const std::vector<TensorValues> x = a.step(step, {{0}, {1}}, gradients_of(tensors, step)),
                                      y = b.step(step, {{0}, {1}}, gradients_of(tensors, step));
      for (size_t r = 0; r < x.size(); ++r) EXPECT_TRUE(x[r] == y[r]) << spec << " step " << step << " rank " << r;
      EXPECT_EQ(a.hashes(), b.hashes()) << spec << " step " << step;
    }
  }
  World paper(2, tensors, options_of("onebit:mode=paper"));
  EXPECT_FALSE(paper.models[0]->divisible(0));
}

TEST(Coder, AnInfOnOneRankSkipsTheStepForAll) {
  const std::vector<NamedTensor> tensors = small_model();
  for (const std::string& spec : all_specs())
    for (Method method : kMethods) {
      World skipped(3, tensors, options_of(spec, method)), plain(3, tensors, options_of(spec, method));
      for (uint64_t step = 0; step < 2; ++step) {
        skipped.step(step, one_group(tensors), gradients_of(tensors, step));
        plain.step(step, one_group(tensors), gradients_of(tensors, step));
      }
      const std::vector<uint64_t> hashes = skipped.hashes();
      for (float scale : {65536.0f, 32768.0f}) {
        const std::vector<TensorValues> out =
            skipped.step(2, {{0, 3}, {1, 2, 4, 5}},
                         [&](int rank) {
                           TensorValues data = gradients(tensors, rank, 2);
                           if (rank == 1) data.set(2, 12'345, std::numeric_limits<float>::infinity());
                           return data;
                         },
                         {.loss_scale = scale});
        for (const TensorValues& data : out) EXPECT_FALSE(std::isfinite(data.get(2, 12'345))) << spec;
        EXPECT_EQ(skipped.hashes(), hashes) << spec << ' ' << name_of(method);
      }
      for (auto& model : skipped.models) EXPECT_EQ(model->skipped(), 2u);
      const std::vector<TensorValues> x = skipped.step(2, one_group(tensors), gradients_of(tensors, 2)),
                                      y = plain.step(2, one_group(tensors), gradients_of(tensors, 2));
      for (size_t r = 0; r < x.size(); ++r)
        EXPECT_TRUE(x[r] == y[r]) << spec << ": the skipped step left something behind";
      EXPECT_EQ(skipped.hashes(), plain.hashes()) << spec;
    }
}

TEST(Coder, AnOwnerReadsItsMeansBeforeTheyAreRounded) {
  const std::vector<NamedTensor> tensors = small_model();
  const std::vector<size_t> group = {0, 1, 2, 3, 5};  // the fourth one is of bf16, and its means are not wanted
  ReduceOptions options = options_of("fp32");
  options.down = "qsgd:bits=2";
  World world(3, tensors, options);
  std::vector<TensorValues> in, means(3, TensorValues(tensors));
  std::vector<std::unique_ptr<BucketCoder>> buckets;
  std::vector<std::vector<std::byte>> sent;
  for (size_t r = 0; r < 3; ++r) {
    in.push_back(gradients(tensors, static_cast<int>(r), 0));
    means[r].fill([](size_t, uint64_t) { return 7.0f; });
    world.models[r]->begin(0, {});
    buckets.push_back(std::make_unique<BucketCoder>(*world.models[r], group, Device{}));
    buckets[r]->begin();
    sent.emplace_back(total(buckets[r]->up_send()));
    buckets[r]->encode_up(World::pick<const void*>(in[r].in(), group), sent[r]);
  }
  const std::vector<std::vector<std::byte>> got = World::all_to_all(sent, buckets);
  for (size_t r = 0; r < 3; ++r) {
    buckets[r]->decode_up(got[r]);
    std::vector<void*> out = World::pick<void*>(means[r].out(), group);
    EXPECT_THROW(buckets[r]->read_means(out), Error) << "bf16";
    EXPECT_THROW(buckets[r]->read_means(std::span(out).first(4)), Error) << "too few";
    out[3] = nullptr;
    buckets[r]->read_means(out);
  }
  for (size_t t : {0, 1, 2, 5})
    for (uint64_t i = 0; i < tensors[t].count; ++i) {
      const float mean = ((in[0].get(t, i) + in[1].get(t, i)) + in[2].get(t, i)) / 3.0f;
      int owners = 0;
      for (const TensorValues& one : means) owners += one.get(t, i) == mean;
      ASSERT_EQ(owners, 1) << tensors[t].name << ' ' << i;
      for (const TensorValues& one : means) ASSERT_TRUE(one.get(t, i) == mean || one.get(t, i) == 7.0f);
    }
  World gathered(2, tensors, options_of("fp32", Method::gather));
  gathered.models[0]->begin(0, {});
  BucketCoder other(*gathered.models[0], {0}, Device{});
  EXPECT_THROW(other.read_means(std::vector<void*>(1)), Error) << "there is no way down";
}

TEST(Coder, IdleTensorsKeepTheirResidual) {
  const std::vector<NamedTensor> tensors = small_model();
  World world(3, tensors, options_of("qsgd:bits=2"));
  world.step(0, one_group(tensors), gradients_of(tensors, 0));
  std::vector<std::vector<float>> owed;
  for (auto& model : world.models) owed.push_back(model->feedback().residual(Direction::up, "embed"));
  std::vector<uint8_t> idle(tensors.size());
  idle[2] = 1;
  const std::vector<TensorValues> out = world.step(
      1, one_group(tensors),
      [&](int rank) {
        TensorValues data = gradients(tensors, rank, 1);
        for (uint64_t i = 0; i < tensors[2].count; ++i) data.set(2, i, 0);
        return data;
      },
      {}, idle);
  for (size_t r = 0; r < out.size(); ++r) {
    for (uint64_t i = 0; i < tensors[2].count; ++i) ASSERT_EQ(out[r].get(2, i), 0.0f);
    EXPECT_EQ(world.models[r]->feedback().residual(Direction::up, "embed"), owed[r]);
  }
}

TEST(Coder, AnExactStepSendsAllResiduals) {
  const std::vector<NamedTensor> tensors = {{"w", 50'000, DType::f32, 2}};
  World world(4, tensors, options_of("qsgd:bits=2"));
  std::vector<double> given(tensors[0].count), received(tensors[0].count);
  for (uint64_t step = 0; step < 3; ++step) {
    const std::vector<TensorValues> out =
        world.step(step, one_group(tensors), gradients_of(tensors, step), {.exact = step == 2});
    for (int r = 0; r < 4; ++r) {
      const TensorValues own = gradients(tensors, r, step);
      for (uint64_t i = 0; i < given.size(); ++i) given[i] += own.get(0, i) / 4.0;
    }
    for (uint64_t i = 0; i < given.size(); ++i) received[i] += out[0].get(0, i);
  }
  // Six roundings of f32 numbers below 0.2.
  for (uint64_t i = 0; i < given.size(); ++i) EXPECT_NEAR(given[i], received[i], 1e-7);
  for (auto& model : world.models)
    for (const auto& entry : model->feedback().entries())
      for (float x : model->feedback().residual(entry.direction, entry.name, entry.first)) ASSERT_EQ(x, 0.0f);
}

TEST(Coder, AnExemptTensorIsExactAndItsResidualIsSent) {
  const std::vector<NamedTensor> tensors = small_model();
  for (const char* spec : {"qsgd:bits=2", "optquant:bits=2"}) {
    World world(2, tensors, options_of(spec));
    for (uint64_t step = 0; step < 3; ++step) {
      if (step == 1)
        for (auto& model : world.models) model->exempt(2);
      world.step(step, one_group(tensors), gradients_of(tensors, step));
    }
    for (auto& model : world.models) {
      EXPECT_EQ(model->codecs(Direction::up)[2].name(), "fp32");
      EXPECT_EQ(model->codecs(Direction::down)[2].name(), "fp32");
      for (float x : model->feedback().residual(Direction::up, "embed")) ASSERT_EQ(x, 0.0f);
    }
  }
}

TEST(Coder, EachDirectionAloneIsExact) {
  // What sharded training needs: slice p belongs to rank p.
  std::vector<NamedTensor> tensors;
  for (int p = 0; p < 3; ++p) tensors.push_back({"block/" + std::to_string(p), 9'001, DType::f32, 1});
  ReduceOptions options;
  options.up = options.down = "fp32";
  World up(3, tensors, options, CoderOptions::Kind::reduce_scatter),
      down(3, tensors, options, CoderOptions::Kind::all_gather);
  std::vector<std::unique_ptr<BucketCoder>> buckets;
  std::vector<std::vector<std::byte>> sent;
  for (size_t r = 0; r < 3; ++r) {
    up.models[r]->begin(0, {});
    buckets.push_back(std::make_unique<BucketCoder>(*up.models[r], std::vector<size_t>{0, 1, 2}, Device{}));
    buckets[r]->begin();
    sent.emplace_back(total(buckets[r]->up_send()));
    buckets[r]->encode_up(gradients(tensors, static_cast<int>(r), 0).in(), sent[r]);
  }
  const auto got = World::all_to_all(sent, buckets);
  std::vector<std::vector<float>> mine(3, std::vector<float>(9'001));
  for (size_t r = 0; r < 3; ++r) {
    buckets[r]->decode_up(got[r], std::vector<void*>{mine[r].data()});
    up.models[r]->end();
    for (uint64_t i = 0; i < 9'001; i += 100) {
      float sum = 0;
      for (int q = 0; q < 3; ++q) sum += gradients(tensors, q, 0).get(r, i);
      ASSERT_EQ(mine[r][i], sum / 3);
    }
  }
  std::vector<std::byte> all;
  buckets.clear();
  for (size_t r = 0; r < 3; ++r) {
    down.models[r]->begin(0, {});
    buckets.push_back(std::make_unique<BucketCoder>(*down.models[r], std::vector<size_t>{0, 1, 2}, Device{}));
    buckets[r]->begin();
    std::vector<std::byte> message(buckets[r]->down_recv()[r]);
    buckets[r]->encode_down(message, std::vector<const void*>{mine[r].data()});
    all.insert(all.end(), message.begin(), message.end());
  }
  for (size_t r = 0; r < 3; ++r) {
    TensorValues out(tensors);
    buckets[r]->decode_down(all, out.out());
    for (size_t p = 0; p < 3; ++p) EXPECT_EQ(out.get(p, 77), mine[p][77]);
  }
}

TEST(Coder, ADamagedMessageChangesNothing) {
  const std::vector<NamedTensor> tensors = small_model();
  World world(2, tensors, options_of("qsgd:bits=4"));
  world.step(0, one_group(tensors), gradients_of(tensors, 0));
  const std::vector<uint64_t> hashes = world.hashes();
  const Outcome outcome = outcome_of([&] {
    world.step(1, one_group(tensors), gradients_of(tensors, 1), {}, {},
               [](size_t, std::vector<std::byte>& bytes) { bytes[bytes.size() / 2] ^= std::byte{4}; });
  });
  EXPECT_TRUE(outcome.threw);
  EXPECT_EQ(outcome.kind, ErrorKind::frame);
  for (auto& model : world.models) model->abandon();
  EXPECT_EQ(world.hashes(), hashes);
  world.step(1, one_group(tensors), gradients_of(tensors, 1));  // and can go on
}

TEST(Coder, DecodesItsOwnMessagesAsOthersSeeThem) {
  const std::vector<NamedTensor> tensors = small_model();
  World world(3, tensors, options_of("qsgd:bits=4"));
  ModelCoder& model = *world.models[1];
  model.begin(0, {});
  BucketCoder bucket(model, one_group(tensors)[0], Device{});
  bucket.begin();
  const TensorValues in = gradients(tensors, 1, 0);
  TensorValues seen(tensors);
  std::vector<std::byte> sent(total(bucket.up_send()));
  bucket.encode_up(in.in(), sent);
  bucket.decode_own(sent, seen.out());
  model.abandon();
  for (size_t t : {0u, 2u, 5u})
    for (uint64_t i = 0; i < tensors[t].count; ++i) ASSERT_NEAR(seen.get(t, i), in.get(t, i), 0.035 / 7);
  EXPECT_EQ(seen.get(1, 7), in.get(1, 7));
}

TEST(Coder, MisuseIsRefusedByName) {
  const std::vector<NamedTensor> tensors = small_model();
  World world(2, tensors, options_of("qsgd:bits=4"));
  ModelCoder& model = *world.models[0];
  BucketCoder bucket(model, {0, 1}, Device{});
  const auto refused = [](const std::function<void()>& body) {
    const Outcome outcome = outcome_of(body);
    return outcome.threw && outcome.kind == ErrorKind::usage ? outcome.field : "no";
  };
  EXPECT_EQ(refused([&] { bucket.begin(); }), "step");
  EXPECT_EQ(refused([&] { model.end(); }), "step");
  EXPECT_EQ(refused([&] { model.begin(0, {.loss_scale = 0}); }), "loss_scale");
  EXPECT_EQ(refused([&] { model.begin(0, {.loss_scale = std::numeric_limits<float>::infinity()}); }), "loss_scale");
  EXPECT_EQ(refused([&] { BucketCoder(model, {0, 0}, Device{}); }), "tensors");
  EXPECT_EQ(refused([&] { BucketCoder(model, {9}, Device{}); }), "tensors");
  EXPECT_EQ(refused([&] { model.exempt(9); }), "tensor");
  model.begin(0, {});
  bucket.begin();
  std::vector<std::byte> send(total(bucket.up_send()));
  const TensorValues in = gradients(tensors, 0, 0);
  EXPECT_EQ(refused([&] { bucket.encode_up(std::vector<const void*>{in.in()[0]}, send); }), "in");
  EXPECT_EQ(refused([&] { bucket.encode_up(std::vector<const void*>{in.in()[0], nullptr}, send); }), "in");
  EXPECT_EQ(
      refused([&] {
        bucket.encode_up(std::vector<const void*>{in.in()[0], in.in()[1]}, std::span(send).first(send.size() - 1));
      }),
      "send");
  EXPECT_EQ(refused([&] { bucket.begin(std::vector<uint8_t>(3)); }), "idle");
  EXPECT_TRUE(outcome_of([&] { World(2, tensors, options_of("dqsgd:mode=paper")); }).kind == ErrorKind::unsupported);
  EXPECT_EQ(refused([&] { ModelCoder(tensors, {CoderOptions::Kind::all_reduce, options_of("fp32"), 2, 2}); }), "rank");
}

}  // namespace
}  // namespace gradwire
