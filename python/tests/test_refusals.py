# SPDX-License-Identifier: Apache-2.0
"""Bad input: one clear exception each, that names what and what is allowed; and nothing is written."""

import numpy as np
import pytest

import gradwire

ONES = np.ones(100, np.float32)
FRAME = bytes(gradwire.encode(ONES, "qsgd"))


def refused(kind, words, call, field=None):
    with pytest.raises(kind, match=words) as error:
        call()
    assert isinstance(error.value, gradwire.Error) and "\n" not in str(error.value)
    if field is not None:
        assert error.value.field == field


@pytest.mark.parametrize(
    "value, words, field",
    [
        (np.ones((8, 8), "f4")[:, ::2], "not contiguous.*ascontiguousarray", "strides"),
        (np.asfortranarray(np.ones((8, 8), "f4")), "not contiguous", "strides"),
        (np.ones(8, "f8"), "float64.*allowed are float32", "dtype"),
        (np.ones(8, "i4"), "int32.*allowed are float32", "dtype"),
        (np.ones(8, "c8"), "complex64", "dtype"),
        (np.ones(8, "?"), "bool", "dtype"),
        (np.ones(8, ">f4"), "byte order", "dtype"),
        (np.array([None, 1]), "object", "dtype"),
        (np.array(["a"]), "str", "dtype"),
        (np.ma.masked_array(ONES), "masked", "type"),
        (np.frombuffer(bytes(17), "u1")[1:].view("f4"), "not aligned", "alignment"),
        (None, "NoneType.*allowed are NumPy", "type"),
        ([1.0, 2.0], "list.*allowed are NumPy", "type"),
        (3.0, "float", "type"),
        ("text", "str", "type"),
        (b"12345678", "uint8", "dtype"),
        (object(), "object", "type"),
    ],
)
def test_an_array_that_cannot_be_encoded(value, words, field):
    refused(gradwire.UsageError, words, lambda: gradwire.encode(value, "qsgd"), field)


def test_a_tensor_that_cannot_be_encoded(torch):
    for tensor, words in (
        (torch.ones(8, 8).t(), "not contiguous.*contiguous()"),
        (torch.ones(8, dtype=torch.float64), "float64.*allowed are"),
        (torch.ones(8, dtype=torch.int64), "int64"),
        (torch.ones(8, dtype=torch.complex64), "complex64"),
        (torch.ones(8, dtype=torch.bool), "bool"),
        (torch.ones(8, device="meta"), "meta; allowed are cpu and cuda"),
        (torch.ones(8).to_sparse(), "layout"),
        (torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last), "not contiguous"),
    ):
        refused(gradwire.UsageError, words, lambda: gradwire.encode(tensor, "qsgd"))


@pytest.mark.parametrize(
    "arguments, words, field",
    [
        (dict(codec="qsdg"), "qsdg", None),
        (dict(codec="qsgd:bits=77"), "from 2 to 8", "bits"),
        (dict(codec=None), "NoneType.*string", "codec"),
        (dict(step=-1), "step is -1; allowed", "step"),
        (dict(step=1.5), "step is 1.5", "step"),
        (dict(seed=2**64), "seed", "seed"),
        (dict(rank=1), "rank is 1; allowed is an integer from 0 to 0", "rank"),
        (dict(world=0), "world is 0", "world"),
        (dict(stage=2**32), "stage", "stage"),
        (dict(threads=0), "threads is 0; allowed is an integer from 1", "threads"),
        (dict(threads="2"), "threads", "threads"),
        (dict(name=b"w"), "name", "name"),
        (dict(out=np.empty(10, "u1")), "out has 10 bytes; the frame needs", "out"),
        (dict(out=bytes(1000)), "out is read-only", "out"),
        (dict(out=np.empty(1000, "f4")), "float32; allowed is uint8", "dtype"),
        (dict(out=np.empty(2000, "u1")[::2]), "not contiguous", "strides"),
        (dict(out=np.empty(1001, "u1")[1:]), "not aligned to 4", "message"),
        (dict(out="x"), "type str", "type"),
    ],
)
def test_a_wrong_argument_of_encode(arguments, words, field):
    arguments.setdefault("codec", "qsgd")
    refused(gradwire.UsageError, words, lambda: gradwire.encode(ONES, **arguments), field)


