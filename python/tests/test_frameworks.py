# SPDX-License-Identifier: Apache-2.0
"""gradwire in Lightning, in transformers' Trainer and in accelerate: a training that was killed and resumed from the
framework's own checkpoint ends with the weights, and with the residuals of every rank, of one that was never stopped.
framework_ranks.py has the trainings. `make test-frameworks` installs the frameworks and runs these tests; elsewhere
those that need a framework are skipped.
"""

import importlib.util
import sys
import types
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import gradwire  # noqa: E402
import gradwire.torch as gw  # noqa: E402
from gradwire.torch import _unwrap, _versions  # noqa: E402

SCRIPT = Path(__file__).with_name("framework_ranks.py")


@pytest.fixture(scope="module", params=["lightning", "transformers", "accelerate"])
def trained(request, tmp_path_factory):
    """What both ranks have found."""
    for package in (request.param, "accelerate") if request.param == "transformers" else (request.param,):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed; make test-frameworks installs it and runs this test")
    from warm_python import Warm

    folder = tmp_path_factory.mktemp(request.param)
    environment = {"HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore", "CUDA_VISIBLE_DEVICES": ""}
    with Warm([str(SCRIPT), request.param, str(folder)], environment, str(folder)) as process:
        code, out, err = process.communicate(900)  # seconds, on a busy machine
    assert code == 0, (out + err).decode()[-4000:]
    found = [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]
    return found, [torch.load(folder / f"grown_{rank}.pt") for rank in range(3)]


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a["weights"], b["weights"], strict=True))


def test_a_resumed_training_is_the_one_that_was_never_stopped(trained):
    ranks, _ = trained
    for rank in ranks:
        assert rank["whole"]["step"] == rank["resumed"]["step"] == 6
        assert same(rank["resumed"], rank["whole"])
        assert rank["resumed"]["hash"] == rank["whole"]["hash"]
        assert rank["warnings"] == []
        assert rank["whole"]["stats"]["optimizer"]["exchange"] == "momentum"  # the framework's optimizer was found
    assert same(ranks[0]["whole"], ranks[1]["whole"])
    assert ranks[0]["whole"]["hash"] != ranks[1]["whole"]["hash"]  # each rank has its own residuals


def residuals(state):
    """Those of the one rank that a state is of."""
    (part,) = state["ranks"].values()
    return part["up"]


def test_the_checkpoint_has_the_residuals_of_every_rank(trained):
    saved = trained[0][0]["saved"]
    assert [list(state["ranks"]) for state in saved] == [["0"], ["1"]]
    first, second = map(residuals, saved)
    assert first.keys() == second.keys() == {f"{prefix(first)}0.weight", f"{prefix(first)}2.weight"}
    assert all(bool(first[name].any()) and not torch.equal(first[name], second[name]) for name in first)


def prefix(named):
    """What a framework's own module puts in front of the names."""
    return "net." if "net.0.weight" in named else ""


def test_another_number_of_ranks_begins_with_the_mean_of_the_residuals(trained):
    saved, grown = [residuals(state) for state in trained[0][0]["saved"]], trained[1]
    for rank, state in enumerate(grown):
        assert state["world"] == 3 and list(state["ranks"]) == [str(rank)] and state["step"] == 2
        for name, values in residuals(state).items():
            assert torch.allclose(values, (saved[0][name] + saved[1][name]) / 2, rtol=1e-6, atol=1e-9)


def test_without_its_state_a_training_goes_on_and_says_so(trained):
    """The rival: what frameworks save by themselves. It ends elsewhere, so the comparison above means something."""
    for rank in trained[0]:
        assert rank["stripped"]["step"] == 4
        assert not same(rank["stripped"], rank["whole"])
        assert len(rank["stripped warnings"]) == 1 and "residuals begin at zero" in rank["stripped warnings"][0]


# Without any framework, on a rank, because torch is imported there already.


def wrapper(name, module, *bases, **values):
    return type(name, bases or (object,), {"__module__": module, **values})


