# SPDX-License-Identifier: Apache-2.0
"""CUDA tensors: the bytes are the CPU's, on torch's current stream, without waiting; frames stay on the GPU."""

import numpy as np
import pytest

import gradwire
from conftest import EVERY_CODEC


@pytest.fixture
def tensor(cuda, gradient):
    return cuda.from_numpy(gradient).cuda()


@pytest.mark.parametrize("spec", EVERY_CODEC)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_bytes_and_values_are_those_of_the_cpu(spec, dtype, cuda, tensor):
    values = tensor.to(getattr(cuda, dtype))
    frame = gradwire.encode(values, spec, name="w", seed=1, step=2)
    expected = gradwire.encode(values.cpu(), spec, name="w", seed=1, step=2)
    assert isinstance(frame, gradwire.CudaFrame) and frame.tensor.is_cuda and len(frame) == len(expected)
    assert bytes(frame) == bytes(expected) and frame.cpu() == expected and frame.head == expected.head
    decoded = gradwire.decode(frame)
    assert decoded.is_cuda and decoded.dtype == values.dtype
    bits = np.uint32 if dtype == "float32" else np.uint16
    as_bits = lambda t: t.cpu().view(cuda.int32 if dtype == "float32" else cuda.int16).numpy().view(bits)  # noqa: E731
    np.testing.assert_array_equal(as_bits(decoded), as_bits(gradwire.decode(expected)))


def test_frames_are_read_from_wherever_they_are(cuda, tensor, gradient):
    frame = gradwire.encode(tensor, "qsgd")
    expected = gradwire.decode(gradwire.encode(gradient, "qsgd"))
    for found in (
        gradwire.decode(frame),
        gradwire.decode(frame.tensor),
        gradwire.decode(frame.tensor.clone(), dtype="float32"),
    ):
        assert found.is_cuda
        np.testing.assert_array_equal(found.cpu().numpy(), expected)
    for found in (
        gradwire.decode(frame, like="numpy"),
        gradwire.decode(frame.tensor, like="numpy"),
        gradwire.decode(bytes(frame)),
    ):
        assert isinstance(found, np.ndarray)
        np.testing.assert_array_equal(found, expected)
    shifted = cuda.cat([cuda.zeros(3, dtype=cuda.uint8, device="cuda"), frame.tensor])[3:]
    np.testing.assert_array_equal(gradwire.decode(shifted).cpu().numpy(), expected)
    out = cuda.empty_like(tensor)
    assert gradwire.decode(frame, out=out) is out and cuda.equal(out.cpu(), cuda.from_numpy(expected))
    room = cuda.zeros(len(frame) + 64, dtype=cuda.uint8, device="cuda")
    assert bytes(gradwire.encode(tensor, "qsgd", out=room)) == bytes(frame)


def test_the_second_call_of_a_kind_does_not_wait(cuda, tensor):
    out = cuda.empty_like(tensor)
    for spec in ("qsgd", "onebit", "topk", "fft"):
        plan = gradwire.Plan([("w", tensor.numel(), "float32", spec)])
        frame = plan.encode([tensor])
        plan.decode(frame, [out], wait=False)
        gradwire.decode(gradwire.encode(tensor, spec, fit=False), out=out, wait=False)

        def returns_while_the_gpu_is_busy(cycles):
            cuda.cuda.synchronize()
            busy = cuda.cuda.Event()
            cuda.cuda._sleep(cycles)
            busy.record()
            plan.decode(plan.encode([tensor]), [out], wait=False)
            gradwire.decode(gradwire.encode(tensor, spec, fit=False), out=out, wait=False)
            return not busy.query()

        # Calls that wait for the GPU never return early; on a busy host, those that do not may need more than the first
        # second.
        assert any(returns_while_the_gpu_is_busy(seconds * 2_000_000_000) for seconds in (1, 4, 16)), spec
        cuda.cuda.synchronize()


def test_work_is_enqueued_on_the_current_stream(cuda, tensor):
    side = cuda.cuda.Stream()
    values = cuda.zeros_like(tensor)
    gradwire.encode(values, "fp32")
    with cuda.cuda.stream(side):
        gradwire.encode(values, "fp32")
        side.synchronize()
        cuda.cuda._sleep(200_000_000)
        values.copy_(tensor, non_blocking=True)
        frame = gradwire.encode(values, "fp32")
        decoded = gradwire.decode(frame)
    assert cuda.equal(decoded, tensor)


