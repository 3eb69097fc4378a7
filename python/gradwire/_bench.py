# SPDX-License-Identifier: Apache-2.0
"""`python -m gradwire bench`: how fast codecs encode and decode through this package, next to a plain copy of the same
tensor. The result is verified first, against the scalar reference. Then every round times copy, encode, copy, decode,
so that each is compared with a copy made moments before. Medians over the rounds are reported.

    ratio    fp32 bytes / bytes of the frame: larger is better
    error    squared relative error, ||x - x'||^2 / ||x||^2
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from typing import Any, Callable, Dict, List

import numpy as np

from . import _arrays, _core
from ._errors import UnsupportedError, UsageError
from ._frame_calls import fit
from ._plan import Plan

_VERIFIED = 100_003  # elements that are encoded a second time, by the scalar reference


def gradient(elements: int) -> Any:
    """Values that behave like a gradient's: a heavy-tailed mixture whose scale differs from block to block."""
    random = np.random.default_rng(1)
    values = random.standard_normal(elements, np.float32)
    values[1::2] *= np.abs(random.standard_normal(len(values[1::2]), np.float32))
    scales = np.exp2(random.uniform(-3, 3, elements // 4096 + 1)).astype(np.float32) * np.float32(1e-3)
    for block, scale in enumerate(scales):
        values[block * 4096 : (block + 1) * 4096] *= scale
    return values


class _Cpu:
    name = "cpu"

    def __init__(self, threads: int) -> None:
        self.threads = threads

    def put(self, array: Any) -> Any:
        return array

    def get(self, array: Any) -> Any:
        return np.asarray(array)

    def room(self, nbytes: int) -> Any:
        return np.zeros(nbytes, np.uint8)

    def copy(self, to: Any, array: Any) -> None:
        np.copyto(to, array)

    def time(self, work: Callable[[], Any]) -> float:
        begin = time.perf_counter()
        work()
        return time.perf_counter() - begin


class _Cuda:
    name = "cuda"
    threads = 1

    def __init__(self) -> None:
        if not _core.cuda_devices():
            raise UnsupportedError(f"device is cuda, but CUDA is {_core.cuda_description()}", field="device")
        try:
            import torch
        except ImportError:
            raise UnsupportedError("device is cuda, which needs torch: pip install torch", field="device") from None
        if not torch.cuda.is_available():
            raise UnsupportedError(f"device is cuda, but torch {torch.__version__} sees no GPU", field="device")
        self.torch: Any = torch

    def put(self, array: Any) -> Any:
        return self.torch.from_numpy(array).cuda()

    def get(self, array: Any) -> Any:
        return array.cpu().numpy()

    def room(self, nbytes: int) -> Any:
        return self.torch.empty(nbytes, dtype=self.torch.uint8, device="cuda")

    def copy(self, to: Any, array: Any) -> None:
        to.copy_(array)

    def time(self, work: Callable[[], Any]) -> float:
        begin, end = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e-3


def _verify(place: Any, codec: _core.Codec, values: Any) -> None:
    """The bytes are those of the reference loop, and what is decoded from them too."""
    part = np.ascontiguousarray(values[:_VERIFIED])
    plan = Plan([("bench", part.size, "float32", codec)])
    message = np.zeros(plan.nbytes, np.uint8)
    reference = _core.Runner(plan._core, _core.Device("cpu", simd="scalar"))
    reference.encode([_arrays.address(part)], _core.Stamp(1, 0, 0, 0, 1), _arrays.address(message), plan.nbytes)
    decoded = np.empty_like(part)
    reference.decode(_arrays.address(message), plan.nbytes, [_arrays.address(decoded)])
    room = place.room(plan.nbytes)
    plan.encode([place.put(part)], seed=1, out=room, threads=place.threads)
    out = place.put(np.zeros_like(part))
    plan.decode(room, [out], threads=place.threads)
    if not np.array_equal(place.get(room), message):
        raise RuntimeError(f"verification failed: {codec}: the bytes on {place.name} are not those of the reference")
    if not np.array_equal(place.get(out).view("u4"), decoded.view("u4")):
        raise RuntimeError(
            f"verification failed: {codec}: what is decoded on {place.name} is not what the reference decodes"
        )


def _error(values: Any, decoded: Any) -> float:
    exact = values.astype(np.float64)
    norm = float(np.dot(exact, exact))
    difference = decoded.astype(np.float64) - exact
    return float(np.dot(difference, difference)) / norm if norm else 0.0


def measure(place: Any, given: str, values: Any, rounds: int) -> Dict[str, Any]:
    codec = fit(_core.Codec(given), values[: 1 << 20])  # one that learns is timed with what it would have learned
    _verify(place, codec, values)
    plan = Plan([("bench", values.size, "float32", codec)])
    tensor, out, message = place.put(values), place.put(np.zeros_like(values)), place.room(plan.nbytes)
    works: Dict[str, Callable[[], Any]] = {
        "encode": lambda: plan.encode([tensor], seed=1, out=message, threads=place.threads),
        "decode": lambda: plan.decode(message, [out], wait=False, threads=place.threads),
    }
    for work in works.values():
        work()
    error = _error(values, place.get(out))
    if not np.isfinite(error) or (codec.lossless and error != 0):
        raise RuntimeError(f"verification failed: {codec}: relative error {error}")
    times: Dict[str, List[float]] = {"copy": [], "encode": [], "decode": []}
    of_copy: Dict[str, List[float]] = {"encode": [], "decode": []}
    target = place.put(np.zeros_like(values))
    for number in range(-1, rounds):  # the first only warms up
        for name, work in works.items():
            copy, own = place.time(lambda: place.copy(target, tensor)), place.time(work)
            if number >= 0:
                times["copy"].append(copy)
                times[name].append(own)
                of_copy[name].append(copy / own)
    rate = {name: 4e-9 * values.size / statistics.median(seconds) for name, seconds in times.items()}
    return {
        "codec": given,
        "spec": str(codec),
        "device": place.name,
        "threads": place.threads,
        "elements": values.size,
        "bits_per_element": 8.0 * plan.nbytes / values.size,
        "ratio": 4.0 * values.size / plan.nbytes,
        "error": error,
        "encode_GBps": rate["encode"],
        "decode_GBps": rate["decode"],
        "copy_GBps": rate["copy"],
        "encode_of_copy": statistics.median(of_copy["encode"]),
        "decode_of_copy": statistics.median(of_copy["decode"]),
        "rounds": rounds,
    }


def break_even(row: Dict[str, Any], rival: Dict[str, Any], world: int) -> "float | None":
    """The Gb/s of a link below which an all-reduce of `world` ranks with the codec of `row` is faster than with that of
    `rival`: 0.0 where it never is, None where it always is. A rank encodes all elements, those of its own shard again,
    and decodes as many elements twice; every byte travels 2 (world - 1) / world times. Nothing overlaps."""

    def seconds(one: Dict[str, Any]) -> float:
        if "encode_GBps" not in one:  # fp32, which needs no codec
            return 0.0
        gigabytes = 4e-9 * float(one["elements"])
        return gigabytes * ((1 + 1 / world) / float(one["encode_GBps"]) + 2 / float(one["decode_GBps"]))

    saved = (rival["bits_per_element"] - row["bits_per_element"]) * row["elements"]
    added = seconds(row) - seconds(rival)
    if saved <= 0:
        return 0.0
    return None if added <= 0 else 2e-9 * (world - 1) / world * saved / added


def bench(
    codecs: List[str], elements: int, device: str, threads: int, rounds: int, as_json: bool, world: int = 4
) -> None:
    if world < 2:
        raise UsageError(f"world is {world}; allowed is an integer from 2 on", field="world")
    for name, value in (("elements", elements), ("rounds", rounds)):
        if value < 1:
            raise UsageError(f"{name} is {value}; allowed is an integer from 1 on", field=name)
    every = [info["codec"] for info in _core.codecs()]
    codecs = [codec for given in codecs or ["all"] for codec in (every if given == "all" else [given])]
    for codec in codecs:
        _core.Codec(codec)  # a wrong one is refused before anything is measured
    usable = bool(_core.cuda_devices()) and device == "auto" and _sees_cuda()
    places: List[Any] = [_Cpu(_arrays.threads_for(elements, threads))] if device in ("auto", "cpu") else []
    if device == "cuda" or usable:
        places.append(_Cuda())
    values = gradient(elements)
    rows: List[Dict[str, Any]] = []
    for place in places:
        bf16 = measure(place, "bf16", values, rounds)
        for codec in codecs:
            if sys.stderr.isatty():
                print(f"\r{place.name}: {codec:<60.60}", end="\r", file=sys.stderr)
            row = measure(place, codec, values, rounds)
            row["world"] = world
            row["break_even_Gbps"] = break_even(row, {"bits_per_element": 32.0}, world)
            row["break_even_bf16_Gbps"] = break_even(row, bf16, world)
            rows.append(row)
            if as_json:
                print(json.dumps(rows[-1]), flush=True)
    if not as_json:
        _page(rows)


def _sees_cuda() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return bool(torch.cuda.is_available())


def _pays(gbps: "float | None") -> str:
    return "always" if gbps is None else f"{gbps:.3g}" if gbps > 0 else "never"


def _page(rows: List[Dict[str, Any]]) -> None:
    width = max(len(row["codec"]) for row in rows)
    for place in dict.fromkeys(row["device"] for row in rows):
        here = [row for row in rows if row["device"] == place]
        where = (
            "the GPU"
            if place == "cuda"
            else f"the CPU, {here[0]['threads']} thread{'' if here[0]['threads'] == 1 else 's'}"
        )
        print(
            f"\n{here[0]['elements']:,} float32 elements on {where}; verified; "
            f"medians of {here[0]['rounds']} interleaved rounds\n"
        )
        print(
            f"{'codec':<{width}}  bits/element   ratio     error    encode    decode      copy  encode/copy  "
            "decode/copy  pays/fp32  pays/bf16"
        )
        for row in here:
            print(
                f"{row['codec']:<{width}}  {row['bits_per_element']:12.3f}  {row['ratio']:6.2f}  "
                f"{row['error']:8.3g}"
                f"  {row['encode_GBps']:8.2f}  {row['decode_GBps']:8.2f}  {row['copy_GBps']:8.2f}"
                f"  {row['encode_of_copy']:11.2f}  {row['decode_of_copy']:11.2f}"
                f"  {_pays(row['break_even_Gbps']):>9}  {_pays(row['break_even_bf16_Gbps']):>9}"
            )
    print(
        "\nratio: fp32 bytes / bytes of the frame. error: squared relative error, |x - y|^2 / |x|^2."
        "\nencode, decode, copy: GB of float32 tensor per second."
        "\n/copy: the speed divided by that of a plain copy of the tensor, by one thread or by the GPU."
        "\npays/fp32, pays/bf16: Gb/s of a link below which the codec is faster than fp32 or a bf16 cast, by these"
        "\nrates, in an all-reduce of --world ranks that does not overlap with anything; error feedback is not counted."
    )
