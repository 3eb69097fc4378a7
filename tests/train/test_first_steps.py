# SPDX-License-Identifier: Apache-2.0
"""Many processes, two workers, two steps: every process must end with the same weights.

Two workers that are threads make the first call of every function of a library at the same moment. A library that sets
itself up at its first call without a lock then answers wrongly by chance, once in dozens of processes and never twice
in one (docs/decisions.md), so the only way to find it is to start many. $GRADWIRE_PROCESSES says how many; `make
test-long` starts 200.
"""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

import train_fixture as fixture

PROCESSES = int(os.environ.get("GRADWIRE_PROCESSES", 40))
AT_ONCE = 2

KINDS = {  # of four processes one each
    "adamw": ["text.txt", "--task", "text", "--model", "gpt:layers=1,width=32,heads=2", "--length", 16, "--rate", 0.01],
    "adam": ["ag-news", "--task", "ag-news", "--model", "bilstm:embedding=8,hidden=8", "--length", 12],
    "sgd": ["idx", "--model", "cnn:width=2"],
    "qadam": ["idx", "--model", "mlp:width=16,depth=1", "--optimizer", "qadam"],
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    fixture.make_idx(folder / "idx", train=64, test=16)
    fixture.make_ag_news(folder / "ag-news")
    fixture.make_text(folder / "text.txt", characters=3000)
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_every_process_ends_with_the_same_weights(data, kind):
    place, *rest = KINDS[kind]
    arguments = ["--data", data / place, *rest, "--workers", 2, "--threads", 1, "--batch", 4, "--steps", 2, "--limit",
                 32, "--check"]
    runs = PROCESSES * (5 if kind == "adamw" else 1) // 8  # most of them where the fault was
    with ThreadPoolExecutor(AT_ONCE) as pool:
        weights = set(pool.map(lambda _: fixture.train(*arguments).weights, range(runs)))
    assert len(weights) == 1, weights
