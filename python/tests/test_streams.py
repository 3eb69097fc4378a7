# SPDX-License-Identifier: Apache-2.0
"""What buckets owe the streams of a GPU, seen on the CPU: on which stream a result is announced, and when a bucket that
is not needed any longer goes.
"""

import contextlib
import gc
import threading
import weakref

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("test_hsdp", reason="this torch has no Gloo or no set_custom_reduce_scatter")

from gradwire.torch._chunks import Chunk
from test_lessons import model_of, patched, run, step


def completes(rank, kind):
    """Where the thread is when it completes what DDP or FSDP waits for: 1 on the stream of the bucket."""
    here, found = threading.local(), []

    @contextlib.contextmanager
    def on(self):
        here.depth = getattr(here, "depth", 0) + 1
        try:
            yield
        finally:
            here.depth -= 1

    def noting(before):
        def set_result(self, result):
            found.append(getattr(here, "depth", 0) > 0)
            before(self, result)

        return set_result

    with patched(Chunk, "on_stream", lambda before: on), patched(torch.futures.Future, "set_result", noting):
        model, _ = model_of(rank, kind)
        for number in range(3):
            step(rank, model, number)
    return found


@pytest.mark.parametrize("kind", ["ddp", "replicas"])
def test_results_are_announced_on_the_stream_that_has_made_them(ranks, kind):
    """With Gloo on a GPU whoever waits for a future waits for the stream on which it was completed."""
    for found in run(ranks, kind, completes):
        assert found and all(found)


def drops(rank):
    model, hook = model_of(rank, "ddp")
    step(rank, model, 0)
    chunks = [weakref.ref(chunk) for chunk in hook._chunks.values()]
    gc.collect()
    gc.disable()
    try:
        hook.set_codec("qsgd:bits=2")
        step(rank, model, 1)
        return [chunk() is None for chunk in chunks]
    finally:
        gc.enable()


def test_a_bucket_that_is_dropped_goes_at_once(ranks):
    """It has a runner, which waits for the GPU when it goes. Python's collector would do that at any time."""
    for gone in ranks.run(1, drops):
        assert gone and all(gone)
