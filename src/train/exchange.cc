// SPDX-License-Identifier: Apache-2.0
#include "train/exchange.h"

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/autograd.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <functional>
#include <limits>

#include "collective/factor_plan.h"
#include "collective/timer.h"
#include "core/check.h"
#include "gradwire/learn.h"
#include "gradwire/rules.h"

namespace gradwire::train {
namespace {

c10::Stream new_stream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device);
}

// What `later` does from now on comes after what `earlier` was told so far.
void order_streams(const c10::Stream& earlier, const c10::Stream& later) {
  c10::Event event(earlier.device_type());
  event.record(earlier);
  event.block(later);
}

// A codec that looks at a step before it is sent needs all of its gradients at once: they go in one bucket.
bool looks_ahead(const ReduceOptions& options, const std::vector<NamedTensor>& tensors) {
  for (const std::string& text : {options.up, options.down}) {
    if (text.empty()) continue;
    const Rules rules = Rules::parse(without_lowrank(text));
    for (const NamedTensor& tensor : tensors) {
      const Codec codec = rules.codec_for(tensor.name, tensor.dimensions, tensor.count);
      if (codec.traits().learns && Learner(codec, 1, 1).ahead()) return true;
    }
  }
  return false;
}

struct Hook final : torch::autograd::PostAccumulateGradHook {
  explicit Hook(std::function<void()> what) : call(std::move(what)) {}
  void operator()(const torch::autograd::Variable&) override { call(); }
  std::function<void()> call;
};

}  // namespace

NamedTensor describe(const NamedParameter& parameter) {
  return {.name = parameter.name,
          .count = static_cast<uint64_t>(parameter.tensor.numel()),
          .dtype = DType::f32,
          .dimensions = static_cast<int>(parameter.tensor.dim()),
          .rows = parameter.tensor.dim() > 1 ? static_cast<uint64_t>(parameter.tensor.size(0)) : 0};
}

struct Exchange::Bucket {
  std::vector<size_t> parameters;
  std::optional<c10::Stream> stream;
  std::unique_ptr<Reducer> reducer, first;  // first: of the first steps
  size_t missing = 0;
  Handle handle;
};

Exchange::Exchange(Engine& engine, std::vector<NamedParameter> parameters, const ReduceOptions& options,
                   double bucket_bytes, std::optional<c10::Stream> stream, SentValues values, const FirstSteps& first)
    : engine_(engine),
      parameters_(std::move(parameters)),
      options_(options),
      stream_(stream),
      values_(std::move(values)),
      first_steps_(first.steps),
      bucket_of_(parameters_.size()) {
  std::vector<NamedTensor> model;
  for (const NamedParameter& parameter : parameters_) model.push_back(describe(parameter));
  if (looks_ahead(options_, model)) bucket_bytes = std::numeric_limits<double>::infinity();
  double filled = 0;
  for (size_t i = parameters_.size(); i-- > 0;) {
    const double bytes = 4.0 * static_cast<double>(parameters_[i].tensor.numel());
    if (buckets_.empty() || filled + bytes > bucket_bytes) {
      buckets_.push_back(std::make_unique<Bucket>());
      filled = 0;
    }
    filled += bytes;
    buckets_.back()->parameters.push_back(i);
    bucket_of_[i] = buckets_.size() - 1;
    elements_ += static_cast<uint64_t>(parameters_[i].tensor.numel());
  }
  for (auto& bucket : buckets_) {
    std::vector<NamedTensor> tensors;
    for (size_t i : bucket->parameters) tensors.push_back(describe(parameters_[i]));
    ReduceOptions own = options_;
    own.commit = ReduceOptions::Commit::manual;  // all buckets of a step are decided together
    if (buckets_.size() > 1) own.model = model;  // and learn together
    if (stream_) {
      bucket->stream = new_stream(stream_->device());
      own.device.stream = bucket->stream->native_handle();
    }
    bucket->reducer = std::make_unique<Reducer>(engine_, tensors, own);
    if (first.steps == 0) continue;
    own.up = first.up;
    own.down = first.down;
    own.feedback = own.owner_feedback = ReduceOptions::Feedback::off;
    own.residual = DType::f32;  // there are none, and what is said of them would be refused
    own.decay = 1;
    bucket->first = std::make_unique<Reducer>(engine_, tensors, own);
  }
  for (size_t i = 0; i < parameters_.size(); ++i) {
    auto hook = std::make_unique<Hook>([this, i] { gradient_ready(i); });
    torch::autograd::impl::set_post_acc_grad_hooks(parameters_[i].tensor, std::move(hook));
  }
}

Exchange::~Exchange() {
  for (const NamedParameter& parameter : parameters_)
    torch::autograd::impl::set_post_acc_grad_hooks(parameter.tensor, nullptr);
}

void Exchange::begin(uint64_t step, double loss_scale, double rate, bool overlap) {
  step_ = step;
  loss_scale_ = loss_scale;
  overlap_ = overlap;
  next_ = 0;
  for (auto& bucket : buckets_) {
    bucket->missing = bucket->parameters.size();
    active(*bucket).set_rate(rate);
  }
}

