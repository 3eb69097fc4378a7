# SPDX-License-Identifier: Apache-2.0
"""`gradwire encode | decode | inspect` on files: the bytes, the refusals and the exit codes are those of the program
gradwire. Two things are the program's alone: a device other than the CPU, and files that are packed with Zstandard.
"""

from __future__ import annotations

import io
import json
import os
import sys
from typing import Any, Dict, List

import numpy as np

from . import _core
from ._errors import FileError, FrameError, UnsupportedError, UsageError
from ._frame_calls import encode as encode_array
from ._frames import Frame, describe, read
from ._plan import Plan
from ._whole_file import replacing

DTYPES = ("f32", "f16", "bf16")
_NPY = b"\x93NUMPY"
_ZSTANDARD = b"\x28\xb5\x2f\xfd"
_OWN_STAGE = "the caller's own"
_UNITS = {0: "the whole tensor", 1: "each element by itself"}
_STAGES = {0: "up: a worker to the owner", 1: "down: the owner to everybody"}


def _read(path: str) -> bytes:
    try:
        if path == "-":
            return sys.stdin.buffer.read()
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise FileError(f"{path}: cannot be read: {error.strerror}", field=path) from None


def _write(path: str, data: bytes) -> None:
    """A file is replaced as a whole or not at all; a device or a pipe is written to."""
    try:
        if path == "-":
            sys.stdout.buffer.write(data)
            return
        if os.path.exists(path) and not os.path.isfile(path):
            with open(path, "wb") as file:
                file.write(data)
            return
        with replacing(path) as file:
            file.write(data)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise FileError(f"{path}: cannot be written: {error.strerror}", field=path) from None


def _check_output(source: str, target: str, force: bool) -> None:
    if target == "-":
        if sys.stdout.isatty() and not force:
            raise UsageError(
                "standard output: binary data is not written to a terminal; name a file, or use --force", field="OUT"
            )
        return
    if not os.path.isfile(target):
        return
    if source != "-" and os.path.exists(source) and os.path.samefile(source, target):
        raise UsageError(f"{target}: IN and OUT are the same file", field="OUT")
    if not force:
        raise UsageError(f"{target}: the file exists already; --force replaces it", field="OUT")


def _array(path: str, data: bytes, dtype: str) -> Any:
    """The floats of a file: of a .npy file with its type and shape, else raw ones of the type `dtype`."""
    if path.endswith(".npy") or (not dtype and data.startswith(_NPY)):
        if dtype:
            raise UsageError(
                f"--dtype {dtype}: only for raw floats; {path} is a .npy file and says its own type", field="dtype"
            )
        try:
            array = np.load(io.BytesIO(data), allow_pickle=False)
        except (ValueError, EOFError, OSError) as error:
            raise FrameError(f"{path}: not a .npy file that can be read: {error}", field=path) from None
        if array.dtype.newbyteorder("=") not in (np.dtype("f4"), np.dtype("f2")):
            raise FrameError(f"{path}: the type is {array.dtype}; allowed is float32 or float16", field="dtype")
        return np.ascontiguousarray(array, array.dtype.newbyteorder("="))
    if not dtype:
        raise UsageError(f"{path} is not a .npy file: say --dtype f32, f16 or bf16 for raw floats", field="dtype")
    size = 4 if dtype == "f32" else 2
    if len(data) % size:
        raise FrameError(f"{path}: {len(data)} bytes are not a whole number of {dtype} elements", field=path)
    if dtype == "bf16":
        return np.frombuffer(data, _bfloat16()).copy()
    return np.frombuffer(data, "<f4" if dtype == "f32" else "<f2").copy()


def _bfloat16() -> Any:
    from . import _arrays

    found = _arrays.bfloat16()
    if found is None:
        raise UnsupportedError("bf16 needs ml_dtypes: pip install ml_dtypes", field="dtype")
    return found


def encode(
    source: str, target: str, codec: str, *, dtype: str, name: str, seed: int, step: int, fit: bool, force: bool
) -> None:
    chosen = _core.Codec(codec)  # a wrong spec is refused before a large file is read
    _check_output(source, target, force)
    array = _array(source, _read(source), dtype)
    frame = encode_array(array, chosen, name=name, seed=seed, step=step, fit=fit)
    _write(target, bytes(frame))
    if sys.stderr.isatty():
        bits = 8 * len(frame) / array.size if array.size else 0.0
        print(f"{target}: {len(frame):,} bytes, {bits:.3f} bits per element", file=sys.stderr)


