# SPDX-License-Identifier: Apache-2.0
"""The specs of the second decoder: their texts, their tables, and what stands in for a table that is not there.

Written from section 3 of docs/wire-format.md alone. parse_spec reads a text in canonical form and the words of its
table; the functions below it (levels, width, mantissa, theta, order_or_shares) say what a codec has learned, by its
table or by default. The numbers of a rangefloat stand here too, since a text is refused where they do not exist.
"""

import re
import struct
from collections import namedtuple

import numpy as np

Spec = namedtuple("Spec", "text name parameters table")  # table: a tuple of words, empty for none
Range = namedtuple("Range", "last base low top bottom")


class Refused(Exception):
    def __init__(self, field, why):
        super().__init__(f"{field}: {why}")
        self.field = field


def refuse_if(broken, field, why):
    if broken:
        raise Refused(field, why)


def div_up(a, b):
    return -(-a // b)


def floats_of(words):
    """f32 values of words; a copy, so that any kind of array or tuple will do."""
    return np.array(words, "<u4").view("<f4")


def f32_bits(real):
    return int(np.float32(real).view(np.uint32))


# Texts (section 3.1).

def one_of(*allowed):
    return {str(value): value for value in allowed}.get


def integer(low, high):
    def parse(text):
        return int(text) if re.fullmatch(r"0|[1-9][0-9]{0,18}", text) and low <= int(text) <= high else None

    return parse


def real(low, high):
    def parse(text):
        if not re.fullmatch(r"-?[0-9]+(\.[0-9]+)?(e[-+][0-9]+)?", text):
            return None
        value = float(text)
        canonical = "0" if value == 0 else repr(value).removesuffix(".0")
        return value if low <= value <= high and canonical == text else None

    return parse


MODE = ("mode", one_of("tile", "paper"))
ROUND_OR_PAPER = ("mode", one_of("round", "paper"))
BUCKET = ("bucket", one_of(*(2**n for n in range(6, 16))))
SCALE = ("scale", one_of("bucket", "tensor"))
NORM = ("norm", one_of("max", "l2"))
CODECS = {
    "fp32": [], "fp16": [], "bf16": [],
    "qsgd": [("bits", integer(2, 8)), BUCKET, NORM, ("rounding", one_of("random", "nearest"))],
    "terngrad": [("clip", real(0, 100)), MODE],
    "onebit": [MODE],
    "topk": [("ratio", real(0.000001, 1)), MODE],
    "optquant": [("bits", integer(2, 8)), BUCKET, ("mode", one_of("unbiased", "biased")), ("kappa", real(0, 0.5))],
    "dqsgd": [("budget", real(1, 16)), ("min", integer(2, 16)), ("max", integer(2, 16)), NORM, BUCKET],
    "rangefloat": [("bits", integer(4, 16)), ("mantissa", integer(0, 14)), ("min", real(-3e38, 0)),
                   ("max", real(0, 3e38)), ("eps", real(0, 3e38)), ROUND_OR_PAPER, SCALE, BUCKET],
    "loggrid": [("k", integer(0, 30)), SCALE, BUCKET],
    "unigrid": [("bits", integer(2, 16)), ("range", real(0, 3e38)), SCALE, BUCKET],
    "casq": [("bits", integer(1, 4)), ("budget", real(0.0001, 1)), MODE, ("counts", one_of("off", "on"))],
    "fft": [("theta", real(0, 0.9999)), ("chunk", one_of(*(2**n for n in range(8, 13)))),
            ("format", one_of("range", "float")), ("bits", integer(4, 16)), ("mantissa", integer(0, 14)),
            ROUND_OR_PAPER],
    "nuqsgd": [("bits", integer(2, 8)), BUCKET, NORM, ("rounding", one_of("random", "nearest"))],
}


# Parameters that came later, with the values that a text without them means. A text has all of a codec's, or none.
LATER = {"topk": [("bits", one_of(*range(1, 9), 16, 32), 32), ("index", one_of("raw", "coded", "bitmap"), "raw")]}


def parse_spec(raw, table=()):
    """Rule 13's part that concerns the text, then rule 12's that concerns the table."""
    refuse_if(not raw.isascii(), "spec", f"{raw!r} is not ASCII")
    text = raw.decode("ascii")
    name, colon, rest = text.partition(":")
    refuse_if(name not in CODECS, "spec", f"unknown codec in {text!r}")
    given = rest.split(",") if colon else []
    later, expected = LATER.get(name, []), CODECS[name]
    parameters = {parameter: value for parameter, _, value in later}
    if later and len(given) == len(expected) + len(later):
        expected = expected + [(parameter, parse) for parameter, parse, _ in later]
    refuse_if(len(given) != len(expected), "spec", f"{text!r} has {len(given)} parameters")
    for item, (parameter, parse) in zip(given, expected):
        key, _, value = item.partition("=")
        parameters[key] = parse(value) if key == parameter else None
        refuse_if(parameters[key] is None, "spec", f"{item!r} in {text!r}, expected a canonical {parameter}")
    refuse_if(len(expected) > len(CODECS[name]) and all(parameters[p] == value for p, _, value in later), "spec",
              f"{text!r} names what is left out where all of it has the first values")
    plain = Spec(text, name, parameters, ())
    refuse_if(not goes_together(plain), "spec", f"values of {text!r} do not go together")
    spec = plain._replace(table=tuple(int(word) for word in table))
    refuse_if(spec.table and not table_is_allowed(spec), "spec_table", f"{spec.table} with {text!r}")
    return spec


def goes_together(spec):
    p = spec.parameters
    if spec.name == "dqsgd":
        return p["min"] <= p["max"]
    if spec.name == "rangefloat":
        if p["mantissa"] > p["bits"] - 2:
            return False
        return range_exists(spec) if p["max"] > 0 else np.float32(p["eps"]) == 0 and np.float32(p["min"]) == 0
    if spec.name == "casq":
        return p["counts"] == "off" or p["mode"] == "paper"
    if spec.name == "topk":
        return p["mode"] == "tile" or (p["bits"], p["index"]) == (32, "raw")
    return spec.name != "fft" or p["mantissa"] <= p["bits"] - 2


# Tables (section 3.2), and what stands in for one that is not there.

def table_is_allowed(spec):
    p, table = spec.parameters, spec.table
    if spec.name == "optquant":
        level = floats_of(table)
        ends = (level[0], level[-1]) == (-1, 1) or p["mode"] == "biased"
        return (2 ** p["bits"] - level.size in (0, 1) and bool((np.abs(level) <= 1).all())
                and bool((level[1:] > level[:-1]).all()) and ends)
    if spec.name == "dqsgd":
        return len(table) == 1 and (table[0] == 0 or p["min"] <= table[0] <= p["max"])
    if spec.name == "rangefloat":
        return (len(table) == 1 and p["mantissa"] == 0 and 1 <= table[0] <= p["bits"] - 2
                and (p["max"] == 0 or range_exists(spec)))
    if spec.name == "casq":
        clusters = 2 ** p["bits"]
        if len(table) != 2 * clusters - 1:
            return False
        threshold, integers = floats_of(table[: clusters - 1]), table[clusters - 1 :]
        meant = sorted(integers) == list(range(clusters)) if p["mode"] == "tile" else sum(integers) <= 65536
        return (bool(np.isfinite(threshold).all()) and bool((threshold[1:] > threshold[:-1]).all())
                and threshold[clusters // 2 - 1] == 0 and meant)
    if spec.name == "fft":
        return (len(table) == 3 and 1 <= table[0] <= p["bits"] - 2 and p["mantissa"] in (0, table[0])
                and 0 <= theta(spec) < 1)
    return False


def levels(spec):
    if spec.table:
        return floats_of(spec.table)
    half = 2 ** (spec.parameters["bits"] - 1)
    root = (np.arange(half) + 0.5) / (half - 0.5)
    upper = (root * root).astype("<f4")
    return np.concatenate([-upper[::-1], upper])


def width(spec):
    p = spec.parameters
    return spec.table[0] if spec.table else min(max(int(p["budget"] + 0.5), p["min"]), p["max"])


def mantissa(spec):
    if spec.table:
        return spec.table[0]
    p = spec.parameters
    return p["mantissa"] or (p["bits"] - 4 if p["bits"] > 5 else 1)


def theta(spec):
    return struct.unpack("<d", struct.pack("<2I", *spec.table[1:]))[0] if spec.table else spec.parameters["theta"]


def order_or_shares(spec):
    clusters = 2 ** spec.parameters["bits"]
    half = clusters // 2
    if spec.table:
        return spec.table[clusters - 1 :]
    if spec.parameters["mode"] == "tile":
        return [c for i in range(half) for c in (clusters - 1 - i, i)]
    return [32768, 32768] if half == 1 else [32000] + [1536 // (clusters - 2)] * (clusters - 2) + [32000]


# The numbers of a rangefloat (section 7).

def fixed_range(spec):
    """The scale that every unit has, where the spec pins it, as a real; else 0."""
    return spec.parameters.get({"unigrid": "range", "rangefloat": "max"}.get(spec.name), 0)


def range_numbers(spec, norm_bits):
    """Of units whose norms have these bits, or of the fixed range."""
    p, shift, half = spec.parameters, 23 - mantissa(spec), 2 ** (spec.parameters["bits"] - 1)
    fixed = fixed_range(spec) > 0
    last = low = np.asarray(f32_bits(p["max"]) if fixed else norm_bits).astype(np.int64) >> shift
    base = np.maximum(last + 1 - half, 0)
    if fixed and np.float32(p["eps"]) > 0:
        base = np.asarray(f32_bits(p["eps"]) >> shift)
    if fixed and np.float32(-p["min"]) > 0:
        low = np.asarray(f32_bits(-p["min"]) >> shift)
    top = last - base + 1
    bottom = np.minimum(low - base + 1, 2 * half - 1 - top) if fixed else np.where(top < half, top, half - 1)
    return Range(last, base, low, top, bottom)


def range_exists(spec):
    r = range_numbers(spec, None)
    return bool(r.base <= r.last and r.top <= 2 ** spec.parameters["bits"] - 2 and r.low >= r.base)
