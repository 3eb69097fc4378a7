// SPDX-License-Identifier: Apache-2.0
// The all-reduce for C programs. The tensors are those of a plan, and options are collected. The first collective call
// makes the Reducer of them, which compares them between all ranks.
#include <charconv>
#include <cmath>
#include <optional>

#include "c/boundary.h"
#include "c/callback_engine.h"
#include "c/plan.h"

namespace gradwire::c_api {
namespace {

template <class Number>
Number number(std::string_view option, std::string_view text) {
  Number value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size())
    refuse_usage(std::string(option) + " is '" + std::string(text) + "'; a number is expected",
                 std::string(option).c_str());
  return value;
}

template <class Value>
Value choice(std::string_view option, std::string_view text,
             std::initializer_list<std::pair<const char*, Value>> values) {
  std::string allowed;
  for (const auto& [name, value] : values) {
    if (text == name) return value;
    allowed += (allowed.empty() ? "" : ", ") + std::string(name);
  }
  refuse_usage(std::string(option) + " is '" + std::string(text) + "'; allowed are " + allowed,
               std::string(option).c_str());
}

using Feedback = ReduceOptions::Feedback;

Feedback feedback(std::string_view option, std::string_view text) {
  return choice<Feedback>(option, text, {{"codec", Feedback::codec}, {"on", Feedback::on}, {"off", Feedback::off}});
}

int number_of_nodes(std::string_view text) {
  const int nodes = number<int>("nodes", text);
  if (nodes < 0) refuse_usage("nodes is " + std::string(text) + "; allowed are auto, 0 and numbers above", "nodes");
  return nodes;
}

// False: there is no such option.
bool set_option(ReduceOptions& options, std::string_view option, std::string_view text) {
  using Method = ReduceOptions::Method;
  using Op = ReduceOptions::Op;
  if (option == "down")
    options.down = text.empty() ? std::string{} : Rules::parse(text).str();
  else if (option == "method")
    options.method = choice<Method>(option, text, {{"scatter", Method::scatter}, {"gather", Method::gather}});
  else if (option == "op")
    options.op = choice<Op>(option, text, {{"mean", Op::mean}, {"sum", Op::sum}});
  else if (option == "feedback")
    options.feedback = feedback(option, text);
  else if (option == "owner_feedback")
    options.owner_feedback = feedback(option, text);
  else if (option == "residual")
    options.residual = choice<DType>(option, text, {{"f32", DType::f32}, {"bf16", DType::bf16}});
  else if (option == "decay")
    options.decay = number<float>(option, text);
  else if (option == "seed")
    options.seed = number<uint64_t>(option, text);
  else if (option == "steps")
    options.steps = number<uint64_t>(option, text);
  else if (option == "threads")
    options.device.threads = number<int>(option, text);
  else if (option == "nodes")
    options.nodes = text == "auto" ? ReduceOptions::kAutoNodes : number_of_nodes(text);
  else
    return false;
  return true;
}

}  // namespace
}  // namespace gradwire::c_api

struct gw_reducer {
  gw_reducer(const gw_communicator& communicator, const gw_plan& plan) : engine(communicator), tensors(plan.tensors) {
    options.up = plan.text;
  }

  void expect_unused(const char* what) const {
    if (reducer) gradwire::refuse_usage(std::string(what) + " comes after the first step", what);
  }

  gradwire::Reducer& used() {
    if (!reducer) {
      reducer.emplace(engine, tensors, options);
      reducer->set_rate(rate);
    }
    return *reducer;
  }

  // Before the members below: the Reducer ends first.
  gradwire::c_api::CallbackEngine engine;
  const std::vector<gradwire::NamedTensor> tensors;
  gradwire::ReduceOptions options;
  double rate = -1;
  float loss_scale = 1;
  std::optional<gradwire::Reducer> reducer;
};

using namespace gradwire;
using namespace gradwire::c_api;

extern "C" {

int gw_reducer_open(const gw_communicator* communicator, const gw_plan* plan, gw_reducer** reducer) {
  return guarded([&] {
    *given(reducer, "reducer") = nullptr;
    auto opened = std::make_unique<gw_reducer>(*given(communicator, "communicator"), *given(plan, "plan"));
    opened->engine.own();
    *reducer = opened.release();
  });
}

void gw_reducer_close(gw_reducer* reducer) { delete reducer; }

int gw_reducer_set(gw_reducer* reducer, const char* option, const char* value) {
  return guarded([&] {
    given(reducer, "reducer");
    const std::string_view name = given(option, "option"), text = given(value, "value");
    if (name == "rate") {
      const double rate = number<double>(name, text);
      if (!(rate >= 0) || !std::isfinite(rate))
        refuse_usage("rate is '" + std::string(text) + "'; allowed is a finite number from 0 on", "rate");
      reducer->rate = rate;
      if (reducer->reducer) reducer->reducer->set_rate(reducer->rate);
      return;
    }
    if (name == "loss_scale") {
      const float scale = number<float>(name, text);
      if (!(scale > 0) || !std::isfinite(scale))
        refuse_usage("loss_scale is '" + std::string(text) + "'; allowed is a finite number above 0", "loss_scale");
      reducer->loss_scale = scale;
      return;
    }
    reducer->expect_unused(option);
    if (!set_option(reducer->options, name, text))
      refuse_usage("there is no option '" + std::string(name) + "'; gradwire.h lists them", "option");
  });
}

int gw_reducer_get(gw_reducer* reducer, const char* figure, uint64_t* value) {
  return guarded([&] {
    given(reducer, "reducer");
    given(value, "value");
    const std::string_view name = given(figure, "figure");
    if (name != "message_bytes" && name != "node_bytes" && name != "skipped")
      refuse_usage("there is no figure '" + std::string(name) + "'; allowed are message_bytes, node_bytes, skipped",
                   "figure");
    if (!reducer->reducer) refuse_usage(std::string(name) + " is known after the first step only", "figure");
    *value = name == "skipped"      ? reducer->reducer->skipped()
             : name == "node_bytes" ? reducer->reducer->node_bytes()
                                    : reducer->reducer->message_bytes();
  });
}

int gw_reducer_run(gw_reducer* reducer, uint64_t step, const void* const* in, void* const* out) {
  return guarded([&] {
    const size_t count = given(reducer, "reducer")->tensors.size();
    // A list that is missing is one of null pointers: the reducer refuses them on all ranks, so that no rank waits.
    std::vector<const void*> inputs(count);
    std::vector<void*> outputs(count);
    for (size_t i = 0; i < count; ++i) {
      if (in) inputs[i] = in[i];
      if (out) outputs[i] = out[i];
    }
    reducer->used().run(step, inputs, outputs, reducer->loss_scale);
  });
}

int gw_reducer_save(gw_reducer* reducer, const char* path) {
  return guarded([&] {
    given(reducer, "reducer");
    given(path, "path");
    if (!reducer->reducer) refuse_usage("there is nothing to save before the first step", "reducer");
    reducer->reducer->feedback().save(path);
  });
}

int gw_reducer_load(gw_reducer* reducer, const char* path) {
  return guarded([&] {
    given(reducer, "reducer");
    given(path, "path");
    // The collective part comes first: a rank whose file is damaged keeps no other rank waiting.
    ErrorFeedback& feedback = reducer->used().feedback();
    feedback = ErrorFeedback::load(path, reducer->options.device);
  });
}

}  // extern "C"
