# SPDX-License-Identifier: Apache-2.0
"""encode and decode of one array: every codec and dtype, NumPy and torch, in memory of one's own or the caller's. The
bytes are those of the golden frames, and what is decoded is what a second decoder, written from the format's document,
decodes.
"""

import array
import json
import os
import pickle
import threading

import numpy as np
import pytest

import gradwire
from conftest import EVERY_CODEC, SOURCE

MANIFEST = json.loads((SOURCE / "tests/wire/golden/manifest.json").read_text(encoding="utf-8"))
SINGLE = [f for f in MANIFEST["frames"] if len(f["tensors"]) == 1 and f["tensors"][0]["first"] == 0]


def relative_error(x, y):
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    return np.linalg.norm(x - y) / np.linalg.norm(x)


@pytest.mark.parametrize("frame", SINGLE, ids=lambda frame: frame["name"])
def test_the_bytes_are_those_of_the_golden_frame(frame, golden):
    tensor = frame["tensors"][0]
    expected = (golden / f"{frame['name']}.gw").read_bytes()
    values = np.fromfile(golden / f"{frame['name']}.in.f32", "<f4")
    if tensor["dtype"] == "bf16":
        torch = pytest.importorskip("torch")
        values = torch.from_numpy(values).to(torch.bfloat16)
    elif tensor["dtype"] == "f16":
        values = values.astype(np.float16)
    head = gradwire.inspect(expected)
    codec = gradwire.Codec(tensor["spec"])
    if head["tensors"][0]["table"]:
        codec = codec.with_table(head["tensors"][0]["table"])
    found = gradwire.encode(
        values,
        codec,
        name=tensor["name"],
        fit=False,
        **{key: frame[key] for key in ("seed", "step", "stage", "rank", "world")},
    )
    assert found == expected and found.head["head_check"] == head["head_check"]
    decoded = gradwire.decode(expected, dtype="float32")
    np.testing.assert_array_equal(decoded.view("u4"), np.fromfile(golden / f"{frame['name']}.f32", "<u4"))


@pytest.mark.parametrize("frame", MANIFEST["large"], ids=lambda frame: frame["name"])
def test_large_golden_frames_decode_to_what_was_recorded(frame, golden):
    import second_decoder

    decoded = gradwire.decode((golden / f"{frame['name']}.gw").read_bytes())
    assert f"{second_decoder.xxh64(decoded.tobytes()):016x}" == frame["decoded_xxh64"]


@pytest.mark.parametrize("spec", EVERY_CODEC)
def test_a_second_decoder_reads_what_is_encoded(spec, gradient):
    import second_decoder

    frame = gradwire.encode(gradient[:3000], spec, name="layer", seed=3, step=9, rank=1, world=2)
    message = second_decoder.decode(bytes(frame))
    assert (message.step, message.stage, message.rank, message.world) == (9, 0, 1, 2)
    values, slack = message.tensors[0].values, message.tensors[0].slack
    assert np.all(np.abs(values - gradwire.decode(frame)) <= slack)
    assert message.tensors[0].name_hash == second_decoder.xxh64(b"layer")


@pytest.mark.parametrize("spec", EVERY_CODEC)
@pytest.mark.parametrize("kind", ["f4", "f2", "torch.float32", "torch.float16", "torch.bfloat16"])
def test_every_codec_takes_every_dtype_and_gives_back_the_kind(spec, kind, gradient):
    if kind.startswith("torch"):
        torch = pytest.importorskip("torch")
        values = torch.from_numpy(gradient).to(getattr(torch, kind[6:]))
        as_numpy = values.float().numpy()
    else:
        values = gradient.astype(kind)
        as_numpy = values.astype("f4")
    frame = gradwire.encode(values, spec, seed=5)
    decoded = gradwire.decode(frame)
    assert type(decoded) is type(values) and decoded.dtype == values.dtype and decoded.shape == values.shape
    error = relative_error(as_numpy, decoded.float() if kind.startswith("torch") else decoded)
    # Keeping every value is exact. Three levels of the largest magnitude, without clipping, are unbiased and far off.
    exact, bound = spec in ("fp32", "topk:ratio=1"), 20 if spec == "terngrad:clip=0" else 1.5
    assert error == 0 if exact else 0 < error < bound or kind[-4:] in ("at16", "f2")
    assert gradwire.encode(values, spec, seed=5, threads=3) == frame  # the bytes do not depend on it
    assert frame.nbytes == len(frame) == len(bytes(frame)) == frame.head["total_bytes"]


