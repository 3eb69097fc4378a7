# SPDX-License-Identifier: Apache-2.0
"""A second decoder, written from docs/wire-format.md alone.

The document promises that it suffices. This file is the proof: it knows nothing of the library, shares no code with
it, and uses the document's words as its names (head, spec, row, region, unit, block, lane, side value, marker). The
checks stand in the order of the document's section 9; the head is read field by field, the body in whole arrays.

    decode(bytes) -> Message         or Refused, whose .field is the right column of the document's section 9

Bits are never trusted to a float: values are built as u32 patterns, so that -0, subnormals and the marker stay what
they are. Where codes are cut from words, the document's *string of bits* is taken at its word: the words of a lane are
laid end to end, opened to single bits, and every b bits make a code.
"""

import re
import struct
from collections import namedtuple

import numpy as np

MARKER = 0x7FC00000
INFINITY = 0x7F800000
M32, M64 = 2**32 - 1, 2**64 - 1

Message = namedtuple("Message", "step stage rank world tensors")
Tensor = namedtuple("Tensor", "name_hash count first spec dtype values")  # values: f32
Spec = namedtuple("Spec", "text name parameters")


class Refused(Exception):
    def __init__(self, field, why):
        super().__init__(f"{field}: {why}")
        self.field = field


def refuse_if(broken, field, why):
    if broken:
        raise Refused(field, why)


