# SPDX-License-Identifier: Apache-2.0
"""A second decoder, written from docs/wire-format.md alone.

The document promises that it suffices. This file is the proof: it knows nothing of the library, shares no code with
it, and uses the document's words as its names (head, spec, row, region, unit, block, lane, scale, marker). The
checks stand in the order of the document's section 9; the head is read field by field, the body in whole arrays. Here
are the message and its checksums; second_specs.py has the specs with their tables, second_codecs.py the regions.

    decode(bytes) -> Message         or Refused, whose .field is the right column of the document's section 9
"""

import math
import struct
from collections import namedtuple

import numpy as np

from second_codecs import M32, decode_region, region_words
from second_specs import Refused, div_up, parse_spec, refuse_if

M64 = 2**64 - 1

__all__ = ["Message", "Refused", "Tensor", "body_check", "decode", "head_check", "xxh64"]

Message = namedtuple("Message", "step stage rank world tensors")
# spec: the text; table: its words; shape: a tuple, empty for none; values: f32; slack: how far a value may be off, 0 of
# all codecs but fft
Tensor = namedtuple("Tensor", "name_hash count first spec table dtype shape values slack")


# Checksums (section 8).

def xxh64(data, seed=0):
    """XXH64, from its public specification: four accumulators over stripes of 32 bytes, then the rest, then mixing."""
    p1, p2, p3 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
    p4, p5 = 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5

    def rotate(x, n):
        return (x << n | x >> (64 - n)) & M64

    def stir(acc, lane):
        return rotate((acc + lane * p2) & M64, 31) * p1 & M64

    size, at = len(data), len(data) // 32 * 32
    if size >= 32:
        accs = [seed + p1 + p2, seed + p2, seed, seed - p1]
        for lanes in struct.iter_unpack("<4Q", data[:at]):
            accs = [stir(acc, lane) for acc, lane in zip(accs, lanes)]
        h = sum(rotate(acc, n) for acc, n in zip(accs, (1, 7, 12, 18))) & M64
        for acc in accs:
            h = ((h ^ stir(0, acc)) * p1 + p4) & M64
    else:
        h = seed + p5
    h = (h + size) & M64
    while at + 8 <= size:
        h = (rotate(h ^ stir(0, int.from_bytes(data[at : at + 8], "little")), 27) * p1 + p4) & M64
        at += 8
    if at + 4 <= size:
        h = (rotate(h ^ int.from_bytes(data[at : at + 4], "little") * p1 & M64, 23) * p2 + p3) & M64
        at += 4
    for byte in data[at:]:
        h = rotate(h ^ byte * p5 & M64, 11) * p1 & M64
    h = (h ^ h >> 33) * p2 & M64
    h = (h ^ h >> 29) * p3 & M64
    return h ^ h >> 32


def mix64(x):
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & M64
    x = (x ^ x >> 27) * 0x94D049BB133111EB & M64
    return x ^ x >> 31


def row_weight(rows):
    """Of an array of row numbers; u64 holds the product of two u32, so the masks stand for u32 arithmetic."""
    x = np.asarray(rows, np.uint64) & np.uint64(M32)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = (x ^ x >> np.uint64(shift)) * np.uint64(factor) & np.uint64(M32)
    return x ^ x >> np.uint64(16) | np.uint64(1)


def lane_weight(lane):
    return mix64(lane + 1) | 1


def head_check(message, head_bytes):
    return xxh64(message[:48] + message[64:head_bytes])


def body_check(words):
    grid = np.zeros((div_up(words.size, 32), 32), np.uint64)
    grid.reshape(-1)[: words.size] = words
    lanes = np.array([lane_weight(lane) for lane in range(32)], np.uint64)
    total = int((grid * row_weight(np.arange(len(grid)))[:, None] * lanes).sum(dtype=np.uint64))
    return mix64((total + words.size * 0x9E3779B97F4A7C15) & M64)


# The message (sections 2, 4 and 9).

def read_specs(message, spec_count, head_bytes):
    specs, at = [], 64
    for _ in range(spec_count):
        refuse_if(at + 4 > head_bytes, "spec", "begins beyond the head")
        length, spec_table = struct.unpack_from("<HH", message, at)
        refuse_if(spec_table % 4 != 0, "spec_table", f"{spec_table}, no multiple of 4")
        text, table = at + 4, at + 4 + div_up(length, 4) * 4
        end = table + spec_table
        refuse_if(end > head_bytes, "spec", "ends beyond the head")
        refuse_if(any(message[text + length : table]), "spec", "is not padded with zeros")
        words = struct.unpack_from(f"<{spec_table // 4}I", message, table)
        specs.append(parse_spec(message[text : text + length], words))
        refuse_if(specs[-1] in specs[:-1], "spec", f"{specs[-1].text!r} stands there twice")
        at = end
    return specs, at


