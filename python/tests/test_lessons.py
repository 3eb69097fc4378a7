# SPDX-License-Identifier: Apache-2.0
"""What codecs learn is learned by a thread while the training goes on, under DDP, FSDP2 and between replicas, and
nobody can tell: the bits are those of a training that learns within its steps, whatever a user asks a hook, it answers
as if the thread had been there already, and a thread that fails or must end does not hang.
"""

import contextlib
import gc
import threading

import pytest

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")
pytest.importorskip("test_hsdp", reason="this torch has no Gloo or no set_custom_reduce_scatter")

import gradwire
import gradwire.torch as gw
from gradwire.torch import _transport
from gradwire.torch._fsdp import hook_of
from gradwire.torch._lessons import Lessons
from gradwire.torch._transport import Transport
from ranks import eventually
from test_fsdp import Net, batch, sharded
from test_hsdp import made, need_mesh
from torch.nn.parallel import DistributedDataParallel as DDP

# How a model is trained: the mesh it needs, if any. Between replicas and within them at once: "mesh".
KINDS = {"ddp": None, "shards": None, "replicas": (3,), "mesh": (2, 3)}
OFTEN, ALWAYS = "optquant:bits=3,refit=3", "dqsgd:budget=3"  # how often they learn


def run(ranks, kind, function, *arguments):
    if KINDS[kind]:
        need_mesh(ranks, KINDS[kind])
    return ranks.run(torch.Size(KINDS[kind] or (2,)).numel(), function, kind, *arguments)


def model_of(rank, kind, codec=OFTEN, seed=3):
    """A model that computes what it can without other ranks, and its hook."""
    torch.manual_seed(seed)
    if kind == "ddp":
        model = DDP(Net(), process_group=rank.group, bucket_cap_mb=0.02)
        return model, gw.compress(model, codec, min_elements=0)
    if kind == "shards":
        model = sharded(rank, reshard_after_forward=False)
        return model, gw.compress(model, codec, min_elements=0)
    if kind == "replicas":
        model = made(rank, KINDS[kind], Net())
        return model, gw.compress(model, codec, min_elements=0)
    model = made(rank, KINDS[kind], Net(), reshard_after_forward=False)
    return model, gw.compress(model, codec, min_elements=0, gradients=codec)


def step(rank, model, number):
    x, y = batch(rank, number)
    (model(x) - y).square().mean().backward()