def _frame(path: str) -> Frame:
    data = _read(path)
    if data.startswith(_ZSTANDARD):
        raise UnsupportedError(
            f"{path} is packed with Zstandard: the C++ program gradwire reads it, or unpack it with `zstd -d`",
            field=path,
        )
    return Frame.of(np.frombuffer(data, np.uint8))


def decode(source: str, target: str, *, dtype: str, tensor: int | None, max_elements: int, force: bool) -> None:
    _check_output(source, target, force)
    frame = _frame(source)
    tensors = read(frame.address, frame.nbytes, max_elements).tensors
    count = len(tensors)
    if count == 0:
        raise UsageError(f"{source}: the message holds no tensor", field="tensor")
    if count > 1 and tensor is None:
        raise UsageError(
            f"{source}: the message holds {count} tensors: choose one with --tensor 0 to {count - 1}", field="tensor"
        )
    chosen = tensor or 0
    if not 0 <= chosen < count:
        raise UsageError(f"--tensor {chosen}: allowed is 0 to {count - 1}", field="tensor")
    npy = target.endswith(".npy")
    wanted = dtype or tensors[chosen].dtype
    if npy and wanted == "bf16":
        if dtype:
            raise UsageError(
                "--dtype bf16: a .npy file cannot hold it; name OUT otherwise for raw floats", field="dtype"
            )
        wanted = "f32"
        print(f"gradwire: {source} is bf16, which .npy cannot hold: written as float32", file=sys.stderr)
    # Decoded as f32, whatever the sender had: another type is made from that, and rounded once.
    specs = [_core.TensorSpec("", t.count, "f32", t.codec, t.first, t.name_hash, t.shape) for t in tensors]
    array = Plan(specs).decode(frame, like="numpy")[chosen].reshape(tensors[chosen].shape or -1)
    with np.errstate(over="ignore"):
        array = array.astype({"f32": "<f4", "f16": "<f2"}[wanted] if wanted != "bf16" else _bfloat16(), copy=False)
    if not npy:
        _write(target, array.tobytes())
        return
    room = io.BytesIO()
    np.save(room, array, allow_pickle=False)
    _write(target, room.getvalue())


def _lines(path: str, told: Dict[str, Any], verdict: str) -> List[str]:
    elements, total, head = told["elements"], told["total_bytes"], told["head_bytes"]
    tensors, codecs = told["tensor_count"], told["spec_count"]
    rows = [
        ("file", path),
        ("magic", told["magic"]),
        ("version", told["version"]),
        ("flags", told["flags"]),
        ("total bytes", f"{total:,} (head {head:,}, body {total - head:,})"),
        ("step", told["step"]),
        ("stage", f"{told['stage']} ({_STAGES.get(told['stage'], _OWN_STAGE)})"),
        ("rank", f"{told['rank']} of {told['world']}"),
        ("head checksum", f"{told['head_check']} ok"),
        ("body checksum", f"{told['body_check']} {verdict}"),
        ("elements", f"{elements:,} in {tensors} tensor{'s' * (tensors != 1)}, {codecs} codec{'s' * (codecs != 1)}"),
        ("bits per element", f"{told['bits_per_element']:.4f} (every byte counted)"),
        ("ratio", f"{4 * elements / total:.2f} (fp32 bytes / bytes of the message)"),
    ]
    for tensor in told["tensors"]:
        unit = tensor["unit"]
        rows += [
            ("", ""),
            ("tensor", tensor["index"]),
            ("codec", tensor["codec"]),
            *(("", words) for words in tensor["fitted"]),
            ("unit", _UNITS.get(unit, f"{unit:,} elements")),
            ("dtype", tensor["dtype"]),
            ("shape", tuple(tensor["shape"]) or "not given"),
            ("name hash", tensor["name_hash"]),
            ("count", f"{tensor['count']:,} from element {tensor['first']:,}"),
            ("body", f"{tensor['body_bytes']:,} bytes, from byte {tensor['body_offset']:,} of the body"),
        ]
    return [f"{name:<18}{value}".rstrip() for name, value in rows]


def inspect(path: str, max_elements: int, as_json: bool) -> None:
    frame = _frame(path)
    head = read(frame.address, frame.nbytes, max_elements)
    altered: FrameError | None = None
    try:
        _core.verify_body(frame.address, frame.nbytes, head)
    except FrameError as error:
        altered = error
    told = describe(head)
    if as_json:
        verdicts = {"head_check_verdict": "ok", "body_check_verdict": "wrong" if altered else "ok"}
        print(json.dumps({"file": path, **told, **verdicts}))
    else:
        print("\n".join(_lines(path, told, "wrong: the body was altered" if altered else "ok")))
    if altered:
        raise altered