def read_shapes(message, at, table_end, head_bytes):
    """The shape of every row, and where the last one ends."""
    dims = [message[row + 35] for row in range(at, table_end, 40)]
    for i, d in enumerate(dims):
        refuse_if(d > 8, f"tensor[{i}].dims", f"{d}, at most 8")
    end = table_end + 8 * sum(dims)
    refuse_if(div_up(end, 32) * 32 != head_bytes, "head_bytes", f"{head_bytes}, the shapes end at {end}")
    shapes = []
    for d in dims:
        shapes.append(struct.unpack_from(f"<{d}Q", message, table_end))
        table_end += 8 * d
    return shapes, end


def shape_fits(shape, count):
    """Integers of Python do not wrap."""
    return not shape or math.prod(shape) == count and math.prod(e for e in shape if e) <= 2**40


def decode(message, limit=2**26):
    """limit: the most elements that the caller lets a message decode to."""
    refuse_if(len(message) < 64, "total_bytes", f"{len(message)} bytes are there, a header takes 64")
    (magic, version, flags, total_bytes, step, stage, rank, world, spec_count, tensor_count, head_bytes,
     head_check_sent, body_check_sent) = struct.unpack_from("<4sHHQQ6IQQ", message)
    refuse_if(magic != b"GWIR", "magic", magic)
    refuse_if(version != 2, "version", f"{version}, expected 2")
    refuse_if(total_bytes != len(message), "total_bytes", f"{total_bytes}, but {len(message)} bytes are there")
    refuse_if(head_bytes < 64 or head_bytes % 32 or head_bytes > total_bytes, "head_bytes", head_bytes)
    refuse_if(head_check(message, head_bytes) != head_check_sent, "head_check", "does not match")
    refuse_if(flags != 0, "flags", f"{flags}, expected 0")
    refuse_if(world == 0, "world", "0")
    refuse_if(rank >= world, "rank", f"{rank} of {world}")
    refuse_if(spec_count > min(65535, tensor_count), "spec_count", f"{spec_count} for {tensor_count} tensors")
    refuse_if(tensor_count > 2**20, "tensor_count", f"{tensor_count}, at most 2^20")
    specs, at = read_specs(message, spec_count, head_bytes)
    table_end = at + 40 * tensor_count
    refuse_if(table_end > head_bytes, "head_bytes", f"{head_bytes}, the table ends at {table_end}")
    shapes, shapes_end = read_shapes(message, at, table_end, head_bytes)

    rows, regions, free, elements, used = [], [], 0, 0, 0
    for i, row in enumerate(struct.iter_unpack("<QQQQHBB4s", message[at:table_end])):
        name_hash, count, first, offset, spec_number, dtype, dims, reserved = row
        spec = specs[spec_number] if spec_number < spec_count else None
        elements += count
        refuse_if(elements > min(limit, 2**40), f"tensor[{i}].count", f"{count}, the limit of all is {limit}")
        refuse_if(first % 32768 or first > 2**40, f"tensor[{i}].first", first)
        refuse_if(spec is None or spec_number > used, f"tensor[{i}].spec", f"{spec_number}, at most {used}")
        used = max(used, spec_number + 1)
        refuse_if(dtype > 2, f"tensor[{i}].dtype", dtype)
        refuse_if(any(reserved), f"tensor[{i}].reserved", reserved)
        refuse_if(not shape_fits(shapes[i], count), f"tensor[{i}].shape", f"{shapes[i]} of {count} elements")
        narrow = spec.name in ("topk", "casq") and spec.parameters["mode"] == "paper"
        refuse_if(narrow and count > M32, f"tensor[{i}].count", f"{count}, {spec.text} takes 2^32 - 1")
        begin = div_up(free, 32) * 32 if spec.name not in ("topk", "fft") and count >= 1024 else free
        refuse_if(offset != 4 * begin, f"tensor[{i}].offset", f"{offset}, expected {4 * begin}")
        regions.append((free, begin, begin + region_words(spec, count)))
        rows.append(Tensor(name_hash, count, first, spec, spec.table, dtype, shapes[i], None, None))
        free = regions[-1][2]
    refuse_if(used != spec_count, "spec_count", f"{spec_count}, but {used} are used")
    refuse_if(any(message[shapes_end:head_bytes]), "head_bytes", "padding after the shapes is not zero")
    refuse_if(total_bytes != head_bytes + 4 * free, "total_bytes", f"{total_bytes}, needed {head_bytes + 4 * free}")

    words = np.frombuffer(message, "<u4", offset=head_bytes)
    refuse_if(body_check(words) != body_check_sent, "body_check", "does not match")
    tensors = []
    for row, (free, begin, end) in zip(rows, regions):
        refuse_if(words[free:begin].any(), "padding", "a word between regions is not zero")
        bits, slack = decode_region(row.spec, words[begin:end], row.count, row.first)
        tensors.append(row._replace(spec=row.spec.text, values=bits.astype("<u4").view("<f4"), slack=slack))
    return Message(step, stage, rank, world, tensors)