def div_up(a, b):
    return -(-a // b)


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


# Specs (section 3).

def one_of(*allowed):
    return {str(value): value for value in allowed}.get


def real(low, high):
    def parse(text):
        if not re.fullmatch(r"[0-9]+(\.[0-9]+)?(e-[0-9]+)?", text):
            return None
        value = float(text)
        return value if low <= value <= high and repr(value).removesuffix(".0") == text else None

    return parse


MODE = ("mode", one_of("tile", "paper"))
CODECS = {
    "fp32": [], "fp16": [], "bf16": [],
    "qsgd": [("bits", one_of(*range(2, 9))), ("bucket", one_of(*(2**n for n in range(6, 16)))),
             ("norm", one_of("max", "l2")), ("rounding", one_of("random", "nearest"))],
    "terngrad": [("clip", real(0, 100)), MODE],
    "onebit": [MODE],
    "topk": [("ratio", real(0.000001, 1)), MODE],
}


def parse_spec(raw):
    refuse_if(not raw.isascii(), "spec", f"{raw!r} is not ASCII")
    text = raw.decode("ascii")
    name, colon, rest = text.partition(":")
    refuse_if(name not in CODECS, "spec", f"unknown codec in {text!r}")
    given = rest.split(",") if colon else []
    refuse_if(len(given) != len(CODECS[name]), "spec", f"{text!r} has {len(given)} parameters")
    parameters = {}
    for item, (parameter, parse) in zip(given, CODECS[name]):
        key, _, value = item.partition("=")
        parameters[key] = parse(value) if key == parameter else None
        refuse_if(parameters[key] is None, "spec", f"{item!r} in {text!r}, expected a canonical {parameter}")
    return Spec(text, name, parameters)


# Regions (section 5).

def unit_elements(spec, count):
    if spec.name in ("fp32", "fp16", "bf16"):
        return 1
    if spec.name == "qsgd":
        return spec.parameters["bucket"]
    return 32768 if spec.parameters["mode"] == "tile" else count


CODE_BITS = {"fp32": 32, "fp16": 16, "bf16": 16, "terngrad": 2, "onebit": 1}  # qsgd: a parameter
SIDE_WORDS = {"fp32": 0, "fp16": 0, "bf16": 0, "qsgd": 1, "terngrad": 1, "onebit": 2}


def code_bits(spec):
    return CODE_BITS.get(spec.name) or spec.parameters["bits"]


def kept(spec, elements):
    want = spec.parameters["ratio"] * float(elements)
    k = int(want)
    return min(max(k + (k < want), 1), elements)


def topk_words(spec, elements, wide):
    k = kept(spec, elements)
    return k + (k if wide else div_up(k, 2))


def region_words(spec, count):
    if count == 0:
        return 0
    u = unit_elements(spec, count)
    if spec.name == "topk":
        return sum(topk_words(spec, min(u, count - start), u > 65536) for start in range(0, count, u))
    b = code_bits(spec)
    return count // 1024 * 32 * b + div_up(count % 1024 * b, 32) + div_up(count, u) * SIDE_WORDS[spec.name]


def bits_of(words):
    """The string of bits that words make along the last axis."""
    return np.unpackbits(np.ascontiguousarray(words, "<u4").view(np.uint8), axis=-1, bitorder="little")


def codes_of(bits, b):
    """Every b bits of the last axis make a code, least significant bit first."""
    return bits.reshape(*bits.shape[:-1], bits.shape[-1] // b, b) @ (np.uint64(1) << np.arange(b, dtype=np.uint64))


def unpack(region, count, b):
    """The codes of a region and its side words."""
    blocks, tail = divmod(count, 1024)
    full_words, tail_words = blocks * 32 * b, div_up(tail * b, 32)
    lanes = region[:full_words].reshape(blocks, b, 32).swapaxes(1, 2)  # block, lane, word of the lane's string
    full = codes_of(bits_of(lanes), b).swapaxes(1, 2)  # block, row, lane: the order of the elements
    string = bits_of(region[full_words : full_words + tail_words])
    refuse_if(string[tail * b :].any(), "padding", "an unused bit after the codes is set")
    codes = np.concatenate([full.reshape(-1), codes_of(string[: tail * b], b)]).astype(np.uint32)
    return codes, region[full_words + tail_words :]


# Values (sections 6, 7). Each decoder returns the bits of the tensor's f32 values.

def decode_plain(spec, region, count):
    codes, _ = unpack(region, count, code_bits(spec))
    infinity, marker = {"fp32": (INFINITY, MARKER), "fp16": (0x7C00, 0x7E00), "bf16": (0x7F80, 0x7FC0)}[spec.name]
    marked = codes == marker
    magnitude = codes & np.uint32(0x7FFFFFFF if spec.name == "fp32" else 0x7FFF)
    refuse_if(((magnitude >= infinity) & ~marked).any(), "codes", "Inf, or a NaN that is not the marker")
    if spec.name == "fp16":
        bits = np.where(marked, 0, codes).astype("<u2").view("<f2").astype("<f4").view("<u4")
    else:
        bits = codes if spec.name == "fp32" else codes << np.uint32(16)
    return np.where(marked, np.uint32(MARKER), bits)


def decode_levels(spec, region, count):
    b, u = code_bits(spec), unit_elements(spec, count)
    codes, side = unpack(region, count, b)
    marked = side == MARKER
    refuse_if(((side >= INFINITY) & ~marked).any(), "side", "a norm is negative, Inf or a NaN that is not the marker")
    refuse_if((codes == 2**b - 1).any(), "codes", f"code {2**b - 1} means nothing")
    top = 2 ** (b - 1) - 1
    norm = np.where(marked, 0, side).astype("<u4").view("<f4")
    with np.errstate(over="ignore", under="ignore"):
        a = norm / np.float32(top)
        beyond = np.isinf(a * np.float32(top))
        a = (a.view("<u4") - beyond.astype("<u4")).view("<f4")  # next_below
        unit = np.arange(count) // u
        values = (codes.astype(np.int32) - top).astype("<f4") * a[unit]
    return np.where(marked[unit], np.uint32(MARKER), values.view("<u4"))


def decode_onebit(spec, region, count):
    codes, side = unpack(region, count, 1)
    side = side.reshape(-1, 2)
    marked = (side == MARKER).all(axis=1)
    first = side[:, 0] < INFINITY
    second = (side[:, 1] == 0) | (side[:, 1] > 0x80000000) & (side[:, 1] < 0xFF800000)
    refuse_if((~(first & second) & ~marked).any(), "side", "neither +0 or positive, then +0 or negative; nor marked")
    return side[np.arange(count) // unit_elements(spec, count), codes]  # a marked unit has the marker at both


def decode_topk(spec, region, count):
    u = unit_elements(spec, count)
    bits, at = np.zeros(count, np.uint32), 0
    for start in range(0, count, u):
        elements = min(u, count - start)
        k = kept(spec, elements)
        values, words = region[at : at + k], region[at + k : at + topk_words(spec, elements, u > 65536)]
        at += k + words.size
        marked = values[0] == MARKER
        lie = values[1:].any() if marked else ((values & np.uint32(0x7FFFFFFF)) >= INFINITY).any()
        refuse_if(lie, "values", "Inf, a NaN that is not the marker, or a value beside the marker")
        indices = (words if u > 65536 else np.ascontiguousarray(words).view("<u2")).astype(np.int64)
        refuse_if(indices[k:].any(), "indices", "the unused half word is not zero")
        indices = indices[:k]
        refuse_if((indices >= elements).any() or (np.diff(indices) <= 0).any(), "indices", "too large or not ascending")
        refuse_if(marked and indices[-1] != k - 1, "indices", "index j of a marked unit is not j")
        bits[start + indices] = values
        if marked:
            bits[start : start + elements] = MARKER
    return bits


DECODERS = {"fp32": decode_plain, "fp16": decode_plain, "bf16": decode_plain, "qsgd": decode_levels,
            "terngrad": decode_levels, "onebit": decode_onebit, "topk": decode_topk}


# The message (sections 2, 4 and 9).

def read_specs(message, spec_count, head_bytes):
    specs, at = [], 64
    for _ in range(spec_count):
        refuse_if(at + 4 > head_bytes, "spec", "begins beyond the head")
        length, spec_table = struct.unpack_from("<HH", message, at)
        refuse_if(spec_table != 0, "spec_table", f"{spec_table}, expected 0")
        text, end = at + 4, at + 4 + div_up(length, 4) * 4
        refuse_if(end > head_bytes, "spec", "ends beyond the head")
        refuse_if(any(message[text + length : end]), "spec", "is not padded with zeros")
        specs.append(parse_spec(message[text : text + length]))
        refuse_if(specs[-1] in specs[:-1], "spec", f"{specs[-1].text!r} stands there twice")
        at = end
    return specs, at


def decode(message, limit=2**26):
    """limit: the most elements that the caller lets a message decode to."""
    refuse_if(len(message) < 64, "total_bytes", f"{len(message)} bytes are there, a header takes 64")
    (magic, version, flags, total_bytes, step, stage, rank, world, spec_count, tensor_count, head_bytes,
     head_check_sent, body_check_sent) = struct.unpack_from("<4sHHQQ6IQQ", message)
    refuse_if(magic != b"GWIR", "magic", magic)
    refuse_if(version != 1, "version", f"{version}, expected 1")
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
    refuse_if(div_up(table_end, 32) * 32 != head_bytes, "head_bytes", f"{head_bytes}, the table ends at {table_end}")

    rows, regions, free, elements, used = [], [], 0, 0, 0
    for i, row in enumerate(struct.iter_unpack("<QQQQHB5s", message[at:table_end])):
        name_hash, count, first, offset, spec_number, dtype, reserved = row
        spec = specs[spec_number] if spec_number < spec_count else None
        elements += count
        refuse_if(elements > limit, f"tensor[{i}].count", f"{count}, the limit of all is {limit}")
        refuse_if(first % 32768 or first > 2**40, f"tensor[{i}].first", first)
        refuse_if(spec is None or spec_number > used, f"tensor[{i}].spec", f"{spec_number}, at most {used}")
        used = max(used, spec_number + 1)
        refuse_if(dtype > 2, f"tensor[{i}].dtype", dtype)
        refuse_if(any(reserved), f"tensor[{i}].reserved", reserved)
        narrow = spec.name == "topk" and spec.parameters["mode"] == "paper"
        refuse_if(narrow and count > M32, f"tensor[{i}].count", f"{count}, topk:...,mode=paper takes 2^32 - 1")
        begin = div_up(free, 32) * 32 if spec.name != "topk" and count >= 1024 else free
        refuse_if(offset != 4 * begin, f"tensor[{i}].offset", f"{offset}, expected {4 * begin}")
        regions.append((free, begin, begin + region_words(spec, count)))
        rows.append(Tensor(name_hash, count, first, spec, dtype, None))
        free = regions[-1][2]
    refuse_if(used != spec_count, "spec_count", f"{spec_count}, but {used} are used")
    refuse_if(any(message[table_end:head_bytes]), "head_bytes", "padding after the table is not zero")
    refuse_if(total_bytes != head_bytes + 4 * free, "total_bytes", f"{total_bytes}, needed {head_bytes + 4 * free}")

    words = np.frombuffer(message, "<u4", offset=head_bytes)
    refuse_if(body_check(words) != body_check_sent, "body_check", "does not match")
    tensors = []
    for row, (free, begin, end) in zip(rows, regions):
        refuse_if(words[free:begin].any(), "padding", "a word between regions is not zero")
        bits = DECODERS[row.spec.name](row.spec, words[begin:end], row.count) if row.count else np.zeros(0, np.uint32)
        tensors.append(row._replace(spec=row.spec.text, values=bits.astype("<u4").view("<f4")))
    return Message(step, stage, rank, world, tensors)
