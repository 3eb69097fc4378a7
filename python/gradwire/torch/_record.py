# SPDX-License-Identifier: Apache-2.0
"""A user's own training as a record that `gradwire report` reads: run.json, with the fields that docs/training.md lists
under "The record of a run". `gradwire train` writes the same file. docs/records.md is the guide.

    with gw.Record("runs/mine", hook, task="my data", batch=64, optimizer="adamw", rate=3e-4) as record:
        for epoch in range(epochs):
            for batch in loader:
                ...
                record.step(loss=loss)
            record.evaluate(accuracy=accuracy, loss=test_loss)

    $ gradwire report runs/*                             # writes report.html
"""

from __future__ import annotations

import datetime
import json
import math
import os
import platform
import time
import warnings
from pathlib import Path
from typing import Any, Mapping

import torch
import torch.distributed as dist

from .. import _core
from .._errors import FileError, UnsupportedError, UsageError
from .._whole_file import replacing
from ._ddp import DdpHook
from ._hook import Hook
from ._record_settings import check_number, checked
from ._replicas import ReplicaHook

_BITS_EVERY = 50  # steps between two looks at the bits of a hook, each of which waits for the GPU
_KINDS = ("wall", "compute", "encode", "wait", "decode")


class Record:
    """The record of one training. Rank 0 writes it, after every evaluation; on the other ranks all calls do nothing.

    folder: run.json is written into it. hook: what `compress` has returned; bytes, bits, seconds and the codec come
    from it. None: an uncompressed training ("fp32"), whose bytes are those of a ring all-reduce of `model`.
    resume: True goes on with the record that the folder has, if it has one, from its last evaluation on. A number of
    steps does the same, and drops evaluations after that step: what a checkpoint of that step does not contain either.
    False refuses an existing record.

    about: what else the report shows and sorts by. Runs that differ in nothing but `seed` form one row, and two runs
    that differ in nothing are refused by the report.
        task, optimizer, schedule: words of your own. model: a name, or the module itself. batch: of one rank.
        seed, rate: numbers. metric: what runs are compared by: "accuracy", "loss" or "perplexity"; default: accuracy if
        the first evaluation has one, else loss.
        codec, engine, device, machine, collective, command, workers, parameters: found out if they are not given.
    """

    def __init__(
        self, folder: "str | os.PathLike[str]", hook: Hook | None = None, *, resume: bool | int = False, **about: Any
    ) -> None:
        if isinstance(hook, Hook) and not isinstance(hook, (DdpHook, ReplicaHook)):
            raise UnsupportedError(
                f"hook is a {type(hook).__name__}; the report compares bytes with those of an all-reduce, which FSDP2 "
                "with one dimension does not send, so only hooks for DDP and for replicas can be recorded",
                field="hook",
            )
        if hook is not None and not isinstance(hook, Hook):
            raise UsageError(f"hook is of type {type(hook).__name__}; expected what compress returns", field="hook")
        self.path = Path(folder) / "run.json"
        self._hook = hook
        group = hook._group if isinstance(hook, DdpHook) else None
        self._writes = not dist.is_initialized() or dist.get_rank(group) == 0
        self._about, self._metric = checked(about, hook)
        if not isinstance(resume, int) or resume < 0:
            raise UsageError(f"resume is {resume!r}; allowed are True, False and a number of steps", field="resume")
        self._record: dict[str, Any] = {}
        self._steps, self._closed = 0, False
        self._loss, self._accuracy = _Mean(), _Mean()  # since the last evaluation
        self._since = 0  # steps since then
        self._bits: list[float] = []
        self._before = dict.fromkeys(_KINDS, 0.0) | {"bytes": 0.0, "skipped": 0}  # of runs that this one goes on with
        self._wall = 0.0
        if self._writes:
            self._sent_before = self._totals()  # a hook may have taken steps that are no part of the record
            self._record = self._beginning()
            if self.path.exists():
                if resume is False:
                    raise FileError(
                        f"{self.path} exists; say resume=True to go on with it, or choose another folder",
                        field="folder",
                    )
                self._go_on(_read(self.path), None if resume is True else resume)
            self.path.parent.mkdir(parents=True, exist_ok=True)
        self._clock = time.perf_counter()

    def __enter__(self) -> "Record":
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        self.close(finished=kind is None)

    def step(self, loss: Any = None, accuracy: Any = None) -> None:
        """After each step of the optimizer. loss and accuracy: of its batch, numbers or tensors; their means become
        those of training. A tensor is not read before the next evaluation, so the host need not wait for it."""
        self._check_open()
        if not self._writes:
            return
        now = time.perf_counter()
        self._wall, self._clock = self._wall + now - self._clock, now
        self._steps, self._since = self._steps + 1, self._since + 1
        self._loss.add(loss)
        self._accuracy.add(accuracy)
        if self._since % _BITS_EVERY == 1:
            self._look_at_bits()

    def evaluate(self, accuracy: Any = None, loss: Any = None, *, rate: float | None = None) -> None:
        """After an evaluation on the test set, which ends an epoch of the record, and writes it. accuracy is from 0 to
        1. rate: the learning rate now, if it is not that of the beginning. Evaluations count in no time."""
        self._check_open()
        if not self._writes:
            return
        if accuracy is None and loss is None:
            raise UsageError("evaluate needs accuracy= or loss=", field="accuracy")
        if self._metric is None:
            self._metric = "accuracy" if accuracy is not None else "loss"
        if accuracy is None and self._metric == "accuracy":
            raise UsageError("the metric of this record is accuracy, and the evaluation has none", field="accuracy")
        if loss is None and self._metric != "accuracy":
            raise UsageError(f"the metric of this record is {self._metric}, which needs loss=", field="loss")
        right = 0.0 if accuracy is None else float(accuracy)
        if not 0 <= right <= 1:
            raise UsageError(f"accuracy is {right:g}; allowed is a number from 0 to 1", field="accuracy")
        now = self._about["rate"] if rate is None else rate
        check_number(now, "rate")
        self._look_at_bits()
        cost = self._cost()
        epochs: list[Any] = self._record["epochs"]
        epochs.append(
            {
                "epoch": epochs[-1]["epoch"] + 1 if epochs else 1,
                "step": self._steps,
                "rate": now,
                "train_loss": self._loss.value(),
                "train_accuracy": min(max(self._accuracy.value() or 0.0, 0.0), 1.0),
                "test_loss": _number(math.nan if loss is None else float(loss)),
                "test_accuracy": right,
                "bytes_sent": cost["bytes"],
                "bits": sum(self._bits) / len(self._bits),
                "seconds": {kind: cost[kind] for kind in _KINDS},
            }
        )
        self._loss, self._accuracy = _Mean(), _Mean()
        self._since, self._bits = 0, []
        self._write(cost, finished=False)
        self._clock = time.perf_counter()

    def close(self, *, finished: bool = True) -> None:
        """Ends the record. finished=False: the training was stopped; the report says so."""
        if self._closed or not self._writes:
            self._closed = True
            return
        self._closed = True
        if finished and not self._record["epochs"]:
            warnings.warn(
                f"gradwire: {self.path} has no evaluation, so the run does not count as finished; call evaluate() at "
                "least once",
                stacklevel=2,
            )
        self._write(self._cost(), finished=finished and bool(self._record["epochs"]))

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("the record is closed", field="record")

    def _look_at_bits(self) -> None:
        bits = 32.0 if self._hook is None else float(self._hook.stats()["bits"])
        self._bits.append(bits)
        over_time: list[Any] = self._record["bits_over_time"]
        if not over_time or over_time[-1][1] != bits:
            over_time.append([max(self._steps - 1, 0), bits])

    def _cost(self) -> dict[str, float]:
        """Since the start: bytes, skipped steps, and seconds by kind."""
        cost: dict[str, float] = {"wall": self._wall, "skipped": 0}
        if self._hook is None:
            workers = self._about["workers"]
            done = self._steps - int(self._before.get("steps", 0))
            cost["bytes"] = 8 * self._about["parameters"] * (workers - 1) / workers * done
            cost |= {"encode": 0.0, "wait": 0.0, "decode": 0.0}
        else:
            cost |= {name: value - self._sent_before[name] for name, value in self._totals().items()}
        cost["compute"] = max(0.0, cost["wall"] - cost["encode"] - cost["wait"] - cost["decode"])
        return {name: value + self._before[name] for name, value in cost.items()}

    def _totals(self) -> dict[str, float]:
        if self._hook is None:
            return {}
        stats = self._hook.stats()
        seconds = {name: stats["all_steps"]["seconds"][name] for name in ("encode", "wait", "decode")}
        return {**seconds, "bytes": stats["all_steps"]["bytes"], "skipped": stats["skipped"]}

    def _beginning(self) -> dict[str, Any]:
        now = datetime.datetime.now(datetime.timezone.utc)
        return {
            "version": 1,
            **self._about,
            "weights": "not recorded",
            "epochs": [],
            "points": [],
            "bits_over_time": [],
            "layers": [],
            "tables": [],
            "gradwire": _core.version,
            "date": now.strftime("%Y-%m-%dT%H:%M:%SZ"),
            "host": platform.node() or "unknown",
        }

    def _go_on(self, old: Mapping[str, Any], until: int | None) -> None:
        """After a stop. Steps since the last evaluation, up to step `until`, are not in the old record, nor are they
        counted here."""
        for name in ("codec", "task", "model", "seed", "workers", "parameters"):
            if old.get(name) != self._record[name]:
                raise UsageError(
                    f"{name} is {old.get(name)!r} in {self.path}, and {self._record[name]!r} here; a record that is "
                    "resumed must be of the same training",
                    field=name,
                )
        epochs = [epoch for epoch in old["epochs"] if until is None or epoch["step"] <= until]
        bits = [pair for pair in old["bits_over_time"] if until is None or pair[0] < until]
        self._record |= {"epochs": epochs, "bits_over_time": bits, "date": old["date"]}
        self._metric = old["metric"] if epochs else self._metric
        if epochs:
            last = epochs[-1]
            self._steps = last["step"]
            self._before = dict(last["seconds"]) | {
                "bytes": last["bytes_sent"],
                "skipped": old["skipped_steps"],
                "steps": last["step"],
            }

    def _write(self, cost: Mapping[str, float], finished: bool) -> None:
        import resource

        skipped = int(cost["skipped"])
        residuals = 0 if self._hook is None else self._hook.stats()["residual_bytes"]
        self._record |= {
            "metric": self._metric or "loss",
            "finished": finished,
            "failed": 2 * skipped > self._steps,
            "steps": self._steps,
            "skipped_steps": skipped,
            "seconds": {kind: cost[kind] for kind in _KINDS},
            "memory": {
                "peak": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
                "gradients": 4 * self._about["parameters"],
                "residuals": residuals,
                "messages": 0,
            },
        }
        with replacing(self.path) as file:
            file.write(json.dumps(self._record, allow_nan=False, indent=1).encode())


def _read(path: Path) -> dict[str, Any]:
    try:
        old = json.loads(path.read_text(encoding="utf-8"))
        old["metric"], old["skipped_steps"], old["bits_over_time"], old["date"]
        for epoch in old["epochs"]:
            epoch["step"], epoch["epoch"], epoch["bytes_sent"], [epoch["seconds"][kind] for kind in _KINDS]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FileError(f"{path} is not a record: {type(error).__name__}: {error}", field="folder") from None
    return dict(old)


class _Mean:
    """Of numbers and of tensors, in float64. A sum of tensors stays on their device until it is asked for."""

    def __init__(self) -> None:
        self._sum: Any = 0.0
        self._count = 0

    def add(self, value: Any) -> None:
        if value is not None:
            self._sum = self._sum + (value.detach().double() if isinstance(value, torch.Tensor) else float(value))
            self._count += 1

    def value(self) -> float | None:
        return _number(float(self._sum) / self._count) if self._count else None


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
