# SPDX-License-Identifier: Apache-2.0
"""What a hook does where its buckets are recorded (test_recordings_cuda.py has the same on a GPU): here recordings, the
streams and NCCL are stand-ins on the CPU. While a stand-in records, the calls of coders and exchanges are noted with
their arguments and not done; to run it does what was noted. So a recording that holds what has changed since, an
address or a size, shows as wrong bits; and ranks that do not record in the same step hang.
"""

import contextlib
import threading

import pytest

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")

import gradwire
import gradwire.torch as gw
from gradwire import _core
from gradwire.torch import _ddp, _recordings, _task, _transport, _watch
from gradwire.torch._transport import Exchange, Transport
from ranks import eventually
from test_ddp import equal, network
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils._python_dispatch import TorchDispatchMode

CODECS = [info["example"] for info in gradwire.codecs() if not info["lossless"]]
NOTED = ("encode_up", "decode_up", "encode_down", "decode_down")


class Copies(TorchDispatchMode):
    """Notes copies of tensors, and does what makes views of them."""

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        if function is not torch.ops.aten.copy_.default:
            return function(*arguments, **(named or {}))
        Tape.open.calls.append((function, arguments))
        return arguments[0]


class Tape:
    """In place of _core.Recording."""

    open = None  # the one that records
    runs = 0

    def __init__(self, device):
        self.calls, self.copies = None, Copies()

    def begin(self):
        assert Tape.open is None
        Tape.open, self.calls = self, []
        self.copies.__enter__()

    def end(self):
        self.copies.__exit__(None, None, None)
        Tape.open = None

    def run(self):
        Tape.runs += 1
        for function, arguments in self.calls:
            function(*arguments)

    def forget(self):
        self.calls = None
        if Tape.open is self:
            self.end()


def noted(function):
    def call(*arguments):
        if Tape.open is None:
            return function(*arguments)
        Tape.open.calls.append((function, arguments))
        return None

    return call


class Coder:
    """A coder whose calls a tape notes."""

    def __init__(self, real):
        self._real = real

    def __getattr__(self, name):
        found = getattr(self._real, name)
        return noted(found) if name in NOTED else found


class Done:
    def wait(self):
        return True


class NoWatch:
    def __init__(self):
        self.steps = 0

    def step(self, stream):
        self.steps += 1

    def close(self):
        pass


def begin_noted(before):
    def begin(self, group):
        if Tape.open is None:
            return before(self, group)
        Tape.open.calls.append((lambda: before(self, group).wait(), ()))
        return Done()

    return begin


def works(self):
    self._watch = self._watch or NoWatch()
    return True


@contextlib.contextmanager
def stand_ins():
    """Transports made meanwhile believe that they are on streams of NCCL."""
    every = [
        (_transport, "runs_on_streams", lambda *_: True),
        (_ddp, "runs_on_streams", lambda *_: True),
        (_core, "Recording", Tape),
        (_recordings.Recorder, "works", works),
        (Exchange, "begin", begin_noted(Exchange.begin)),
        (_task.CodingTask, "coder", property(lambda self, real=_task.CodingTask.coder.fget: Coder(real(self)))),
    ]
    own_group = Transport._own_group
    every.append((Transport, "_own_group", lambda self, *given, on_host=True: own_group(self, *given, on_host=True)))
    before = [getattr(owner, name) for owner, name, _ in every[:4]] + [
        vars(owner)[name] for owner, name, _ in every[4:]
    ]
    for owner, name, value in every:
        setattr(owner, name, value)
    Tape.runs = 0
    try:
        yield
    finally:
        for (owner, name, _), value in zip(every, before):
            setattr(owner, name, value)


def recorded(hook):
    kept = [known.chunk.recordings for known in hook._known.values() if known.chunk is not None]
    return sum(len(one._recorded) for one in kept if one is not None)