def test_memory_that_cannot_be_decoded_into(torch):
    read_only = np.empty(100, "f4")
    read_only.flags.writeable = False
    for out, words in (
        (np.empty(99, "f4"), "out has 99 elements; the frame has 100"),
        (np.empty(101, "f4"), "out has 101 elements; the frame has 100"),
        (np.empty(100), "float64.*allowed"),
        (np.empty(100, "i4"), "int32"),
        (np.empty(200, "f4")[::2], "not contiguous"),
        (read_only, "out is read-only"),
        (torch.empty(100, dtype=torch.float64), "float64"),
        (torch.empty(100, requires_grad=True), "requires grad"),
        (torch.empty(100, device="meta"), "meta"),
        ([0.0] * 100, "type list"),
    ):
        refused(gradwire.Error, words, lambda: gradwire.decode(FRAME, out=out))


@pytest.mark.parametrize(
    "arguments, words, field",
    [
        (dict(shape=(3, 5)), "shape is .*100 elements", "shape"),
        (dict(shape="x"), "shape", "shape"),
        (dict(dtype="float64"), "float64; allowed", "dtype"),
        (dict(dtype=int), "int; allowed", "dtype"),
        (dict(like="jax"), "like is 'jax'; allowed", "like"),
        (dict(max_elements=-1), "max_elements", "max_elements"),
        (dict(out=np.empty(100, "f4"), shape=(100,)), "out is given with shape", "out"),
    ],
)
def test_a_wrong_argument_of_decode(arguments, words, field):
    refused(gradwire.UsageError, words, lambda: gradwire.decode(FRAME, **arguments), field)


@pytest.mark.parametrize(
    "frame, words",
    [
        (None, "NoneType.*allowed are frames"),
        ("text", "str"),
        (np.ones(8, "f4"), "float32; allowed is uint8"),
        (7, "int"),
    ],
)
def test_a_frame_that_is_none(frame, words):
    refused(gradwire.UsageError, words, lambda: gradwire.decode(frame))
    refused(gradwire.UsageError, words, lambda: gradwire.inspect(frame))


def test_a_truncated_frame_is_refused_at_every_length():
    for length in range(len(FRAME)):
        refused(gradwire.FrameError, "bad message", lambda: gradwire.decode(FRAME[:length]))
    refused(gradwire.FrameError, "total_bytes", lambda: gradwire.decode(FRAME + b"x"), "total_bytes")


def test_a_flipped_bit_is_refused_wherever_it_is():
    for at in range(len(FRAME)):
        altered = bytearray(FRAME)
        altered[at] ^= 1 << at % 8
        out = np.full(100, 7, "f4")
        refused(gradwire.FrameError, "bad message", lambda: gradwire.decode(altered, out=out))
        assert (out == 7).all()
        refused(gradwire.FrameError, "bad message", lambda: gradwire.inspect(altered))


def test_malformed_frames_with_right_checksums_are_refused():
    import malformed_frames

    assert len(malformed_frames.MALFORMED) > 100
    for _rule, name, edit, field in malformed_frames.MALFORMED:
        frame = bytearray(malformed_frames.golden(name))
        edit(frame)
        frame = malformed_frames.reseal(bytes(frame))
        refused(gradwire.FrameError, "bad message", lambda: gradwire.decode_all(frame, max_elements=2**26), field)


def test_a_frame_of_more_elements_than_wanted_is_refused_before_memory_is_taken():
    zeros = gradwire.encode(np.zeros(1 << 20, "f4"), "topk:ratio=1e-6")
    refused(gradwire.FrameError, "1048576.*limit|limit.*1000", lambda: gradwire.decode(zeros, max_elements=1000))
    assert gradwire.decode(zeros, max_elements=1 << 20).size == 1 << 20


def test_a_message_of_several_tensors_is_not_one(golden):
    message = (golden / "mixed.gw").read_bytes()
    refused(gradwire.UsageError, "8 tensors.*decode_all", lambda: gradwire.decode(message), "frame")


def test_cuda_where_there_is_none(torch):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises((gradwire.Error, RuntimeError, AssertionError)):
        gradwire.ErrorFeedback(device="cuda")
    refused(gradwire.UsageError, "device is tpu; allowed", lambda: gradwire.ErrorFeedback(device="tpu"), "device")