def unwrapped(_):
    adam = torch.optim.Adam([torch.nn.Parameter(torch.zeros(2))])
    for name, module in (
        ("AcceleratedOptimizer", "accelerate.optimizer"),
        ("LightningOptimizer", "lightning.pytorch.core.optimizer"),
        ("LightningOptimizer", "pytorch_lightning.core.optimizer"),
        ("_FabricOptimizer", "lightning.fabric.wrappers"),
    ):
        outer = wrapper(name, module)()
        outer.optimizer = adam
        assert _unwrap.optimizer_inside(outer) is adam
        outer.optimizer = None
        with pytest.raises(gradwire.UnsupportedError, match="pass the torch optimizer"):
            _unwrap.optimizer_inside(outer)
    scaled = wrapper("AcceleratedOptimizer", "accelerate.optimizer", optimizer=adam, scaler=object())()
    with pytest.raises(gradwire.UnsupportedError, match="'bf16'"):
        _unwrap.optimizer_inside(scaled)
    foreign = wrapper("Lookahead", "somewhere", optimizer=adam)()
    assert _unwrap.optimizer_inside(foreign) is foreign  # its step may differ from Adam's


def told(_):
    accelerator = wrapper("Accelerator", "accelerate.accelerator")()
    with pytest.raises(gradwire.UsageError, match="model is a Accelerator; pass what its prepare"):
        gw.compress(accelerator, "fp32")
    adam = torch.optim.Adam([torch.nn.Parameter(torch.zeros(2))])
    with pytest.raises(gradwire.UsageError, match="the optimizer Adam; the model comes first"):
        gw.compress(adam, "fp32")
    compiled = torch.compile(torch.nn.Linear(2, 2))
    with pytest.raises(gradwire.UsageError, match="OptimizedModule around a Linear that is not distributed"):
        gw.compress(compiled, "fp32")
    module = wrapper("LightningModule", "lightning.pytorch.core.module", torch.nn.Module)
    mine = type("Mine", (module,), {})()
    with pytest.raises(gradwire.UsageError, match="LightningModule Mine, which no Trainer has wrapped"):
        gw.compress(mine, "fp32")
    mine._trainer = types.SimpleNamespace(strategy=types.SimpleNamespace(model=mine))
    with pytest.raises(gradwire.UsageError, match="in the strategy SimpleNamespace.*strategy='ddp'"):
        gw.compress(mine, "fp32")


@pytest.mark.parametrize("function", [unwrapped, told])
def test_what_frameworks_hand_over_is_recognised_or_named(ranks, function):
    ranks.run(1, function)


def test_frameworks_without_what_is_needed_are_refused(monkeypatch):
    old = types.ModuleType("accelerate")
    old.__version__ = "0.1"
    monkeypatch.setitem(sys.modules, "accelerate", old)
    from gradwire.torch.accelerate import attach

    with pytest.raises(
        gradwire.UnsupportedError,
        match="accelerate 0.1 has no SimpleNamespace.register_save_state_pre_hook.*pip install --upgrade accelerate",
    ):
        attach(types.SimpleNamespace(), None, "fp32")
    with pytest.raises(ModuleNotFoundError, match="needs nosuch_package, which is not installed: pip install nosuch"):
        _versions.framework(("nosuch_package",), "gradwire.torch.nosuch")


def test_a_torch_that_does_not_suffice_is_named():
    for version in ("1.13.1", "2.0.0+cu118"):
        with pytest.raises(gradwire.UnsupportedError, match="is too old.*needs 2.1.*pip install --upgrade torch"):
            _versions.check_torch(version)
    for version in ("2.1.0", "2.13.0+cpu", "3.0.0a0+git123", "10.2"):
        _versions.check_torch(version)
    missing = ImportError("cannot import name 'x' from 'torch.optim'", name="torch.optim")
    with pytest.raises(gradwire.UnsupportedError, match="torch 2.2.0 lacks what gradwire.torch needs .cannot import"):
        _versions.refuse_torch("2.2.0", missing)
    _versions.refuse_torch("2.2.0", ImportError("no", name="numpy"))  # is left to whoever caught it