def trained(rank, codec, steps, options, events=()):
    """Weights, hashes of the residuals and bytes, for each step; then how much was recorded and run."""
    torch.manual_seed(5)
    ddp = DDP(network(), process_group=rank.group, bucket_cap_mb=0.02)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=6) if "scaler" in events else None
    hook = gw.compress(ddp, codec, scaler=scaler, **options)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    course, most = [], 0
    for step in range(steps):
        if "codec" in events and step == 8:
            hook.set_codec("optquant:bits=3")
        if "state" in events and step == 14:
            hook.load_state_dict(hook.state_dict())
        if "again" in events and step == 20:
            hook.remove()
            hook = gw.compress(ddp, "onebit", scaler=scaler, **options)
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(10 * step + rank.rank))
        if "inf" in events and step == 7 and rank.rank == 0:
            x[0, 0] = float("inf")
        loss = ddp(x).square().mean()
        optimizer.zero_grad()
        if scaler is None:
            loss.backward()
            if not ("inf" in events and step == 7):
                optimizer.step()
        else:
            if step % 3 == 0:
                with ddp.no_sync():
                    scaler.scale(loss).backward(retain_graph=True)
            scaler.scale(ddp(x).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
        most = max(most, recorded(hook))
        stats = hook.stats()
        course.append((
            [p.detach().clone() for p in ddp.parameters()], hook.residual_hash(), stats["skipped"],
            stats["last_step"]["bytes"],
        ))  # fmt: skip
    hook.remove()
    return course, most


def both(rank, codec, steps, options, events=()):
    plain, _ = trained(rank, codec, steps, options, events)
    with stand_ins():
        taped, most = trained(rank, codec, steps, {**options, "cuda_graphs": True}, events)
        runs = Tape.runs
    for step, (a, b) in enumerate(zip(plain, taped)):
        assert equal(a[0], b[0]), f"weights after step {step}"
        assert a[1:] == b[1:], f"residuals, skipped steps or bytes of step {step}"
    return most, runs


@pytest.mark.parametrize("codec", CODECS)
def test_the_bits_of_every_codec(ranks, codec):
    for most, runs in ranks.run(2, both, codec, 10, {"feedback": True}):
        # A bucket has two recordings, one for each of its residual buffers.
        assert (most >= 2 and runs > 4) or gradwire.Codec(codec).learns


def courses(rank, codec, sizes, events):
    """For every bucket what was done with it in each step: run as it is, recorded, or run from a recording."""
    done = {}
    run = _recordings.Recordings.run

    def noting(recordings, task, work):
        kept = len(recordings._recorded)
        was_recorded = run(recordings, task, work)
        new = len(recordings._recorded) > kept
        done.setdefault(tuple(task.tensors), []).append("new" if new else "again" if was_recorded else "plain")
        return was_recorded

    torch.manual_seed(5)
    with stand_ins(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(_recordings.Recordings, "run", noting)
        layers = [torch.nn.Linear(a, b) for a, b in zip(sizes, sizes[1:])]
        ddp = DDP(torch.nn.Sequential(*layers), process_group=rank.group, bucket_cap_mb=0.02)
        hook = gw.compress(ddp, codec, min_elements=1, cuda_graphs=True)
        for step in range(36):
            if "state" in events and step == 7:
                hook.load_state_dict(hook.state_dict())
            if "scale" in events and step % 12 == 0:
                hook.set_loss_scale(2.0**step)
            x = torch.randn(4, sizes[0], generator=torch.Generator().manual_seed(100 * rank.rank + step))
            ddp(x).square().mean().backward()
            ddp.zero_grad()
        hook.remove()
    return done


@pytest.mark.parametrize("codec", ["qsgd:bits=4", "qsgd:bits=2", "optquant:bits=3,refit=6", "onebit"])
@pytest.mark.parametrize("events", [(), ("state",), ("scale",)])
def test_all_ranks_record_in_the_same_step(ranks, codec, events):
    """NCCL asks for it. There are buckets of which a rank owns nothing, so that it has no residuals there, and ones of
    which ranks own parts of different sizes."""
    first, *others = ranks.run(3, courses, codec, (40, 70, 700, 110, 3), events)
    for other in others:
        assert other == first
    done = [what for bucket in first.values() for what in bucket]
    assert {"plain", "new", "again"} <= set(done)


@pytest.mark.parametrize("method", ["scatter", "gather"])
@pytest.mark.parametrize("feedback", [True, False])
def test_methods_and_feedback(ranks, method, feedback):
    for most, runs in ranks.run(3, both, "qsgd:bits=4", 8, {"method": method, "feedback": feedback}):
        assert most > 0 and runs > 2


def test_whatever_changes_between_steps(ranks):
    for most, runs in ranks.run(2, both, "qsgd:bits=2", 28, {"feedback": True}, ("scaler", "codec", "state", "again")):
        assert most > 1 and runs > 10


def test_a_step_with_an_inf_a_warm_up_and_measured_steps(ranks):
    options = {"feedback": True, "warmup": 3, "measure_every": 5}
    for most, runs in ranks.run(2, both, "qsgd:bits=2", 20, options, ("inf",)):
        assert most > 1 and runs > 10


def test_tables_are_learned_between_recorded_steps(ranks):
    for most, runs in ranks.run(2, both, "optquant:bits=3,refit=9", 32, {}):
        assert most > 1 and runs > 10


def long_training(rank):
    """A thousand steps: a recording is used again and again, and there are never more than are kept."""
    most, runs = both(rank, "optquant:bits=2,refit=60", 1000, {"feedback": True})
    return most, runs


def test_a_long_training(ranks):
    for most, runs in ranks.run(2, long_training):
        assert runs > 1500 and most <= 3 * _recordings.KEPT


WAYS = {
    "Adam": ("onebit", {"optimizer": None, "warmup": 6}, {}),
    "Adam, learning": ("optquant:bits=2,refit=7", {"optimizer": None, "warmup": 6}, {}),
    "guard": ("qsgd:bits=2", {"guard": 1e-9, "measure_every": 5}, {}),
    "unused": ("qsgd:bits=4", {"feedback": True}, {"find_unused_parameters": True}),
    "static": ("qsgd:bits=4", {"feedback": True}, {"static_graph": True}),
    "views": ("qsgd:bits=4", {"feedback": True}, {"gradient_as_bucket_view": True}),
}


def trained_in_a_way(rank, way, graphs):
    codec, options, settings = WAYS[way]
    torch.manual_seed(5)
    ddp = DDP(network(), process_group=rank.group, bucket_cap_mb=0.02, **settings)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
    options = {name: optimizer if name == "optimizer" else value for name, value in options.items()}
    hook = gw.compress(ddp, codec, **options, **({"cuda_graphs": True} if graphs else {}))
    course, most = [], 0
    for step in range(26):
        optimizer.zero_grad(set_to_none=way != "views")
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(10 * step + rank.rank))
        ddp(x).square().mean().backward()
        optimizer.step()
        course.append(([p.detach().clone() for p in ddp.parameters()], hook.residual_hash()))
        most = max(most, recorded(hook))
    hook.remove()
    return course, most


def both_in_a_way(rank, way):
    plain, _ = trained_in_a_way(rank, way, False)
    with stand_ins():
        taped, most = trained_in_a_way(rank, way, True)
    for step, (a, b) in enumerate(zip(plain, taped)):
        assert equal(a[0], b[0]) and a[1] == b[1], f"step {step}"
    return most


@pytest.mark.parametrize("way", WAYS)
def test_ways_to_train(ranks, way):
    for most in ranks.run(2, both_in_a_way, way):
        assert (most == 0) == (way == "unused")  # which parameters are unused is asked in every step


def fails(rank):
    """The coder of one rank fails while it is recorded."""
    with stand_ins():
        ddp = DDP(network(), process_group=rank.group)
        hook = gw.compress(ddp, "qsgd:bits=4", cuda_graphs=True, timeout=5)
        x = torch.ones(4, 64)
        for _ in range(2):
            ddp(x).sum().backward()
        broken = Coder.__getattr__
        words = []
        Coder.__getattr__ = lambda self, name: 1 / 0 if name == "encode_down" else broken(self, name)
        try:
            for _ in range(3):
                try:
                    ddp(x).sum().backward()
                except Exception as error:
                    words.append(str(error))
        finally:
            Coder.__getattr__ = broken
        assert Tape.open is None
        return words, recorded(hook)


def test_what_fails_while_it_is_recorded_fails_the_hook(ranks):
    for words, kept in ranks.run(1, fails):
        assert len(words) == 3 and "division by zero" in words[0] and kept == 0


def refused(rank, make):
    """On a CPU there is nothing to record; and ranks must agree."""
    ddp = DDP(network(), process_group=rank.group)
    if make == "other":
        with stand_ins(), pytest.raises(gradwire.Error) as caught:
            gw.compress(ddp, "qsgd:bits=4", cuda_graphs=rank.rank == 1)
    else:
        with pytest.raises(gradwire.UnsupportedError) as caught:
            gw.compress(ddp, "lowrank" if make == "lowrank" else "qsgd:bits=4", cuda_graphs=True)
    return str(caught.value), caught.value.field


def test_where_it_does_not_work_it_is_refused_by_name(ranks):
    for make in ("qsgd:bits=4", "lowrank", "other"):
        for words, field in ranks.run(2, refused, make):
            assert "cuda_graphs" in words and field == "cuda_graphs", words


# The watch.


class Event:
    passed = True

    def record(self, stream):
        pass

    def query(self):
        return self.passed


class Group:
    def __init__(self):
        self.aborted = threading.Event()

    def abort(self):
        self.aborted.set()


class Owner:
    def __init__(self):
        self.errors = []

    def lost(self, error):
        self.errors.append(error)


def test_the_watch_aborts_a_group_whose_exchanges_do_not_end(monkeypatch):
    monkeypatch.setattr(_watch.torch.cuda, "Event", Event)
    monkeypatch.setattr(Event, "passed", False)
    owner, group = Owner(), Group()
    watch = _watch.Watch(group, 0.4, 3, owner.lost)
    watch.step(None)
    assert eventually(group.aborted.is_set)
    assert len(owner.errors) == 1 and owner.errors[0].field == "timeout" and "rank 3" in str(owner.errors[0])
    watch.close()
    assert eventually(lambda: not watch._thread.is_alive())


def test_the_watch_lets_steps_pass(monkeypatch):
    monkeypatch.setattr(_watch.torch.cuda, "Event", Event)
    owner, group = Owner(), Group()
    watch = _watch.Watch(group, 0.2, 0, owner.lost)
    for _ in range(3):
        watch.step(None)
    assert eventually(lambda: not watch._under_way)
    watch._over.wait(0.5)
    assert not owner.errors and not group.aborted.is_set()
    watch.close()
    assert eventually(lambda: not watch._thread.is_alive())
