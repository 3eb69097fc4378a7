# SPDX-License-Identifier: Apache-2.0
"""Plans: many tensors in one message; and error feedback: what a step could not send is kept until it is sent."""

import json

import numpy as np
import pytest

import gradwire
from conftest import SOURCE

MANIFEST = json.loads((SOURCE / "tests/wire/golden/manifest.json").read_text(encoding="utf-8"))
SEVERAL = [f for f in MANIFEST["frames"] if len(f["tensors"]) != 1 or f["tensors"][0]["first"]]


@pytest.fixture
def plan():
    return gradwire.Plan([("w", 5000, "float32", "qsgd:bits=4"), ("e", 2000, "float16", "onebit"), ("b", 10)])


@pytest.fixture
def tensors():
    random = np.random.default_rng(3)
    return [
        random.standard_normal(5000).astype("f4"),
        random.standard_normal(2000).astype("f2"),
        np.arange(10, dtype="f4"),
    ]


@pytest.mark.parametrize("frame", SEVERAL, ids=lambda frame: frame["name"])
def test_messages_of_several_tensors_are_the_golden_ones(frame, golden):
    expected = (golden / f"{frame['name']}.gw").read_bytes()
    info = gradwire.inspect(expected)
    values = np.split(
        np.fromfile(golden / f"{frame['name']}.in.f32", "<f4"), np.cumsum([t["count"] for t in frame["tensors"]])[:-1]
    )
    entries, arrays = [], []
    for tensor, told, array in zip(frame["tensors"], info["tensors"], values):
        codec = gradwire.Codec(tensor["spec"])
        entries.append(
            (
                tensor["name"],
                tensor["count"],
                tensor["dtype"],
                codec.with_table(told["table"]) if told["table"] else codec,
                tensor["first"],
                tensor.get("shape", ()),
            )
        )
        if tensor["dtype"] == "bf16":
            torch = pytest.importorskip("torch")
            array = torch.from_numpy(array.copy()).to(torch.bfloat16)
        arrays.append(array.astype("f2") if tensor["dtype"] == "f16" else array)
    plan = gradwire.Plan(entries)
    message = plan.encode(arrays, **{key: frame[key] for key in ("seed", "step", "stage", "rank", "world")})
    assert message == expected and len(message) == plan.nbytes and plan.elements == info["elements"]
    recorded = np.fromfile(golden / f"{frame['name']}.f32", "<f4")
    as_f32 = gradwire.Plan([(name, count, "float32", *rest) for name, count, _dtype, *rest in entries])
    np.testing.assert_array_equal(
        np.concatenate(as_f32.decode(expected) or [np.empty(0, "f4")]).view("u4"), recorded.view("u4")
    )


def test_a_message_is_the_frames_of_its_tensors(plan, tensors):
    message = plan.encode(tensors, seed=1, step=4)
    alone = [
        gradwire.decode(gradwire.encode(array, spec.codec, name=spec.name, seed=1, step=4))
        for array, spec in zip(tensors, plan.tensors)
    ]
    for decoded in (plan.decode(message), gradwire.decode_all(message), plan.decode(bytes(message))):
        for found, expected in zip(decoded, alone):
            assert found.dtype == expected.dtype
            np.testing.assert_array_equal(found, expected)


def test_tensors_by_name_and_in_the_callers_memory(plan, tensors):
    by_name = {"b": tensors[2], "w": tensors[0], "e": tensors[1]}
    message = plan.encode(by_name)
    assert message == plan.encode(tensors)
    room = np.zeros(plan.nbytes, "u1")
    assert plan.encode(tensors, out=room).base is not None and bytes(room) == bytes(message)
    out = {name: np.zeros_like(array) for name, array in by_name.items()}
    results = plan.decode(message, out)
    assert results[0] is out["w"] and results[2] is out["b"]
    np.testing.assert_array_equal(out["b"], tensors[2])


def test_a_plan_follows_rules(tensors):
    plan = gradwire.Plan.of({"w": tensors[0].reshape(50, 100), "b": tensors[2]}, "1d=fp32;*=qsgd:bits=2")
    assert [(t.name, t.count, t.dtype, t.codec.name) for t in plan.tensors] == [
        ("w", 5000, "f32", "qsgd"),
        ("b", 10, "f32", "fp32"),
    ]
    fitted = gradwire.Plan.of({"w": tensors[0]}, "optquant:bits=2").fitted([tensors[0]])
    assert fitted.tensors[0].codec.table == gradwire.fit("optquant:bits=2", tensors[0]).table


def test_decoding_adds_where_it_is_told_to(tensors):
    plan = gradwire.Plan([("w", 5000, "float32", "qsgd:bits=4")])
    message = plan.encode(tensors[:1])
    once = plan.decode(message)[0]
    total = np.ones(5000, "f4")
    plan.decode(message, [total], add=True)
    np.testing.assert_array_equal(total, np.float32(1) + once)


