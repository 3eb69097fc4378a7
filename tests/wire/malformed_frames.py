# SPDX-License-Identifier: Apache-2.0
"""Malformed frames: golden frames with one wrong thing in them and the checksums made right again (reseal), so that
only the rule in question can refuse them. An entry is a rule of section 9 of docs/wire-format.md, a frame, an edit, and
the field that the refusal must name.

An edit changes a bytearray in place. put overwrites bytes, swap and text replace text of the specs, table gives the
first spec another table; those that change the head's length keep rows and body as they are.
"""

import struct
from pathlib import Path

import numpy as np

import second_decoder as second
import second_specs as specs

GOLDEN = Path(__file__).resolve().parent / "golden"


def golden(name):
    return (GOLDEN / f"{name}.gw").read_bytes()


def head_bytes_of(message):
    return struct.unpack_from("<I", message, 44)[0]


def words_of(message):
    return np.frombuffer(message[head_bytes_of(message):], "<u4")


def reseal(message):
    """The same message with both checks made right."""
    head_bytes = head_bytes_of(message)
    checks = second.head_check(message, head_bytes), second.body_check(words_of(message))
    return message[:48] + struct.pack("<QQ", *checks) + message[64:]


def put(anchor, offset, form, *values):
    """Overwrites bytes; offset counts from the header, the table's first row, the shapes, the body, or
    back from the end."""

    def edit(message):
        spec_count, tensor_count = struct.unpack_from("<II", message, 36)
        start = {"header": 0, "body": head_bytes_of(message), "end": len(message)}
        start["row"] = second.read_specs(bytes(message), spec_count, start["body"])[1]
        start["shapes"] = start["row"] + 40 * tensor_count
        struct.pack_into("<" + form, message, start[anchor] + offset, *values)

    return edit


def swap(old, new):
    """Replaces text of the same length in the specs."""

    def edit(message):
        assert len(old) == len(new) and message.count(old) == 1
        message[:] = message.replace(old, new)

    return edit


def text(old, new):
    """Replaces text of the first spec by that of another length, and makes room for it."""

    def edit(message):
        entries = entries_of(message)
        assert entries[0][0].count(old) == 1
        entries[0] = entries[0][0].replace(old, new), entries[0][1]
        rewrite(message, entries)

    return edit


def table(*words):
    """Gives the first spec another table: floats are f32, integers words as they are."""

    def edit(message):
        entries = entries_of(message)
        entries[0] = entries[0][0], [specs.f32_bits(word) if isinstance(word, float) else word for word in words]
        rewrite(message, entries)

    return edit


def twice(number, other):
    """Puts one spec in the place of another: both had the same text."""

    def edit(message):
        entries = entries_of(message)
        assert entries[number][0] == entries[other][0] and entries[number] != entries[other]
        entries[number] = entries[other]
        rewrite(message, entries)

    return edit


def words_of_double(value):
    return struct.unpack("<2I", struct.pack("<d", value))


def entries_of(message):
    """Text and table of every spec."""
    spec_count, = struct.unpack_from("<I", message, 36)
    found, _ = second.read_specs(bytes(message), spec_count, head_bytes_of(message))
    return [(spec.text.encode(), list(spec.table)) for spec in found]


def rewrite(message, entries):
    """The same rows and body under other specs."""
    spec_count, tensor_count, head_bytes = struct.unpack_from("<III", message, 36)
    row = second.read_specs(bytes(message), spec_count, head_bytes)[1]
    head = message[:64]
    for spec, words in entries:
        head += struct.pack("<HH", len(spec), 4 * len(words)) + spec + bytes(-len(spec) % 4)
        head += struct.pack(f"<{len(words)}I", *words)
    head += message[row : row + 40 * tensor_count]
    head += bytes(-len(head) % 32)
    message[:head_bytes] = head
    struct.pack_into("<Q", message, 8, len(message))
    struct.pack_into("<I", message, 44, len(head))


def append_word(message):
    message += bytes(4)
    struct.pack_into("<Q", message, 8, len(message))