def weights(model):
    return [(p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone() for p in model.parameters()]


def learned(hook):
    """Of this rank, and of its shard dimension too."""
    state = hook.state_dict()
    return {
        name: bytes(values.numpy())
        for part in [state, state.get("shards", {"learned": {}})]
        for name, values in part["learned"].items()
    }


@contextlib.contextmanager
def patched(owner, name, other):
    before = getattr(owner, name)
    setattr(owner, name, other(before))
    try:
        yield
    finally:
        setattr(owner, name, before)


def within_steps():
    """Learning as it is without a thread: at once, one coder after the other, over the training's own process group."""

    def at_once(self, models, transport, put):
        for model in models:
            stats = model.stats()
            if stats is None:
                continue
            mine = torch.frombuffer(bytearray(stats), dtype=torch.uint8)
            every = [torch.empty_like(mine) for _ in range(dist.get_world_size(transport.group))]
            dist.all_gather(every, mine, group=transport.group)
            model.learn(bytes(torch.cat(every).numpy()))

    return patched(Lessons, "begin", lambda begin: at_once)


# The bits.


def trains(rank, kind, codec, steps, alone):
    """With SGD; every fourth step is one of two micro-batches. alone: without a thread."""
    with within_steps() if alone else contextlib.nullcontext():
        model, hook = model_of(rank, kind, codec)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        for number in range(steps):
            if number % 4 == 0:
                if kind == "ddp":
                    with model.no_sync():
                        step(rank, model, 1000 + number)
                else:
                    model.set_requires_gradient_sync(False)
                    step(rank, model, 1000 + number)
                    model.set_requires_gradient_sync(True)
            step(rank, model, number)
            optimizer.step()
            optimizer.zero_grad()
        found = [w.numpy().tobytes() for w in weights(model)]
        return found, learned(hook), hook.residual_hash(), hook.stats()["skipped"]


@pytest.mark.parametrize(
    "kind, codec, steps",
    [
        ("ddp", f"*.weight={OFTEN};*={ALWAYS}", 60),
        ("shards", f"blocks.*={OFTEN};*={ALWAYS}", 60),
        ("shards", ALWAYS, 300),
        ("replicas", f"*.weight={OFTEN};*={ALWAYS}", 200),
        ("mesh", OFTEN, 20),
        ("mesh", ALWAYS, 20),
    ],
)
def test_a_training_has_the_bits_of_one_that_learns_within_its_steps(ranks, kind, codec, steps):
    with_thread, alone = (run(ranks, kind, trains, codec, steps, alone) for alone in (False, True))
    assert with_thread == alone
    first, *others = with_thread
    assert first[1], "something was learned"
    for one in others:
        assert one[0] == first[0] and one[3] == 0
        assert kind == "mesh" or one[1] == first[1]  # the ranks of a mesh have other shards, which learn for themselves


def both(rank, kind, places):
    """Models with their backward passes one into the other."""
    models = [model_of(rank, kind, ALWAYS, seed)[0] for seed in places]
    hooks = [hook_of(model) for model in models]
    for number in range(12):
        x, y = batch(rank, number)
        torch.stack([(model(x) - y).square().mean() for model in models]).sum().backward()
        with torch.no_grad():
            for model in models:
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad
                model.zero_grad()
    return [([w.numpy().tobytes() for w in weights(model)], hook.residual_hash()) for model, hook in zip(models, hooks)]


@pytest.mark.parametrize("kind", ["shards", "replicas"])
def test_models_that_learn_at_the_same_time_learn_what_they_learn_alone(ranks, kind):
    alone = [run(ranks, kind, both, [place]) for place in range(2)]
    for rank, found in enumerate(run(ranks, kind, both, [0, 1])):
        assert found == [alone[place][rank][0] for place in range(2)]


# Questions while the thread is at work.


@contextlib.contextmanager
def held():
    """Each thread that learns is held until somebody waits for it, and a backward pass does not. Yields what is to be
    called when one is over, and a list of the transports whose threads came."""
    is_over, asked, came = threading.Event(), {}, []

    def pool(before):
        def pool_when_asked(self, mine):
            came.append(self)
            assert asked.setdefault(id(self), threading.Event()).wait(20), "nobody waits"
            return before(self, mine)

        return pool_when_asked

    def wait(before):
        def wait_and_tell(self):
            if is_over.is_set():
                asked.setdefault(id(self._transport), threading.Event()).set()
            before(self)

        return wait_and_tell

    with patched(Transport, "pool_bytes", pool), patched(Lessons, "wait", wait):
        yield is_over.set, came


def change_codec(hook, kind, codec):
    hook.set_codec(codec, **({"gradients": codec} if kind == "mesh" else {}))


def asks(rank, kind, alone):
    """What a hook answers after each of some steps."""
    model, hook = model_of(rank, kind, ALWAYS)
    step(rank, model, 0)
    first, every = hook.state_dict(), [None] * rank.world
    dist.all_gather_object(every, first, group=rank.group)
    known = learned(hook)
    questions = [
        lambda: learned(hook),
        lambda: hook.residual_hash(),
        lambda: [hook.stats()["plan"], hook.stats().get("shards", {}).get("plan")],
        lambda: (change_codec(hook, kind, ALWAYS), learned(hook)),
        lambda: (step(rank, model, 100), learned(hook)),
        lambda: (hook.load_state_dict(first), learned(hook)),
        lambda: (hook.load_state_dict(every), learned(hook)),
    ]
    answers = []
    for number, question in enumerate(questions, 1):
        with within_steps() if alone else contextlib.nullcontext(), held() as (backward_is_over, came):
            step(rank, model, number)
            backward_is_over()
            answers.append(question())
        assert alone or came, "nothing was learned"
    assert answers[-1] == answers[-2] == (None, known), "what a state has, each rank has again"
    return answers


@pytest.mark.parametrize("kind", KINDS)
def test_no_step_waits_for_what_is_learned_and_every_answer_does(ranks, kind):
    assert run(ranks, kind, asks, False) == run(ranks, kind, asks, True)


# Ends.


def fails(rank, kind):
    model, hook = model_of(rank, kind, ALWAYS)
    step(rank, model, 0)
    hook.residual_hash()  # the thread has learned from this step
    last = rank.rank == rank.world - 1

    def no_room(before):
        def pool_and_fail(self, mine):
            every = before(self, mine)
            if last:
                raise MemoryError("no room for a table")
            return every

        return pool_and_fail

    words = []
    with patched(Transport, "pool_bytes", no_room):
        step(rank, model, 1)
        with pytest.raises(gradwire.Error) if last else contextlib.nullcontext():
            hook.residual_hash()
    if last:
        for ask in (lambda: step(rank, model, 2), hook.state_dict):
            with pytest.raises(Exception) as caught:
                ask()
            words.append(str(caught.value))
    else:
        model(batch(rank, 2)[0])  # which some models need other ranks for
    hook.remove()
    return words


@pytest.mark.parametrize("kind", KINDS)
def test_the_next_step_raises_what_has_failed_in_the_thread(ranks, kind):
    *others, last = run(ranks, kind, fails)
    assert not any(others)
    assert len(last) == 2 and all("no room for a table" in words for words in last)


def threads():
    return {thread for thread in threading.enumerate() if thread.name.startswith("gradwire learn")}


def leaves(rank, kind, removes):
    before = threads()
    model, hook = model_of(rank, kind, ALWAYS)
    step(rank, model, 0)
    mine, with_hook = threads() - before, learned(hook)
    if removes:
        hook.remove()
        assert learned(hook) == with_hook
    del model, hook
    return len(mine), eventually(lambda: gc.collect() >= 0 and not mine & threads())


@pytest.mark.parametrize("removes", [True, False])
def test_the_thread_ends_with_the_hook(ranks, removes):
    assert run(ranks, "shards", leaves, removes) == [(1, True)] * 2


# The group for learning, where all else is on streams.


def learns_on_streams(rank):
    """As with NCCL, on groups of Gloo: the threads in which groups were made, what lessons have got, and what a hook
    without prepare_lessons is told."""
    made_in = []

    def noting(own_group):
        def on_host(self, name, rank, world, timeout, on_host=False):
            made_in.append(threading.current_thread() is threading.main_thread())
            return own_group(self, name, rank, world, timeout, True)

        return on_host

    got = []
    with patched(_transport, "runs_on_streams", lambda before: lambda *_: True):
        with patched(Transport, "_own_group", noting):
            transport = Transport.acquire(rank.group, torch.device("cpu"), None, purpose="a test")
            transport.prepare_lessons()
            transport.prepare_lessons()  # of another hook on this transport
            for lesson in range(3):
                transport.in_turn(lambda lesson=lesson: got.append(transport.pool_bytes(bytes([lesson, rank.rank]))))
            assert eventually(lambda: len(got) == 3)
            transport.check()
            transport.release()
    return made_in, got


def test_the_group_for_learning_is_made_by_the_thread_that_trains(ranks):
    every = [bytes([lesson, 0, lesson, 1, lesson, 2]) for lesson in range(3)]
    assert ranks.run(3, learns_on_streams) == [([True, True], every)] * 3


def prepares(rank, kind):
    """How often a hook has prepared a transport for lessons: at first, and after each change of codecs."""
    prepared, counts = [], []
    with patched(Transport, "prepare_lessons", lambda before: lambda self: (prepared.append(self), before(self))):
        _, hook = model_of(rank, kind, "qsgd:bits=4")
        counts.append(len(prepared))
        hook.set_codec("optquant:bits=3")
        counts.append(len(prepared))
        hook.set_codec("qsgd:bits=4")
        counts.append(len(prepared))
        hook = model_of(rank, kind)[1]
        counts.append(len(prepared))
    return counts


@pytest.mark.parametrize("kind", ["ddp", "replicas", "mesh"])
def test_a_hook_prepares_for_lessons_when_its_codec_learns(ranks, kind):
    assert all(counts == [0, 1, 1, 2] for counts in run(ranks, kind, prepares))


def loads(rank, kind):
    """Two hooks, one of which loads the state of the other: how often they have prepared for lessons. Nothing learns
    in Adam's warm-up here, in which a hook begins."""
    prepared, counts = [], []
    with patched(Transport, "prepare_lessons", lambda before: lambda self: (prepared.append(self), before(self))):
        for steps in (4, 0):
            model, plain = model_of(rank, kind, "qsgd:bits=4")
            plain.remove()
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            hook = gw.compress(model, OFTEN, optimizer=optimizer, warmup=2, down="qsgd:bits=4", min_elements=0)
            for number in range(steps):
                step(rank, model, number)
                optimizer.step()
                optimizer.zero_grad()
            if steps:
                state = hook.state_dict()
            else:
                hook.load_state_dict(state)
            counts.append((len(prepared), hook._learns))
            hook.remove()
    return counts


@pytest.mark.parametrize("kind", ["ddp", "replicas"])
def test_a_state_of_a_later_phase_prepares_for_lessons_too(ranks, kind):
    for found in run(ranks, kind, loads):
        assert found == [(1, True), (2, True)]