@pytest.mark.parametrize("count", [0, 1, 31, 1023, 1024, 1025, 32769])
@pytest.mark.parametrize("spec", EVERY_CODEC)
def test_every_size_comes_back_with_its_count(spec, count, gradient):
    decoded = gradwire.decode(gradwire.encode(gradient[:count], spec))
    assert decoded.shape == (count,) and np.isfinite(decoded).all()
    if spec == "fp32":
        np.testing.assert_array_equal(decoded, gradient[:count])


def test_codecs_that_learn_are_fitted_unless_told(gradient):
    values = np.sign(gradient) * np.abs(gradient) ** 3
    for spec in ("optquant:bits=2", "casq:bits=2"):
        fitted, plain = gradwire.encode(values, spec), gradwire.encode(values, spec, fit=False)
        assert fitted.head["tensors"][0]["table"] and not plain.head["tensors"][0]["table"]
        assert relative_error(values, gradwire.decode(fitted)) < relative_error(values, gradwire.decode(plain))
    codec = gradwire.fit("optquant:bits=2", values[:1000])
    assert gradwire.encode(values, codec).head["tensors"][0]["table"] == codec.table  # and not fitted again


def test_random_bits_follow_seed_step_stage_rank_and_name(gradient):
    def bodies(**stamp):
        frame = gradwire.encode(gradient, "qsgd:bits=2", **stamp)
        return bytes(frame)[frame.head["head_bytes"] :]

    base = dict(seed=1, step=1, stage=0, rank=0, world=2, name="a")
    others = [dict(base, seed=2), dict(base, step=2), dict(base, stage=1), dict(base, rank=1), dict(base, name="b")]
    assert bodies(**base) == bodies(**base)
    assert len({bodies(**other) for other in [base, *others]}) == 6


def test_shape_dtype_and_like_of_what_is_decoded(gradient, torch):
    frame = gradwire.encode(gradient[:60].reshape(3, 4, 5), "fp32")
    np.testing.assert_array_equal(gradwire.decode(frame), gradient[:60].reshape(3, 4, 5))
    assert gradwire.decode(frame, like="torch").shape == (3, 4, 5)
    assert frame.head["tensors"][0]["shape"] == [3, 4, 5]
    assert [array.shape for array in gradwire.decode_all(frame)] == [(3, 4, 5)]
    assert gradwire.decode(frame, shape=60).shape == (60,)
    assert gradwire.decode(frame, shape=(-1, 20)).shape == (3, 20)
    assert gradwire.decode(frame, dtype=np.float16).dtype == np.float16
    assert gradwire.decode(frame, dtype="float16", like="torch").dtype == torch.float16
    tensor = gradwire.decode(frame, like="torch", shape=(6, 10))
    assert tensor.shape == (6, 10) and torch.equal(tensor.reshape(-1), torch.from_numpy(gradient[:60]))
    of_torch = gradwire.encode(torch.from_numpy(gradient), "fp32")
    assert of_torch.like == "torch" and isinstance(gradwire.decode(of_torch, like="numpy"), np.ndarray)
    assert isinstance(gradwire.decode(bytes(of_torch)), np.ndarray)
    scalar = gradwire.decode(gradwire.encode(np.float32(2.5).reshape(()), "fp32"), shape=())
    assert scalar.shape == () and scalar == 2.5


def test_bfloat16_comes_to_numpy_as_it_can(torch):
    frame = gradwire.encode(torch.tensor([1.5, -2.0], dtype=torch.bfloat16), "bf16")
    decoded = gradwire.decode(frame, like="numpy")
    try:
        import ml_dtypes
    except ImportError:
        assert decoded.dtype == np.float32
        with pytest.raises(gradwire.UnsupportedError, match="ml_dtypes"):
            gradwire.decode(frame, like="numpy", dtype="bfloat16")
    else:
        assert decoded.dtype == ml_dtypes.bfloat16
        assert gradwire.encode(decoded, "bf16") == frame
    assert decoded.astype("f4").tolist() == [1.5, -2.0]


@pytest.mark.parametrize(
    "make",
    [np.zeros, lambda n, d: bytearray(n), lambda n, d: memoryview(bytearray(n))],
    ids=["numpy", "bytearray", "memoryview"],
)
def test_encode_writes_to_the_callers_memory(make, gradient):
    frame = gradwire.encode(gradient, "qsgd")
    for spare in (0, 100):
        out = make(len(frame) + spare, np.uint8)
        written = gradwire.encode(gradient, "qsgd", out=out)
        assert bytes(written) == bytes(out)[: len(frame)] == bytes(frame)
        np.testing.assert_array_equal(gradwire.decode(written), gradwire.decode(frame))