void Exchange::gradient_ready(size_t parameter) {
  if (!overlap_) return;
  Bucket& own = *buckets_[bucket_of_[parameter]];
  if (own.missing > 0) --own.missing;
  while (next_ < buckets_.size() && buckets_[next_]->missing == 0) send(*buckets_[next_++]);
}

Reducer& Exchange::active(const Bucket& bucket) const { return step_ < first_steps_ ? *bucket.first : *bucket.reducer; }

const torch::Tensor& Exchange::sent(size_t parameter) const {
  return values_.fill ? values_.tensors[parameter] : parameters_[parameter].tensor.grad();
}

void Exchange::send(Bucket& bucket) {
  if (stream_) {
    // Autograd may add gradients up on another stream than the worker's: come after both.
    const c10::Stream here = c10::impl::VirtualGuardImpl(stream_->device_type()).getStream(stream_->device());
    if (here != *stream_) order_streams(here, *stream_);
  }
  if (values_.fill) values_.fill(bucket.parameters);
  if (bucket.stream) order_streams(*stream_, *bucket.stream);
  std::vector<const void*> in;
  std::vector<void*> out;
  for (size_t i : bucket.parameters) {
    const torch::Tensor& values = sent(i);
    GW_CHECK(values.defined() && values.is_contiguous() && values.scalar_type() == torch::kFloat32);
    in.push_back(values.data_ptr());
    out.push_back(values.data_ptr());
  }
  bucket.handle = active(bucket).start(step_, in, out, static_cast<float>(loss_scale_));
}

void Exchange::finish() {
  overlap_ = false;
  while (next_ < buckets_.size()) send(*buckets_[next_++]);
  for (auto& bucket : buckets_) bucket->handle.wait();
  if (buckets_.size() < 2) return;
  std::vector<Reducer*> all;
  for (auto& bucket : buckets_) all.push_back(&active(*bucket));
  Reducer::learn_together(all, step_);
}

void Exchange::commit() {
  for (auto& bucket : buckets_) active(*bucket).commit(step_);
}

void Exchange::rollback() {
  for (auto& bucket : buckets_) active(*bucket).rollback(step_);
}

std::vector<torch::Tensor> Exchange::exact_means(Engine& engine, uint64_t step) const {
  ReduceOptions options = options_;
  options.method = ReduceOptions::Method::scatter;
  options.up = "fp32";
  options.down = "fp32";
  std::vector<NamedTensor> tensors;
  std::vector<torch::Tensor> means;
  std::vector<const void*> in;
  std::vector<void*> out;
  for (const NamedParameter& parameter : parameters_) {
    tensors.push_back(describe(parameter));
    const torch::Tensor& values = sent(tensors.size() - 1);
    means.push_back(torch::empty_like(values));
    in.push_back(values.data_ptr());
    out.push_back(means.back().data_ptr());
  }
  std::optional<c10::Stream> stream;
  if (stream_) {
    stream = new_stream(stream_->device());
    order_streams(*stream_, *stream);
    options.device.stream = stream->native_handle();
  }
  Reducer reducer(engine, tensors, options);
  reducer.run(step, in, out, static_cast<float>(loss_scale_));
  return means;
}

double Exchange::bits() const {
  uint64_t bytes = 0;
  for (const auto& bucket : buckets_) {
    for (const uint64_t codes : active(*bucket).encoded_bytes(Direction::up)) bytes += codes;
  }
  return 8.0 * static_cast<double>(bytes) / static_cast<double>(std::max<uint64_t>(1, elements_));
}

std::vector<Reducer*> Exchange::all_reducers() const {
  std::vector<Reducer*> all;
  for (const auto& bucket : buckets_)
    for (Reducer* const reducer : {bucket->reducer.get(), bucket->first.get()})
      if (reducer) all.push_back(reducer);
  return all;
}

ReduceTimes Exchange::times() const {
  ReduceTimes sum;
  for (const Reducer* const reducer : all_reducers()) sum += reducer->times();
  return sum;
}

ReduceMemory Exchange::memory() const {
  ReduceMemory sum;
  for (const Reducer* const reducer : all_reducers()) {
    const ReduceMemory own = reducer->memory();
    sum.residuals += own.residuals;
    sum.messages += own.messages;
    sum.sums += own.sums;
  }
  return sum;
}

std::vector<ErrorFeedback*> Exchange::residuals() {
  std::vector<ErrorFeedback*> all;
  for (const auto& bucket : buckets_) all.push_back(&bucket->reducer->feedback());
  return all;
}

std::vector<Exchange::Learned> Exchange::learned() const {
  std::vector<Learned> all;
  const bool scatter = options_.method == ReduceOptions::Method::scatter;
  for (Direction direction : {Direction::up, Direction::down}) {
    if (direction == Direction::down && !scatter) break;
    for (const auto& bucket : buckets_) {
      const std::vector<Codec> codecs = bucket->reducer->codecs(direction);
      for (size_t k = 0; k < codecs.size(); ++k) {
        if (codecs[k].table().empty()) continue;
        auto known = std::find_if(all.begin(), all.end(), [&](const Learned& one) {
          return one.direction == direction && one.codec == codecs[k];
        });
        if (known == all.end()) known = all.insert(all.end(), Learned{direction, codecs[k], {}});
        known->tensors.push_back(parameters_[bucket->parameters[k]].name);
      }
    }
  }
  return all;
}

}  // namespace gradwire::train
