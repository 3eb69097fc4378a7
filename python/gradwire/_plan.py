# SPDX-License-Identifier: Apache-2.0
"""A Plan is a list of named tensors with a codec each, and the one message that carries them. It is built once; a
runner per place and stream, made at the first call there, then does the work without allocating or, on a GPU, waiting.
"""

from __future__ import annotations

import os
import threading
from typing import Any, Iterable, Iterator, List, Mapping, Tuple, Union

from . import _arrays, _core
from ._errors import UsageError
from ._feedback import ErrorFeedback
from ._frames import CudaFrame, Frame, host_view
from ._kept import Kept
from ._specs import Stamp, TensorSpec, codec_of, core_spec, stamp_of

_RUNNERS_A_PLAN = 8


class Plan:
    """Many tensors, one message.

    >>> import gradwire, numpy
    >>> plan = gradwire.Plan([("weight", 1000, "float32", "qsgd:bits=4"), ("bias", 10)])
    >>> weight, bias = numpy.ones(1000, "f4"), numpy.arange(10, dtype="f4")
    >>> message = plan.encode([weight, bias], step=3)
    >>> len(message) == plan.nbytes
    True
    >>> [array.shape for array in plan.decode(message)]
    [(1000,), (10,)]

    With error feedback, what a step could not send (the residual) is added to the next step, once the step is
    committed:

    >>> feedback = gradwire.ErrorFeedback()
    >>> feedback.add_plan(plan)
    >>> for step in range(3):
    ...     with feedback.step(step):
    ...         message = plan.encode([weight, bias], step=step, feedback=feedback)
    """

    def __init__(self, tensors: Iterable[Any]) -> None:
        self._core = _core.Plan([core_spec(entry) for entry in tensors])
        self._tensors = self._core.tensors
        self._runners: Kept[_core.Runner] = Kept(_RUNNERS_A_PLAN)

    @staticmethod
    def of(tensors: Mapping[str, Any], rules: Union[str, _core.Rules, _core.Codec]) -> Plan:
        """A plan for these named arrays. `rules` map names to codecs; a single codec is used for all.

        >>> import gradwire, numpy
        >>> plan = gradwire.Plan.of({"w": numpy.ones((9, 9), "f4"), "b": numpy.ones(9, "f4")}, "1d=fp32;*=onebit")
        >>> [tensor.codec.name for tensor in plan.tensors]
        ['onebit', 'fp32']
        """
        parsed = (
            rules
            if isinstance(rules, _core.Rules)
            else _core.Rules(str(codec_of(rules)) if isinstance(rules, _core.Codec) else rules)
        )
        entries = []
        for name, array in tensors.items():
            view = _arrays.view(array, f"tensor '{name}'")
            entries.append(TensorSpec(name, view.size, view.dtype, parsed.codec_for(name, view.owner.ndim, view.size)))
        return Plan(entries)

    @property
    def tensors(self) -> List[_core.TensorSpec]:
        """The tensors of the plan."""
        return list(self._tensors)

    @property
    def elements(self) -> int:
        """Elements of all tensors together."""
        return self._core.elements

    @property
    def nbytes(self) -> int:
        """The size of the message in bytes. It does not depend on the values of the tensors."""
        return self._core.message_bytes

    def __len__(self) -> int:
        return len(self._tensors)

    def __repr__(self) -> str:
        return f"<Plan of {len(self)} tensors, {self.elements} elements, {self.nbytes} bytes>"

    def fitted(self, tensors: Any, *, threads: int | None = None) -> Plan:
        """A plan in which each codec that learns is fitted to its tensor."""
        views, home = self._views(tensors, writable=False)
        device = _arrays.device_of(home, _arrays.threads_for(self.elements, threads))
        with _arrays.on(home):
            return Plan(
                [
                    TensorSpec(
                        t.name,
                        t.count,
                        t.dtype,
                        _core.fit(t.codec, v.address, v.size, v.dtype, device),
                        t.first,
                        t.shape,
                    )
                    for t, v in zip(self._tensors, views)
                ]
            )

    def encode(
        self,
        tensors: Any,
        *,
        seed: int = 0,
        step: int = 0,
        stage: int = 0,
        rank: int = 0,
        world: int = 1,
        feedback: ErrorFeedback | None = None,
        loss_scale: float = 1.0,
        out: Any = None,
        threads: int | None = None,
    ) -> Any:
        """The message of these tensors (a sequence in the plan's order, or a mapping by name).

        A Frame, or of CUDA tensors a CudaFrame, made on torch's current stream without waiting; with `out`, a buffer of
        uint8 where the tensors are, the part of it that was written. With `feedback`, residuals are added to the
        tensors, and the new residuals wait for feedback.commit(step) or feedback.rollback(step); stage 1 uses those of
        the direction "down". loss_scale: the factor that the gradients were multiplied by; residuals are kept without
        it.
        """
        stamp = stamp_of(seed, step, stage, rank, world)
        views, home = self._views(tensors, writable=False)
        if feedback is not None:
            feedback.check_place(home)
        result, message = self._room(out, home, views[0].like if views else "numpy")
        direction = "down" if stage == 1 else "up"
        runner = self._runner(home, _arrays.threads_for(self.elements, threads))
        with _arrays.on(home):
            runner.encode(
                [view.address for view in views],
                stamp,
                message.address,
                self.nbytes,
                None if feedback is None else feedback.core,
                direction,
                loss_scale,
            )
        return result

    def decode(
        self,
        message: Any,
        out: Any = None,
        *,
        like: str | None = None,
        add: bool = False,
        expect: Stamp | None = None,
        wait: bool = True,
        threads: int | None = None,
    ) -> List[Any]:
        """The tensors of a message of this plan: new flat arrays, or written to `out`, or added to it (f32).

        A message of another plan, a damaged message and, with `expect`, a message of another step, stage, rank or world
        is refused. On a GPU, wait=False only enqueues the work; a message that would be refused then decodes to NaN.
        """
        if like not in (None, "numpy", "torch"):
            raise UsageError(f"like is {like!r}; allowed are 'numpy' and 'torch'", field="like")
        if add and out is None:
            raise UsageError("add is given without out: there is nothing to add to", field="out")
        if isinstance(message, CudaFrame):
            message = message.tensor
        source = _arrays.byte_view(message, "message")
        if out is None and like == "numpy" or source.home is None:
            source = host_view(message)._replace(like=getattr(message, "like", source.like))
        elif source.address % 16:
            source = _arrays.byte_view(source.owner.clone(), "message")
        if out is None:
            out = [_arrays.empty(t.count, t.dtype, like or source.like, source.home) for t in self._tensors]
        views, home = self._views(out, writable=True)
        if home != source.home and views:
            raise UsageError(
                f"out is on {_arrays.place(home)}, the message on {_arrays.place(source.home)}; they must be "
                "in one place",
                field="out",
            )
        expected = None if expect is None else stamp_of(0, *expect)
        runner = self._runner(source.home, _arrays.threads_for(self.elements, threads), wait)
        with _arrays.on(source.home):
            runner.decode(source.address, source.size, [view.address for view in views], add, expected, wait)
        return [out[t.name] for t in self._tensors] if isinstance(out, Mapping) else list(out)

    def _views(self, tensors: Any, *, writable: bool) -> Tuple[List[_arrays.View], int | None]:
        what = "out" if writable else "tensor"
        views: List[_arrays.View] = []
        for tensor, array in zip(self._tensors, self._in_order(tensors, what)):
            view = _arrays.view(array, f"{what} '{tensor.name}'", writable=writable)
            if view.size != tensor.count:
                raise UsageError(
                    f"{what} '{tensor.name}' has {view.size} elements; the plan has {tensor.count}", field="count"
                )
            if view.dtype != tensor.dtype:
                raise UsageError(
                    f"{what} '{tensor.name}' has dtype {_arrays.DTYPES[view.dtype]}; the plan has "
                    f"{_arrays.DTYPES[tensor.dtype]}",
                    field="dtype",
                )
            if view.home != (views[0] if views else view).home:
                raise UsageError(
                    f"{what} '{tensor.name}' is on {_arrays.place(view.home)}, '{self._tensors[0].name}' on "
                    f"{_arrays.place(views[0].home)}; all tensors of a message must be in one place",
                    field="device",
                )
            views.append(view)
        return views, views[0].home if views else None

    def _in_order(self, tensors: Any, what: str) -> Iterator[Any]:
        if isinstance(tensors, Mapping):
            missing = [t.name for t in self._tensors if t.name not in tensors]
            if missing or len(tensors) != len(self):
                raise UsageError(
                    f"{what}: {len(tensors)} names given; the plan has {len(self)}"
                    + (f", among them '{missing[0]}'" if missing else ""),
                    field="tensors",
                )
            return iter([tensors[t.name] for t in self._tensors])
        if not isinstance(tensors, (list, tuple)):
            raise UsageError(
                f"{what} is of type {type(tensors).__name__}; expected a list of arrays or a mapping by name",
                field="tensors",
            )
        if len(tensors) != len(self):
            raise UsageError(f"{what}: {len(tensors)} tensors given; the plan has {len(self)}", field="tensors")
        return iter(tensors)

    def _room(self, out: Any, home: int | None, like: str) -> Tuple[Any, _arrays.View]:
        """Where the message goes: what the caller gets, and its bytes."""
        if out is None and home is None:
            frame = Frame(self.nbytes, like)
            return frame, _arrays.View(frame.address, frame.nbytes, "u8", like, None, frame)
        if out is None:
            tensor = _arrays.torch_module().empty(
                self.nbytes, dtype=_arrays.torch_module().uint8, device=f"cuda:{home}"
            )
            return CudaFrame(tensor, self), _arrays.byte_view(tensor)
        view = _arrays.byte_view(out, "out", writable=True)
        if view.home != home:
            raise UsageError(
                f"out is on {_arrays.place(view.home)}, the tensors on {_arrays.place(home)}; "
                "they must be in one place",
                field="out",
            )
        if view.size < self.nbytes:
            raise UsageError(f"out has {view.size} bytes; the frame needs {self.nbytes}", field="out")
        flat = view.owner.reshape(-1)[: self.nbytes]
        return (CudaFrame(flat, self) if home is not None else flat), view

    def _runner(self, home: int | None, threads: int, waits: bool = True) -> _core.Runner:
        """A runner serves one call at a time, and on a GPU one stream, so each thread, or stream, has its own. Calls
        that do not wait have a runner of their own as well, so that their errors are not reported to a later call that
        waits."""
        where = (threading.get_ident(), threads) if home is None else (_arrays.stream_of(home), waits)
        return self._runners.get((os.getpid(), home, *where), lambda: self._new_runner(home, threads))

    def _new_runner(self, home: int | None, threads: int) -> _core.Runner:
        with _arrays.on(home):
            return _core.Runner(self._core, _arrays.device_of(home, threads))