def test_decode_writes_to_the_callers_memory(gradient, torch):
    frame = gradwire.encode(gradient, "qsgd")
    expected = gradwire.decode(frame)
    for out in (
        np.empty_like(gradient),
        np.empty(gradient.shape, np.float16),
        torch.empty(gradient.size),
        torch.empty(gradient.size, dtype=torch.bfloat16),
    ):
        assert gradwire.decode(frame, out=out) is out
        found = np.asarray(out.float() if isinstance(out, torch.Tensor) else out, np.float32)
        tolerance = {2: 1e-2, 4: 0}[out.dtype.itemsize]
        np.testing.assert_allclose(found, expected, rtol=tolerance, atol=1e-6 if tolerance else 0)


def test_frames_behave_like_bytes(tmp_path, gradient):
    frame = gradwire.encode(gradient, "topk")
    with open(tmp_path / "g.gw", "wb") as file:
        assert file.write(frame) == len(frame)
    for again in (
        (tmp_path / "g.gw").read_bytes(),
        bytearray(frame),
        memoryview(frame),
        np.frombuffer(frame, "u1"),
        np.fromfile(tmp_path / "g.gw", "u1"),
        pickle.loads(pickle.dumps(frame)),
    ):
        np.testing.assert_array_equal(gradwire.decode(again), gradwire.decode(frame))
    assert frame == bytes(frame) and bytes(frame) == frame and frame != b"" and frame != 3
    assert hash(frame) == hash(bytes(frame))
    assert memoryview(frame).readonly
    shifted = memoryview(b"xyz" + bytes(frame))[3:]  # not aligned
    np.testing.assert_array_equal(gradwire.decode(shifted), gradwire.decode(frame))


def test_whatever_hands_out_its_memory_is_taken(gradient, torch):
    expected = gradwire.encode(gradient, "qsgd")

    class Interface:
        __array_interface__ = gradient.__array_interface__

    class Dlpack:
        def __dlpack__(self, **options):
            return gradient.__dlpack__()

        def __dlpack_device__(self):
            return gradient.__dlpack_device__()

    for values in (
        array.array("f", gradient.tolist()),
        memoryview(gradient),
        Interface(),
        Dlpack(),
        torch.nn.Parameter(torch.from_numpy(gradient)),
    ):
        assert gradwire.encode(values, "qsgd") == expected


def test_nothing_is_copied_on_the_way_in(gradient, monkeypatch):
    seen = []
    real = gradwire._arrays.view
    monkeypatch.setattr(gradwire._plan._arrays, "view", lambda *a, **k: seen.append(real(*a, **k)) or seen[-1])
    gradwire.encode(gradient, "fp32")
    assert {view.address for view in seen} == {gradient.ctypes.data}


def test_a_negated_view_is_encoded_as_it_reads(torch):
    negated = torch.tensor([1 + 2j, 3 - 4j]).conj().imag
    assert negated.is_neg()
    assert gradwire.decode(gradwire.encode(negated.contiguous(), "fp32")).tolist() == [-2.0, 4.0]


def test_not_a_number_marks_its_unit_alone(gradient):
    gradient[5] = np.nan
    decoded = gradwire.decode(gradwire.encode(gradient, "qsgd:bits=4,bucket=1024"))
    assert np.isnan(decoded[:1024]).all() and np.isfinite(decoded[1024:]).all()


def test_threads_and_forks_do_not_disturb_each_other(gradient):
    expected = gradwire.encode(gradient, "qsgd", threads=2)
    found = []

    def work():
        found.extend(
            gradwire.encode(gradient, "qsgd", threads=2) == expected and gradwire.decode(expected, threads=2).size
            for _ in range(5)
        )

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == [gradient.size] * 20
    child = os.fork()
    if child == 0:  # has none of the parent's threads
        os._exit(0 if gradwire.encode(gradient, "qsgd", threads=2) == expected else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_inspect_says_what_the_frame_says(golden):
    info = gradwire.inspect((golden / "mixed.gw").read_bytes())
    entry = next(frame for frame in MANIFEST["frames"] if frame["name"] == "mixed")
    assert {key: info[key] for key in ("step", "stage", "rank", "world")} == {
        key: entry[key] for key in ("step", "stage", "rank", "world")
    }
    assert [(t["codec"], t["count"], t["first"], t["dtype"]) for t in info["tensors"]] == [
        (t["spec"], t["count"], t["first"], t["dtype"]) for t in entry["tensors"]
    ]
    assert info["magic"] == "GWIR" and info["tensor_count"] == 8 and info["spec_count"] == 5
    assert info["total_bytes"] == 1408 and info["head_bytes"] == 512 and info["head_check"] == "fa264eb140a30e53"
