# SPDX-License-Identifier: Apache-2.0
"""encode and decode: one array, one frame, nothing to prepare. Both are a plan of one tensor, which is kept for the
next call with the same name, count, dtype and codec.
"""

from __future__ import annotations

from typing import Any, List, Sequence, Union

from . import _arrays, _core
from ._errors import UsageError
from ._frames import MAX_ELEMENTS, CudaFrame, head_of, host_view
from ._kept import Kept
from ._plan import Plan
from ._specs import codec_of

_plans: Kept[Plan] = Kept(32)


def _plan_for(tensor: _core.TensorSpec) -> Plan:
    """The plan of a single tensor. With a fitted codec it is not kept, because the next tensor has another table."""
    if tensor.codec.table:
        return Plan([tensor])
    key = (tensor.name_hash, tensor.count, tensor.dtype, str(tensor.codec), tensor.first, tensor.shape)
    return _plans.get(key, lambda: Plan([tensor]))


def _shape_of(array: Any) -> List[int]:
    """What a frame says of the shape: nothing of a scalar, of one dimension, and of more than a frame can say."""
    return list(array.shape) if 2 <= array.ndim <= 8 else []


def fit(codec: Union[str, _core.Codec], array: Any, *, threads: int | None = None) -> _core.Codec:
    """Fits a codec that learns to this array. Codecs that do not learn are returned unchanged.

    >>> import gradwire, numpy
    >>> codec = gradwire.fit("optquant:bits=2", numpy.linspace(-1, 1, 5000, dtype="f4") ** 3)
    >>> codec.learns, len(codec.table) > 0
    (True, True)
    """
    view = _arrays.view(array)
    device = _arrays.device_of(view.home, _arrays.threads_for(view.size, threads))
    with _arrays.on(view.home):
        return _core.fit(codec_of(codec), view.address, view.size, view.dtype, device)


def encode(
    array: Any,
    codec: Union[str, _core.Codec],
    *,
    name: str = "",
    seed: int = 0,
    step: int = 0,
    stage: int = 0,
    rank: int = 0,
    world: int = 1,
    out: Any = None,
    fit: bool = True,
    threads: int | None = None,
) -> Any:
    """Compresses an array of float32, float16 or bfloat16 into a frame. `decode` needs nothing but the frame.

    array: a NumPy array, a torch tensor on the CPU or on CUDA, or anything that hands NumPy its memory; contiguous.
    codec: a codec such as "qsgd:bits=4" (`gradwire.codecs()` lists them). name, seed, step, stage, rank: determine the
    random bits of rounding; step, stage, rank and world are written to the frame. fit: a codec that learns is fitted to
    the array first, unless it is a Codec that has learned already. out: a buffer of uint8 to write to; the part that
    was written is returned. threads: CPU threads; the bytes do not depend on them.

    >>> import gradwire, numpy
    >>> gradient = numpy.random.default_rng(1).standard_normal((100, 100)).astype("f4")
    >>> frame = gradwire.encode(gradient, "qsgd:bits=4", seed=1)
    >>> round(8 * len(frame) / gradient.size)
    4
    >>> restored = gradwire.decode(frame)
    >>> restored.shape, bool(abs(restored - gradient).max() < 1)
    ((100, 100), True)

    Of a CUDA tensor the frame stays on the GPU (`frame.tensor`), and is made on torch's current stream. The first call
    of its kind makes tables there; later ones neither allocate, the frame aside, nor wait. Fitting waits: it reads the
    tensor.
    """
    view = _arrays.view(array)
    codec = codec_of(codec)
    if not isinstance(name, str):
        raise UsageError(f"name is {name!r}; allowed is a string", field="name")
    if fit and codec.learns and not codec.table and view.size:
        device = _arrays.device_of(view.home, _arrays.threads_for(view.size, threads))
        with _arrays.on(view.home):
            codec = _core.fit(codec, view.address, view.size, view.dtype, device)
    plan = _plan_for(_core.TensorSpec(name, view.size, view.dtype, codec, shape=_shape_of(view.owner)))
    return plan.encode(
        [view.owner], seed=seed, step=step, stage=stage, rank=rank, world=world, out=out, threads=threads
    )