def test_what_is_expected_is_checked(plan, tensors):
    message = plan.encode(tensors, step=3, stage=1, rank=1, world=2)
    assert len(plan.decode(message, expect=gradwire.Stamp(3, 1, 1, 2))) == 3
    for wrong in (
        gradwire.Stamp(4, 1, 1, 2),
        gradwire.Stamp(3, 0, 1, 2),
        gradwire.Stamp(3, 1, 0, 2),
        gradwire.Stamp(3, 1, 1, 3),
    ):
        with pytest.raises(gradwire.FrameError):
            plan.decode(message, expect=wrong)
    other = gradwire.Plan([("w", 5000, "float32", "qsgd:bits=4"), ("e", 2000, "float16", "onebit"), ("c", 10)])
    with pytest.raises(gradwire.FrameError):
        other.decode(message)


def test_torch_tensors_in_a_plan(plan, tensors, torch):
    as_torch = [torch.from_numpy(array) for array in tensors]
    message = plan.encode(as_torch)
    assert message == plan.encode(tensors)
    assert all(isinstance(t, torch.Tensor) for t in plan.decode(message)) and isinstance(
        plan.decode(message, like="numpy")[0], np.ndarray
    )


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda t: t[:2], "2 tensors given; the plan has 3"),
        (lambda t: [t[0][:-1], *t[1:]], "'w' has 4999 elements; the plan has 5000"),
        (lambda t: [t[0].astype("f2"), *t[1:]], "'w' has dtype float16; the plan has float32"),
        (lambda t: {"w": t[0], "e": t[1]}, "2 names given.*'b'"),
        (lambda t: {"w": t[0], "e": t[1], "x": t[2]}, "'b'"),
        (lambda t: t[0], "type ndarray; expected a list"),
        (lambda t: None, "NoneType"),
        (lambda t: [t[0].astype("f8"), *t[1:]], "tensor 'w' has dtype float64; allowed"),
    ],
)
def test_tensors_that_are_not_the_plans(plan, tensors, change, words):
    with pytest.raises(gradwire.UsageError, match=words):
        plan.encode(change(tensors))


@pytest.mark.parametrize(
    "entries, words",
    [
        (["w"], "expected .name, count"),
        ([("w",)], "expected"),
        ([("w", -1)], "count is -1"),
        ([("w", 1, "float64")], "float64; allowed"),
        ([("w", 1, "float32", "nope")], "nope"),
        ([("w", 1, "float32", "fp32", 5)], "first"),
        ([(1, 1)], "name is 1"),
    ],
)
def test_a_plan_that_cannot_be(entries, words):
    with pytest.raises(gradwire.UsageError, match=words):
        gradwire.Plan(entries)


# Error feedback.


def test_the_residual_is_the_difference_once_it_is_committed(tensors):
    plan = gradwire.Plan([("w", 5000, "float32", "onebit"), ("b", 10)])
    arrays = [tensors[0], tensors[2]]
    feedback = gradwire.ErrorFeedback()
    feedback.add_plan(plan)
    assert feedback.nbytes == 2 * 4 * 5000  # the lossless tensor has no residual
    before = feedback.hash()
    message = plan.encode(arrays, step=0, feedback=feedback)
    assert feedback.hash() == before and not feedback.residual("w").any()
    feedback.rollback(0)
    assert feedback.hash() == before
    assert plan.encode(arrays, step=0, feedback=feedback) == message
    feedback.commit(0)
    residual = feedback.residual("w")
    np.testing.assert_array_equal(residual, tensors[0] - plan.decode(message)[0])
    second = plan.encode(arrays, step=1, feedback=feedback)
    np.testing.assert_array_equal(
        plan.decode(second)[0], plan.decode(plan.encode([tensors[0] + residual, tensors[2]], step=1))[0]
    )


def test_what_was_sent_and_the_residual_add_up(tensors):
    plan = gradwire.Plan([("w", 5000, "float32", "topk:ratio=0.1")])
    feedback = gradwire.ErrorFeedback()
    feedback.add_plan(plan)
    sent = np.zeros(5000)
    for step in range(10):
        with feedback.step(step):
            sent += plan.decode(plan.encode(tensors[:1], step=step, feedback=feedback))[0]
    np.testing.assert_allclose(sent + feedback.residual("w"), 10 * tensors[0].astype("f8"), rtol=1e-5, atol=1e-5)


