// SPDX-License-Identifier: Apache-2.0
// Device, where to run, and Runner, a plan at work there. A runner has threads (CPU) or tables (GPU) of its own and
// serves one call at a time. After a fork the child has none of the threads: there the runner is left alone rather than
// torn down, since waiting for threads that do not exist would never end.
#include "gradwire/runner.h"

#include <fmt/format.h>
#include <unistd.h>

#include "bindings.h"
#include "gradwire/error.h"

namespace gradwire::python {
namespace {

class SharedRunner {
 public:
  SharedRunner(std::shared_ptr<Plan> plan, const Device& device)
      : plan_(std::move(plan)),
        alignment_(device.kind == Device::Kind::cuda ? 16 : alignof(uint32_t)),
        runner_(make_runner(*plan_, device)) {}
  ~SharedRunner() {
    if (getpid() != process_) {
      runner_.release();
      new std::shared_ptr<Plan>(plan_);  // what it still points to
      return;
    }
    const py::gil_scoped_release unlocked;  // on a GPU this waits
    runner_.reset();
  }
  SharedRunner(const SharedRunner&) = delete;
  SharedRunner& operator=(const SharedRunner&) = delete;

  void encode(const std::vector<Address>& tensors, const Stamp& stamp, Address message, size_t bytes,
              SharedFeedback* feedback, const std::string& side, float loss_scale) {
    const auto in = pointers<const void*>(tensors);
    const std::lock_guard lock(mutex_);
    if (!feedback) return runner_->encode(in, stamp, bytes_at(message, bytes));
    check(tensors.size(), message, bytes);  // before the step is begun: what is wrong then must not leave it open
    const std::lock_guard feedback_lock(feedback->mutex);
    const auto pointers = feedback->feedback.begin(parse_direction(side), stamp.step, plan_->tensors(), loss_scale);
    runner_->encode(in, stamp, bytes_at(message, bytes), &pointers->residuals);
  }

  void decode(Address message, size_t bytes, const std::vector<Address>& tensors, bool add,
              const std::optional<Stamp>& expected, bool wait) {
    const auto out = pointers<void*>(tensors);
    const std::lock_guard lock(mutex_);
    runner_->decode(bytes_at(message, bytes), out, add ? Write::add : Write::set, expected ? &*expected : nullptr);
    if (wait) runner_->wait();
  }

  void wait() {
    const std::lock_guard lock(mutex_);
    runner_->wait();
  }

 private:
  void check(size_t tensors, Address message, size_t bytes) const {
    if (tensors != plan_->tensors().size())
      throw Error(ErrorKind::usage, fmt::format("{} tensors given; the plan has {}", tensors, plan_->tensors().size()),
                  "tensors");
    if (bytes != plan_->message_bytes())
      throw Error(ErrorKind::usage,
                  fmt::format("out has {} bytes; the plan's message has {}", bytes, plan_->message_bytes()), "out");
    if (message % alignment_)
      throw Error(ErrorKind::usage, fmt::format("out is not aligned to {} bytes", alignment_), "out");
  }

  std::shared_ptr<Plan> plan_;
  size_t alignment_;
  std::unique_ptr<Runner> runner_;
  std::mutex mutex_;
  pid_t process_ = getpid();
};

}  // namespace

void bind_runner(py::module_& module) {
  py::class_<Stamp>(module, "Stamp", "Who sends what when.")
      .def(py::init([](uint64_t seed, uint64_t step, uint32_t stage, uint32_t rank, uint32_t world) {
             return Stamp{seed, step, stage, rank, world};
           }),
           py::arg("seed"), py::arg("step"), py::arg("stage"), py::arg("rank"), py::arg("world"));

  py::class_<SharedRunner>(module, "Runner", "A plan at work on a device.")
      .def(py::init<std::shared_ptr<Plan>, const Device&>(), py::arg("plan"), py::arg("device"), Unlocked())
      .def("encode", &SharedRunner::encode, py::arg("tensors"), py::arg("stamp"), py::arg("message"), py::arg("nbytes"),
           py::arg("feedback") = nullptr, py::arg("direction") = "up", py::arg("loss_scale") = 1.0f, Unlocked())
      .def("decode", &SharedRunner::decode, py::arg("message"), py::arg("nbytes"), py::arg("tensors"),
           py::arg("add") = false, py::arg("expected") = py::none(), py::arg("wait") = true, Unlocked())
      .def("wait", &SharedRunner::wait, Unlocked());
}

}  // namespace gradwire::python