def decode(
    frame: Any,
    *,
    out: Any = None,
    shape: Union[int, Sequence[int], None] = None,
    dtype: Any = None,
    like: str | None = None,
    max_elements: int | None = None,
    wait: bool = True,
    threads: int | None = None,
) -> Any:
    """The array of a frame: of the kind and the shape that it was made of. An array of no dimension or of more than 8
    comes back flat.

    frame: what `encode` returned, bytes, or an array or tensor of uint8. out: an array to write to, of the frame's
    count and any of the three dtypes, where the frame is. shape, dtype, like ("numpy" or "torch"): what is wanted
    instead of the shape, dtype and kind that were encoded; bfloat16 without ml_dtypes comes as float32 in
    NumPy. max_elements: a frame that says it holds more is refused before memory is taken (2**32). wait: on a GPU,
    False only enqueues, and a damaged frame then decodes to NaN. Whatever else is wrong with a frame is a FrameError
    that names the field.

    >>> import gradwire, numpy
    >>> frame = gradwire.encode(numpy.arange(6, dtype="f2"), "fp32")
    >>> gradwire.decode(frame, shape=(2, 3)).tolist()
    [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    >>> gradwire.decode(bytes(frame)[:-1])
    Traceback (most recent call last):
    gradwire.FrameError: bad message: total_bytes is 152 but 151 bytes are here
    """
    if out is not None and (shape is not None or dtype is not None or like is not None):
        raise UsageError("out is given with shape, dtype or like: it says all three by itself", field="out")
    target = None if out is None else _arrays.view(out, "out", writable=True)
    source, head, kind = _open(frame, like, max_elements)
    if len(head) != 1:
        raise UsageError(
            f"the message holds {len(head)} tensors; decode takes one, decode_all any number", field="frame"
        )
    tensor = head[0]
    if target is None:
        out = _arrays.empty(tensor.count, _dtype(dtype, tensor.dtype, kind), kind, source.home)
        wanted = shape if shape is not None else tensor.shape or None
        result = out if wanted is None else _shaped(out, wanted)
        target = _arrays.view(out, "out", writable=True)
    else:
        result = out
        if target.size != tensor.count:
            raise UsageError(f"out has {target.size} elements; the frame has {tensor.count}", field="out")
        if target.home != source.home:
            raise UsageError(
                f"out is on {_arrays.place(target.home)}, the frame on {_arrays.place(source.home)}; they must "
                "be in one place",
                field="out",
            )
    sent = _core.TensorSpec("", tensor.count, target.dtype, tensor.codec, tensor.first, tensor.name_hash, tensor.shape)
    plan = _plan_for(sent)
    plan.decode(source.owner, [target.owner], wait=wait, threads=threads)
    return result


def decode_all(
    frame: Any, *, like: str | None = None, max_elements: int | None = None, threads: int | None = None
) -> List[Any]:
    """The arrays of a message of any number of tensors, in its order; those without a shape in the message are flat.

    >>> import gradwire, numpy
    >>> plan = gradwire.Plan([("a", 3), ("b", 2, "float16", "fp16")])
    >>> message = plan.encode([numpy.ones(3, "f4"), numpy.ones(2, "f2")])
    >>> [array.dtype.name for array in gradwire.decode_all(bytes(message))]
    ['float32', 'float16']
    """
    source, head, kind = _open(frame, like, max_elements)
    tensors = [
        _core.TensorSpec("", t.count, _dtype(None, t.dtype, kind), t.codec, t.first, t.name_hash, t.shape) for t in head
    ]
    arrays = Plan(tensors).decode(source.owner, like=kind, threads=threads)
    return [_shaped(array, t.shape) if t.shape else array for array, t in zip(arrays, head)]


def _open(frame: Any, like: str | None, max_elements: int | None) -> Any:
    """A frame's bytes, its tensors, and the kind of array to make."""
    if like not in (None, "numpy", "torch"):
        raise UsageError(f"like is {like!r}; allowed are 'numpy' and 'torch'", field="like")
    limit = MAX_ELEMENTS if max_elements is None else _arrays.whole(max_elements, "max_elements", 2**40)
    if isinstance(frame, CudaFrame) and like != "numpy":
        tensors = frame.plan.tensors
        if sum(tensor.count for tensor in tensors) > limit:
            raise UsageError(
                f"the frame holds {frame.plan.elements} elements; max_elements is {limit}", field="max_elements"
            )
        return _arrays.byte_view(frame.tensor), tensors, "torch"
    source = _arrays.byte_view(frame.tensor if isinstance(frame, CudaFrame) else frame)
    kind = like or getattr(frame, "like", source.like)
    if source.home is None or kind == "numpy":
        source = host_view(source.owner)
    return source, head_of(source, limit).tensors, kind


def _dtype(wanted: Any, sent: str, kind: str) -> str:
    if wanted is not None:
        return _arrays.dtype_name(wanted)
    return "f32" if sent == "bf16" and kind == "numpy" and _arrays.bfloat16() is None else sent


def _shaped(flat: Any, shape: Any) -> Any:
    try:
        return flat.reshape(shape)
    except (TypeError, ValueError, RuntimeError):
        count = flat.size if isinstance(flat.size, int) else flat.numel()
        raise UsageError(f"shape is {shape!r}; the frame has {count} elements", field="shape") from None