def test_a_loss_scale_leaves_the_residual_as_it_is(tensors):
    plan = gradwire.Plan([("w", 5000, "float32", "onebit")])
    plain, scaled = gradwire.ErrorFeedback(), gradwire.ErrorFeedback()
    for feedback, scale in ((plain, 1.0), (scaled, 1024.0)):
        feedback.add_plan(plan)
        with feedback.step(0):
            plan.encode([tensors[0] * np.float32(scale)], feedback=feedback, loss_scale=scale)
    np.testing.assert_array_equal(plain.residual("w"), scaled.residual("w"))
    for wrong in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(gradwire.UsageError, match="loss_scale"):
            plan.encode([tensors[0]], step=1, feedback=plain, loss_scale=wrong)


def test_an_exception_takes_the_step_back(tensors):
    plan = gradwire.Plan([("w", 5000, "float32", "onebit")])
    feedback = gradwire.ErrorFeedback()
    feedback.add_plan(plan)
    before = feedback.hash()
    with pytest.raises(KeyError):
        with feedback.step(0):
            plan.encode(tensors[:1], step=0, feedback=feedback)
            raise KeyError
    assert feedback.hash() == before
    with pytest.raises(gradwire.UsageError):  # wrong from the start: the step is not left open
        plan.encode(tensors[:1], step=0, feedback=feedback, out=np.empty(plan.nbytes + 4, "u1")[1:])
    with feedback.step(7):
        plan.encode(tensors[:1], step=7, feedback=feedback)
    assert feedback.hash() != before


def test_an_open_step_must_be_decided_first(tensors):
    plan = gradwire.Plan([("w", 5000, "float32", "onebit")])
    feedback = gradwire.ErrorFeedback()
    feedback.add_plan(plan)
    plan.encode(tensors[:1], step=0, feedback=feedback)
    for call in (
        lambda: plan.encode(tensors[:1], step=1, feedback=feedback),
        lambda: feedback.commit(1),
        lambda: feedback.save("never"),
    ):
        with pytest.raises(gradwire.UsageError, match="step 0 is open"):
            call()
    with pytest.raises(gradwire.UsageError, match="other numbers"):
        feedback.add("w", 4999)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_state_survives_a_file_and_another_world(dtype, tensors, tmp_path):
    plan = gradwire.Plan([("w", 5000, "float32", "onebit")])
    ranks = []
    for rank in range(4):
        feedback = gradwire.ErrorFeedback(dtype)
        feedback.add_plan(plan)
        with feedback.step(0):
            plan.encode([tensors[0] * np.float32(rank + 1)], rank=rank, world=4, feedback=feedback)
        feedback.save(tmp_path / f"{rank}.residual")
        ranks.append(gradwire.ErrorFeedback.load(tmp_path / f"{rank}.residual"))
        assert ranks[-1].hash() == feedback.hash()
    mean_residual = np.mean([rank.residual("w").astype("f8") for rank in ranks], axis=0)
    before = [rank.hash() for rank in ranks]
    for world in (3, 6):
        moved = gradwire.ErrorFeedback.redistribute(ranks, world)
        assert len(moved) == world
        found = np.mean([rank.residual("w").astype("f8") for rank in moved], axis=0)
        np.testing.assert_allclose(found, mean_residual, rtol=2**-23 if dtype == "float32" else 2**-8, atol=1e-30)
    assert [rank.hash() for rank in ranks] == before  # lent, not taken
    with pytest.raises(gradwire.UsageError, match="same state twice"):
        gradwire.ErrorFeedback.redistribute([ranks[0], ranks[0]], 2)
    with pytest.raises(gradwire.UsageError, match="new_world"):
        gradwire.ErrorFeedback.redistribute(ranks, 0)
    assert [rank.hash() for rank in ranks] == before


def test_a_file_that_is_missing_or_damaged(tmp_path):
    with pytest.raises(gradwire.FileError) as missing:
        gradwire.ErrorFeedback.load(tmp_path / "none")
    assert isinstance(missing.value, OSError) and missing.value.kind == "io"
    feedback = gradwire.ErrorFeedback()
    feedback.add("w", 100)
    feedback.save(tmp_path / "w")
    whole = (tmp_path / "w").read_bytes()
    (tmp_path / "w").write_bytes(whole[:-1])
    with pytest.raises(gradwire.FileError, match="the file has 487"):
        gradwire.ErrorFeedback.load(tmp_path / "w")
    (tmp_path / "w").write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(gradwire.FileError):
        gradwire.ErrorFeedback.load(tmp_path / "w")
    with pytest.raises(gradwire.UsageError, match="f16"):
        gradwire.ErrorFeedback("float16")
    with pytest.raises(gradwire.UsageError, match="direction is 'left'; allowed"):
        feedback.add("x", 1, direction="left")
    with pytest.raises(gradwire.UsageError):
        feedback.residual("unknown")