def test_a_damaged_frame_is_refused_or_decodes_to_nan(cuda, tensor):
    good = gradwire.encode(tensor, "qsgd").tensor
    for at in (0, 4, 20, 40, 70, len(good) // 2, len(good) - 1):
        bad = good.clone()
        bad[at] ^= 4
        with pytest.raises(gradwire.FrameError):
            gradwire.decode(bad)
    plan = gradwire.Plan([("", tensor.numel(), "float32", "qsgd")])
    bad = good.clone()
    bad[-1] ^= 4
    with pytest.raises(gradwire.FrameError, match="body_check"):
        plan.decode(bad)
    assert cuda.isnan(plan.decode(bad, wait=False)[0]).all()
    assert cuda.isfinite(plan.decode(good)[0]).all()  # and a later call is not affected
    for length in (0, 10, 63, 64, 100, len(good) - 1):
        with pytest.raises(gradwire.FrameError):
            gradwire.decode(good[:length].clone())
    with pytest.raises(gradwire.FrameError, match="limit"):
        gradwire.decode(good, max_elements=10)


def test_places_must_agree(cuda, tensor, gradient):
    frame, on_cpu = gradwire.encode(tensor, "qsgd"), gradwire.encode(gradient, "qsgd")
    plan = gradwire.Plan([("a", gradient.size), ("b", gradient.size)])
    for call, words in (
        (lambda: gradwire.decode(frame, out=np.empty_like(gradient)), "out is on the CPU, the frame on cuda:0"),
        (lambda: gradwire.decode(on_cpu, out=cuda.empty_like(tensor)), "out is on cuda:0, the frame on the CPU"),
        (lambda: gradwire.encode(tensor, "qsgd", out=np.empty(10**6, "u1")), "out is on the CPU"),
        (lambda: plan.encode([tensor, gradient]), "'b' is on the CPU, 'a' on cuda:0"),
        (
            lambda: plan.encode([gradient, gradient], feedback=gradwire.ErrorFeedback(device="cuda")),
            "feedback is on cuda:0",
        ),
        (lambda: gradwire.encode(tensor.double(), "qsgd"), "float64"),
        (lambda: gradwire.encode(tensor[::2], "qsgd"), "not contiguous"),
    ):
        with pytest.raises(gradwire.UsageError, match=words):
            call()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_residuals_on_the_gpu_are_those_of_the_cpu(dtype, cuda, tensor, gradient, tmp_path):
    plan = gradwire.Plan(
        [("w", gradient.size, "float32", "topk:ratio=0.05"), ("v", gradient.size, "float32", "qsgd:bits=2")]
    )
    states = {device: gradwire.ErrorFeedback(dtype, device=device) for device in ("cpu", "cuda:0")}
    messages = {device: [] for device in states}
    for device, feedback in states.items():
        feedback.add_plan(plan)
        values = gradient if device == "cpu" else tensor
        for step in range(3):
            message = plan.encode([values, values], step=step, feedback=feedback)
            messages[device].append(bytes(message))
            feedback.rollback(step) if step == 1 else feedback.commit(step)
    assert messages["cpu"] == messages["cuda:0"] and states["cpu"].hash() == states["cuda:0"].hash()
    np.testing.assert_array_equal(states["cpu"].residual("w"), states["cuda:0"].residual("w"))
    states["cuda:0"].save(tmp_path / "r")
    assert (
        gradwire.ErrorFeedback.load(tmp_path / "r", device="cuda").hash()
        == gradwire.ErrorFeedback.load(tmp_path / "r").hash()
    )
    with cuda.cuda.stream(cuda.cuda.Stream()):
        with pytest.raises(gradwire.UsageError, match="another CUDA stream"):
            plan.encode([tensor, tensor], step=9, feedback=states["cuda:0"])


def test_an_empty_tensor_and_one_element(cuda):
    for count in (0, 1):
        for spec in EVERY_CODEC:
            frame = gradwire.encode(cuda.ones(count, device="cuda"), spec)
            assert bytes(frame) == bytes(gradwire.encode(np.ones(count, "f4"), spec))
            assert gradwire.decode(frame).shape == (count,)