MARKER, QNAN, INF, MINUS_ZERO = 0x7FC00000, 0x7FC00001, 0x7F800000, 0x80000000
# In mixed, the regions are qsgd 1030 (131 words), fp32 10, onebit 0, then 19 words of padding up to onebit 1024; the
# row of bf16 has 3 elements and so 2 words, as topk would have for them. Rows 3 and 6 of 40 bytes are meant below.
MALFORMED = [
    (2, "fp32_1", put("header", 0, "4s", b"GWIS"), "magic"),
    (3, "fp32_1", put("header", 4, "H", 1), "version"),
    (3, "fp32_1", put("header", 4, "H", 3), "version"),
    (4, "fp32_1", put("header", 8, "Q", 2**63), "total_bytes"),
    (5, "fp32_1", put("header", 44, "I", 32), "head_bytes"),
    (5, "fp32_1", put("header", 44, "I", 100), "head_bytes"),
    (5, "fp32_1", put("header", 44, "I", 160), "head_bytes"),
    (7, "fp32_1", put("header", 6, "H", 1), "flags"),
    (8, "fp32_1", put("header", 32, "I", 0), "world"),
    (9, "fp32_1", put("header", 28, "I", 1), "rank"),
    (10, "fp32_1", put("header", 36, "I", 2), "spec_count"),
    (10, "fp32_1", put("header", 36, "II", 65536, 65536), "spec_count"),
    (11, "fp32_1", put("header", 40, "I", 2**20 + 1), "tensor_count"),
    (12, "fp32_1", put("header", 66, "H", 1), "spec_table"),
    (12, "fp32_1", put("header", 66, "H", 4), "spec_table"),  # zeros, but fp32 has no table
    (12, "loggrid_33", put("header", 66, "H", 4), "spec_table"),
    (12, "optquant_fitted2", table(-1.0, 0.5), "spec_table"),
    (12, "optquant_fitted2", table(-1.0, -0.5, 0.0, 0.5, 1.0), "spec_table"),
    (12, "optquant_fitted2", table(-1.0, -0.0, 0.0, 1.0), "spec_table"),
    (12, "optquant_fitted2", table(-1.0, 0.5, 0.25, 1.0), "spec_table"),
    (12, "optquant_fitted2", table(-1.0, -0.5, 0.5, QNAN), "spec_table"),
    (12, "optquant_fitted2", table(-1.0, -0.5, 0.5, 1.5), "spec_table"),
    (12, "optquant_fitted2", table(-1.0, 0.0, 0.5), "spec_table"),
    (12, "optquant_fitted2", table(-0.5, 0.0, 0.5, 1.0), "spec_table"),
    (12, "optquant_biased2", table(-1.5, 0.0, 0.5, 1.0), "spec_table"),
    (12, "dqsgd_bits9", table(17), "spec_table"),
    (12, "dqsgd_33", table(1), "spec_table"),
    (12, "dqsgd_33", table(4, 0), "spec_table"),
    (12, "rangefloat_33", table(0), "spec_table"),
    (12, "rangefloat_33", table(7), "spec_table"),
    (12, "rangefloat_33", table(4, 4), "spec_table"),
    (12, "rangefloat_mantissa", table(1), "spec_table"),
    (12, "casq_33", table(-1.0, 0.0, 1.0, 0, 1, 2), "spec_table"),
    (12, "casq_33", table(-1.0, 0.0, 1.0, 0, 1, 2, 2), "spec_table"),
    (12, "casq_33", table(-1.0, 0.0, 1.0, 0, 1, 2, 4), "spec_table"),
    (12, "casq_33", table(-1.0, 0.5, 1.0, 0, 1, 2, 3), "spec_table"),
    (12, "casq_33", table(1.0, 0.0, 2.0, 0, 1, 2, 3), "spec_table"),
    (12, "casq_33", table(-1.0, 0.0, INF, 0, 1, 2, 3), "spec_table"),
    (12, "casq_33", table(QNAN, 0.0, 1.0, 0, 1, 2, 3), "spec_table"),
    (12, "casq_paper_1", table(-1.0, 0.0, 1.0, 65536, 1, 0, 0), "spec_table"),
    (12, "casq_paper_1", table(-1.0, 0.0, 1.0, 2**31, 2**31, 0, 0), "spec_table"),
    (12, "fft_33", table(6, 0), "spec_table"),
    (12, "fft_33", table(0, *words_of_double(0.85)), "spec_table"),
    (12, "fft_33", table(9, *words_of_double(0.85)), "spec_table"),
    (12, "fft_mantissa", table(2, *words_of_double(0.85)), "spec_table"),
    (12, "fft_33", table(6, *words_of_double(1.0)), "spec_table"),
    (12, "fft_33", table(6, *words_of_double(-0.1)), "spec_table"),
    (12, "fft_33", table(6, *words_of_double(float("nan"))), "spec_table"),
    (13, "optquant_fitted2", put("header", 66, "H", 128), "spec"),  # the table ends beyond the head
    (13, "fp32_1", put("header", 64, "H", 61), "spec"),
    (13, "fp32_1", put("header", 64, "H", 0), "spec"),
    (13, "qsgd_33", put("header", 44, "I", 96), "spec"),  # the first spec ends beyond the head
    (13, "terngrad_1025", put("header", 36, "III", 2, 2, 96), "spec"),  # the second begins there
    (13, "qsgd_33", put("header", 64, "H", 32), "spec"),  # qsgd:bits=4,bucket=1024,norm=max
    (13, "terngrad_clip0", put("header", 68 + 25, "B", 1), "spec"),
    (13, "fp32_1", swap(b"fp32", b"fp33"), "spec"),
    (13, "fp32_1", swap(b"fp32", b"FP32"), "spec"),
    (13, "fp32_1", swap(b"fp32", b"fp3\xb2"), "spec"),
    (13, "qsgd_33", swap(b"bits=4", b"bots=4"), "spec"),
    (13, "qsgd_33", swap(b"bits=4", b"bits=9"), "spec"),
    (13, "qsgd_33", swap(b"bucket=1024", b"bucket=1025"), "spec"),
    (13, "qsgd_33", swap(b"bucket=1024", b"bucket=0512"), "spec"),
    (13, "qsgd_33", swap(b"bits=4,bucket=1024", b"bucket=1024,bits=4"), "spec"),
    (13, "qsgd_33", swap(b",rounding=random", b"                "), "spec"),
    (13, "terngrad_1025", swap(b"clip=2.5", b"clip=2.0"), "spec"),
    (13, "terngrad_1025", swap(b"clip=2.5", b"clip=1e2"), "spec"),
    (13, "terngrad_1025", swap(b"clip=2.5", b"clip=101"), "spec"),
    (13, "terngrad_1025", swap(b"clip=2.5", b"clip=nan"), "spec"),
    (13, "topk_1200", swap(b"ratio=0.01", b"ratio=0.00"), "spec"),
    (13, "mixed", swap(b"bf16", b"fp32"), "spec"),
    (13, "mixed_tables", twice(2, 0), "spec"),
    (13, "optquant_33", swap(b"kappa=0.5", b"kappa=0.6"), "spec"),
    (13, "optquant_33", text(b"kappa=0.5", b"kappa=0.5,workers=1"), "spec"),  # says how a sender learns
    (13, "optquant_33", text(b"kappa=0.5", b"kappa=0.5,workers=1,refit=100"), "spec"),
    (13, "dqsgd_33", text(b"bucket=1024", b"bucket=1024,mode=lag"), "spec"),
    (13, "casq_3", text(b"counts=off", b"counts=off,start=0"), "spec"),
    (13, "fft_33", text(b"mode=round", b"mode=round,schedule=constant"), "spec"),
    (13, "dqsgd_33", swap(b"min=2,max=16", b"min=8,max=07"), "spec"),
    (13, "dqsgd_33", text(b"min=2,max=16", b"min=8,max=7"), "spec"),
    (13, "rangefloat_33", swap(b"mantissa=0", b"mantissa=7"), "spec"),
    (13, "rangefloat_33", swap(b"eps=0", b"eps=1"), "spec"),
    (13, "rangefloat_33", text(b"min=0", b"min=-1"), "spec"),
    (13, "rangefloat_33", text(b"min=0", b"min=-0"), "spec"),
    (13, "rangefloat_33", text(b"max=0,eps=0", b"max=1,eps=2"), "spec"),  # base above last
    (13, "rangefloat_33", text(b"max=0,eps=0", b"max=1,eps=1e-05"), "spec"),  # top above 2^bits - 1
    (13, "rangefloat_33", text(b"min=0,max=0,eps=0", b"min=-0.25,max=1,eps=0.5"), "spec"),  # low below base
    (13, "rangefloat_33", text(b"max=0", b"max=3e38"), "spec"),
    (13, "loggrid_33", text(b"k=2", b"k=31"), "spec"),
    (13, "unigrid_33", text(b"bits=8", b"bits=17"), "spec"),
    (13, "unigrid_33", text(b"range=0", b"range=1e-5"), "spec"),
    (13, "casq_3", text(b"budget=0.0625", b"budget=0"), "spec"),
    (13, "casq_3", text(b"counts=off", b"counts=no"), "spec"),
    (13, "casq_3", text(b"counts=off", b"counts=on"), "spec"),  # only with mode=paper
    (13, "fft_33", text(b"chunk=1024", b"chunk=8192"), "spec"),
    (13, "fft_33", swap(b"theta=0.85", b"theta=1.00"), "spec"),
    (13, "fft_mantissa", text(b"bits=16,mantissa=1", b"bits=10,mantissa=9"), "spec"),
    (14, "mixed", put("header", 40, "I", 9), "head_bytes"),
    (14, "shapes", put("row", 35, "B", 9), "tensor[0].dims"),
    (14, "shapes", put("row", 40 + 35, "B", 255), "tensor[1].dims"),
    (14, "shapes", put("row", 40 + 35, "B", 8), "head_bytes"),
    (14, "fp16_33", put("header", 44, "I", 160), "head_bytes"),
    (15, "fp32_1", put("row", 8, "Q", 2**41), "tensor[0].count"),
    (15, "mixed", put("row", 40 + 8, "Q", 2**64 - 1030), "tensor[1].count"),
    (15, "fp32_1", put("row", 8, "Q", 2**62), "tensor[0].count"),  # 4 * count wraps
    (16, "fp32_1", put("row", 16, "Q", 1024), "tensor[0].first"),
    (16, "fp32_1", put("row", 16, "Q", 2**40 + 32768), "tensor[0].first"),
    (17, "fp32_1", put("row", 32, "H", 1), "tensor[0].spec"),
    (17, "mixed", put("row", 32, "H", 1), "tensor[0].spec"),
    (18, "fp32_1", put("row", 34, "B", 3), "tensor[0].dtype"),
    (19, "fp32_1", put("row", 36, "B", 1), "tensor[0].reserved"),
    (19, "fp32_1", put("row", 39, "B", 1), "tensor[0].reserved"),
    (19, "shapes", put("shapes", 0, "Q", 4), "tensor[0].shape"),
    (19, "shapes", put("shapes", 0, "Q", 0), "tensor[0].shape"),
    (19, "shapes", put("shapes", 0, "QQ", 2**63, 2), "tensor[0].shape"),  # a product of 64 bits wraps
    (19, "shapes", put("shapes", 8 * 3, "Q", 2), "tensor[2].shape"),
    (19, "shapes", put("shapes", 8 * (3 + 8 + 1), "Q", 2**40 + 1), "tensor[3].shape"),
    (19, "shapes", put("row", 2 * 40 + 8, "Q", 25), "tensor[2].shape"),
    (20, "fp32_1", put("row", 24, "Q", 4), "tensor[0].offset"),
    (20, "mixed", put("row", 3 * 40 + 24, "Q", 4 * 141), "tensor[3].offset"),
    (21, "mixed", put("row", 6 * 40 + 32, "H", 3), "spec_count"),
    (21, "fp32_1", put("body", -1, "B", 1), "head_bytes"),
    (21, "fp32_1", put("row", 8, "Q", 2), "total_bytes"),
    (21, "fp32_1", append_word, "total_bytes"),
    (23, "mixed", put("body", 4 * 150, "I", 1), "padding"),
    (23, "fp16_33", put("end", -2, "H", 1), "padding"),
    (23, "qsgd_33", put("end", -5, "B", 0x10), "padding"),
    (23, "unigrid_33", put("end", -5, "B", 1), "padding"),
    (23, "casq_odd", put("end", -2, "H", 1), "padding"),  # 15 means
    (23, "fft_33", put("end", -5, "B", 0x80), "padding"),  # 5 bins take 100 bits
    (24, "qsgd_33", put("end", -4, "I", MINUS_ZERO), "scales"),
    (24, "qsgd_33", put("end", -4, "I", INF), "scales"),
    (24, "qsgd_33", put("end", -4, "I", QNAN), "scales"),
    (24, "terngrad_clip0", put("end", -4, "I", 0xFFC00000), "scales"),
    (24, "onebit_paper", put("end", -8, "I", MARKER), "scales"),
    (24, "onebit_paper", put("end", -4, "I", MARKER), "scales"),
    (24, "onebit_paper", put("end", -8, "I", MINUS_ZERO), "scales"),
    (24, "onebit_paper", put("end", -4, "I", MINUS_ZERO), "scales"),
    (24, "onebit_paper", put("end", -4, "I", 0x3F800000), "scales"),
    (24, "onebit_paper", put("end", -4, "I", 0xFF800000), "scales"),
    (24, "optquant_33", put("end", -4, "I", MINUS_ZERO), "scales"),
    (24, "dqsgd_33", put("end", -4, "I", INF), "scales"),
    (24, "rangefloat_33", put("end", -4, "I", 0xBF800000), "scales"),
    (24, "rangefloat_max", put("end", -4, "I", 0x3F800000), "scales"),  # finite, but not f32(max)
    (24, "loggrid_33", put("end", -4, "I", QNAN), "scales"),
    (24, "unigrid_33", put("end", -4, "I", 0xFFC00000), "scales"),
    (24, "unigrid_range", put("end", -4, "I", 0), "scales"),
    (24, "casq_paper_1", put("body", 4, "I", MINUS_ZERO), "scales"),
    (24, "casq_3", put("body", 4, "I", INF), "scales"),
    (24, "fft_33", put("end", -4, "I", MINUS_ZERO), "scales"),
    (24, "fft_33", put("end", -4, "I", QNAN), "scales"),
    (25, "topk_1200", put("body", 0, "I", INF), "values"),
    (25, "topk_1200", put("body", 0, "I", QNAN), "values"),
    (25, "topk_not_finite", put("body", 4, "I", 0x3F800000), "values"),
    (25, "topk_1200", put("body", 4, "I", MARKER), "values"),
    (26, "topk_1200", put("body", 48, "HH", 5, 5), "indices"),
    (26, "topk_1200", put("body", 48, "HH", 6, 5), "indices"),
    (26, "topk_1200", put("end", -2, "H", 1200), "indices"),
    (26, "topk_not_finite", put("end", -4, "H", 209), "indices"),
    (26, "topk_not_finite", put("end", -2, "H", 1), "indices"),
    (26, "large_topk_paper", put("end", -4, "I", 70000), "indices"),
    # Two scales, 70 values of 2 bits in five words, 210 low bits in seven, 70 + 87 high bits in five.
    (13, "topk_bits2", swap(b",bits=2,index=coded", b",bits=9,index=coded"), "spec"),
    (13, "topk_bits2", swap(b",bits=2,index=coded", b",bits=2,index=codex"), "spec"),
    (13, "topk_bits2", swap(b"mode=tile,bits=2,index=coded", b"mode=tile,index=coded,bits=2"), "spec"),
    (13, "topk_bits16", swap(b",bits=16,index=coded", b",bits=32,index=raw,,"), "spec"),
    (24, "topk_bits2", put("body", 0, "I", MINUS_ZERO), "scales"),
    (24, "topk_bits2", put("body", 4, "I", INF), "scales"),
    (24, "topk_bits2", put("body", 4, "I", MARKER), "scales"),
    (24, "topk_bits2_not_finite", put("body", 4, "I", 1), "scales"),
    (23, "topk_bits2", put("body", 8 + 17, "B", 0xF0), "padding"),
    (25, "topk_bits2_not_finite", put("body", 8, "I", 1), "values"),
    (25, "topk_bits16", put("body", 2, "H", 0x7F80), "values"),
    (25, "topk_bits16_not_finite", put("body", 2, "H", 0x8000), "values"),
    (26, "topk_bits2", put("end", -20, "I", 0), "indices"),  # too few
    (26, "topk_bits2", put("end", -20, "I", 2**32 - 1), "indices"),  # too many
    (26, "topk_bits2", put("end", -1, "B", 0x80), "indices"),  # behind the string
    (26, "topk_bits2_not_finite", put("end", -4, "I", 1), "indices"),
    (26, "topk_bitmap", put("end", -4, "I", 2**32 - 1), "indices"),
    (27, "fp32_1", put("body", 0, "I", INF), "codes"),
    (27, "fp32_1", put("body", 0, "I", 0xFFC00000), "codes"),
    (27, "fp16_33", put("body", 0, "H", 0xFC00), "codes"),
    (27, "fp16_33", put("body", 2, "H", 0x7E01), "codes"),
    (27, "bf16_33", put("body", 0, "H", 0x7F80), "codes"),
    (27, "bf16_33", put("body", 2, "H", 0xFFC0), "codes"),
    (27, "qsgd_33", put("body", 0, "B", 0x7F), "codes"),
    (27, "qsgd_1025", put("body", 0, "B", 0xF7), "codes"),
    (27, "terngrad_clip0", put("body", 0, "B", 0x57), "codes"),
    (27, "optquant_fitted_short", put("body", 0, "B", 0xFF), "codes"),  # a level fewer than codes
    (27, "dqsgd_33", put("body", 0, "B", 0x7F), "codes"),
    (27, "dqsgd_bits16", put("body", 0, "H", 0xFFFF), "codes"),
    (27, "loggrid_33", put("body", 0, "B", 0x07), "codes"),
    (27, "loggrid_k0", put("body", 0, "B", 0x03), "codes"),
    (27, "loggrid_k30", put("body", 0, "B", 0x3F), "codes"),
    (27, "unigrid_33", put("body", 0, "B", 0xFF), "codes"),
    (27, "rangefloat_min_max_eps", put("body", 0, "H", 275), "codes"),
    (27, "fft_float", put("body", 4 * 16, "I", 0x3F800001), "codes"),  # after a bitmap of 16 words
    (27, "fft_float", put("body", 4 * 16, "I", MARKER), "codes"),
    (27, "fft_mantissa", put("body", 4 * 4, "H", 0xFFFF), "codes"),  # 255 positive and 255 negative ones
    (27, "fft_not_finite", put("body", 4 * 4, "I", 1), "codes"),
    (28, "casq_paper_1", put("body", 8, "I", INF), "buckets"),
    (28, "casq_paper_1", put("end", -4, "I", MARKER), "buckets"),  # a bucket that nothing uses
    (28, "casq_3", put("body", 8, "H", 0x4000), "buckets"),
    (28, "casq_3", put("body", 8, "H", 0xC000), "buckets"),
    (28, "casq_tile_not_finite", put("end", -4, "I", 1), "buckets"),
    (28, "casq_paper_not_finite", put("end", -4, "I", 1), "buckets"),  # a count
    (29, "fft_33", put("body", 0, "II", 0, 0), "bitmap"),
    (29, "fft_float", put("body", 0, "I", 0), "bitmap"),
    (29, "fft_not_finite", put("body", 0, "I", 1), "bitmap"),
]
