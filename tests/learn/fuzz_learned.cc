// SPDX-License-Identifier: Apache-2.0
// libFuzzer on what codecs have learned, as a checkpoint brings it back: bytes as they come, and the saved state of an
// honest learner with some words changed, for every codec that learns. A state is refused with an Error, or it is one
// that the learner can go on from: it gives a codec that encodes, learns from statistics, and saves again. The same
// holds for statistics of which only the ranges are checked, as a server gets them from its workers.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "gradwire/error.h"
#include "gradwire/learn.h"
#include "support/fuzz_source.h"

namespace {

using namespace gradwire;
using gradwire::fuzz::promise;
using gradwire::fuzz::Source;
using Bytes = std::vector<std::byte>;

constexpr uint64_t kElements = 2048;

const std::vector<std::string>& learning_specs() {
  static const std::vector<std::string> specs = [] {
    std::vector<std::string> all;
    for (const CodecInfo& info : codecs())
      for (const std::string& spec : info.specs)
        if (Codec::parse(spec).traits().learns) all.push_back(spec);
    return all;
  }();
  return specs;
}

// Some steps of an honest run.
void train(Learner& learner, uint64_t first, uint64_t steps, double rate) {
  static const std::vector<float> values = [] {
    std::vector<float> x(kElements);
    for (uint64_t i = 0; i < kElements; ++i) x[i] = static_cast<float>(static_cast<int>(i * 37 % 101) - 50) * 0.01f;
    return x;
  }();
  const void* in[] = {values.data()};
  const uint32_t which[] = {0};
  for (uint64_t step = first; step < first + steps; ++step) {
    const Plan plan({{"t", kElements, DType::f32, learner.codec(step, rate)}});
    const auto runner = make_runner(plan, {});
    Bytes message(plan.message_bytes());
    if (!learner.ahead()) runner->encode(in, {.step = step}, message);
    if (!learner.observes(step)) continue;
    if (learner.ahead()) runner->encode(in, {.step = step}, message);
    learner.observe(*runner, which, step, in, nullptr, message);
    runner->wait();
    learner.collect();
    Bytes stats(learner.stats_bytes());
    learner.take_stats(stats);
    const std::span<const std::byte> ranks[] = {stats};
    learner.learn(step, ranks);
  }
}

// Statistics of an honest step with some words changed to any number.
void learn_from_a_liar(const Codec& codec, Source& source) {
  Learner learner(codec, kElements, 2);
  train(learner, 0, 2, 0.1);
  std::vector<int64_t> words(learner.stats_bytes() / sizeof(int64_t), source.next<uint8_t>() % 3);
  words[0] = static_cast<int64_t>(source.next<uint16_t>() % 1024) - 512;
  while (source.size > 0) {
    const size_t first = source.next<uint16_t>() % words.size(), count = 1 + source.next<uint8_t>() % 64;
    const auto value = static_cast<uint64_t>(source.next<int16_t>()) << source.next<uint8_t>() % 64;
    for (size_t i = first; i < std::min(first + count, words.size()); ++i) words[i] = static_cast<int64_t>(value);
  }
  const auto stats = std::as_bytes(std::span(words));
  try {
    learner.check_stats(stats);
    const std::span<const std::byte> ranks[] = {stats, stats};
    learner.learn(2, ranks);
  } catch (const Error& error) {
    promise(*error.what() != '\0');
  }
  train(learner, 3, 2, 0.1);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Source source{data, size};
  const Codec codec = Codec::parse(learning_specs()[source.next<uint8_t>() % learning_specs().size()]);
  const auto how = source.next<uint8_t>();
  if (how & 128) {
    learn_from_a_liar(codec, source);
    return 0;
  }
  Bytes state;
  if (how & 1) {
    Learner honest(codec, kElements, 1);
    train(honest, 0, how / 2 % 4, 0.1);
    state = honest.save();
    while (source.size > 0 && state.size() >= 8) {  // in words of 8 bytes
      const size_t at = source.next<uint8_t>() % (state.size() / 8) * 8;
      uint64_t word = source.next<uint8_t>() % 2 ? source.next<uint64_t>() : source.next<uint8_t>();
      std::memcpy(state.data() + at, &word, sizeof word);
      if (source.next<uint8_t>() == 255) state.resize(source.next<uint8_t>() % (state.size() + 9));
    }
  } else {
    const std::string bytes = source.rest();
    state.resize(bytes.size());
    if (!bytes.empty()) std::memcpy(state.data(), bytes.data(), bytes.size());
  }
  Learner learner(codec, kElements, 1);
  try {
    learner.restore(state);
  } catch (const Error& error) {
    promise(error.kind() == ErrorKind::frame || error.kind() == ErrorKind::usage);
    promise(!error.field().empty());
    return 0;
  }
  promise(learner.save().size() % 8 == 0);
  train(learner, 100, 2, 0.1);  // what was taken can be used
  return 0;
}
