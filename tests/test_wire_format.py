# SPDX-License-Identifier: Apache-2.0
"""docs/wire-format.md suffices: second_decoder.py was written from it alone and reads every golden frame bit for bit.

The other half of the promise is what must be refused (section 9). A frame that is damaged is refused by its checksums;
a *lie* is a golden frame with one wrong thing in it and the checksums made right again (reseal), so that only the rule
in question can refuse it. The document's own examples and tables are read from its text and checked as well.
"""

import json
import re
import struct
from pathlib import Path

import numpy as np
import pytest

import second_decoder as second

HERE = Path(__file__).resolve().parent
GOLDEN = HERE / "golden"
DOCUMENT = (HERE.parent / "docs/wire-format.md").read_text(encoding="utf-8")
MANIFEST = json.loads((GOLDEN / "manifest.json").read_text(encoding="utf-8"))
FRAMES = MANIFEST["frames"] + MANIFEST["large"]
DTYPES = ["f32", "f16", "bf16"]
# The smallest frame of every codec that has elements.
SMALL = ["fp32_1", "fp16_33", "bf16_33", "qsgd_33", "terngrad_clip0", "onebit_paper", "topk_1200"]


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


def refused_field(message, **options):
    with pytest.raises(second.Refused) as refused:
        second.decode(message, **options)
    return refused.value.field


def bits(values):
    return np.ascontiguousarray(values, "<f4").view("<u4")


# What must be read.


def test_every_golden_message_is_in_the_manifest():
    assert MANIFEST["wire_format"] == 1
    assert {f"{frame['name']}.gw" for frame in FRAMES} == {path.name for path in GOLDEN.glob("*.gw")}
    assert len(FRAMES) == len({frame["name"] for frame in FRAMES}) > 0


@pytest.mark.parametrize("frame", FRAMES, ids=lambda frame: frame["name"])
def test_golden_frame_decodes_bit_for_bit(frame):
    message = golden(frame["name"])
    assert f"{second.xxh64(message):016x}" == frame["message_xxh64"]
    decoded = second.decode(message)
    assert decoded[:4] == tuple(frame[key] for key in ("step", "stage", "rank", "world"))
    assert [(t.name_hash, t.spec, t.count, t.first, DTYPES[t.dtype]) for t in decoded.tensors] == [
        (second.xxh64(t["name"].encode()), t["spec"], t["count"], t["first"], t["dtype"]) for t in frame["tensors"]]
    assert [t.values.size for t in decoded.tensors] == [t["count"] for t in frame["tensors"]]
    found = b"".join(t.values.tobytes() for t in decoded.tensors)
    if frame in MANIFEST["frames"]:
        expected = np.fromfile(GOLDEN / f"{frame['name']}.f32", "<u4")
        np.testing.assert_array_equal(np.frombuffer(found, "<u4"), expected)
    assert f"{second.xxh64(found):016x}" == frame["decoded_xxh64"]


@pytest.mark.parametrize("frame", FRAMES, ids=lambda frame: frame["name"])
def test_checksums_of_golden_frame(frame):
    message = golden(frame["name"])
    head_check, body_check = struct.unpack_from("<QQ", message, 48)
    assert second.head_check(message, head_bytes_of(message)) == head_check
    assert second.body_check(words_of(message)) == body_check
    assert reseal(message) == message


@pytest.mark.parametrize("text, check", [(b"", "ef46db3751d8e999"), (b"w", "2ba9b6baa653d9e3")])
def test_xxh64_of_the_document(text, check):
    assert f"{second.xxh64(text):016x}" == check and check in DOCUMENT


def test_weights_of_the_document():
    table = dict(re.findall(r"\| ((?:row_weight|lane_weight|mix32)\(\d+\)) \| ([0-9a-f]+) ", DOCUMENT))
    rows, lanes = second.row_weight(np.arange(2)), [second.lane_weight(lane) for lane in range(32)]
    assert int(table.pop("mix32(1)"), 16) | 1 == rows[1]
    assert table == {
        "row_weight(0)": f"{rows[0]:08x}", "row_weight(1)": f"{rows[1]:08x}",
        "lane_weight(0)": f"{lanes[0]:016x}", "lane_weight(1)": f"{lanes[1]:016x}",
        "lane_weight(31)": f"{lanes[31]:016x}"}


def worked_examples():
    for name, dump, prose in re.findall(r"### 14\.[1-7] (\w+)\n\n```\n(.*?)```\n(.*?)(?=\n##)", DOCUMENT, re.S):
        message = b"".join(bytes.fromhex(line[6:54]) for line in dump.splitlines())
        addresses = [int(line[:4], 16) for line in dump.splitlines()]
        decodes_to = re.findall(r"\(([0-9a-f]{8})\)", prose[re.search(r"Decodes\s+to", prose).end():])
        yield pytest.param(message, addresses, decodes_to, id=name)


def test_every_codec_has_a_worked_example():
    assert [example.id for example in worked_examples()] == list(second.CODECS)


@pytest.mark.parametrize("message, addresses, decodes_to", list(worked_examples()))
def test_worked_example_of_the_document(message, addresses, decodes_to):
    assert addresses == sorted(set(addresses)) and addresses[-1] < len(message)
    tensor, = second.decode(message).tensors
    assert [f"{pattern:08x}" for pattern in bits(tensor.values)] == decodes_to and len(decodes_to) == 5


def test_full_block_of_the_document():
    text = DOCUMENT[DOCUMENT.index("### 14.8"):]
    region = np.zeros(100, "<u4")
    for at, value in re.findall(r"^\| (\d+) \| ([0-9a-f]{8}) \|", text, re.M):
        region[int(at)] = int(value, 16)
    region[97:] = [int(value, 16) for value in re.search(r"\| 97, 98, 99 \| ([0-9a-f, ]+) \|", text)[1].split(", ")]
    spec = second.parse_spec(b"qsgd:bits=3,bucket=512,norm=max,rounding=nearest")
    assert second.region_words(spec, 1025) == 100
    values = second.decode_levels(spec, region, 1025).view("<f4")
    lane = np.arange(0, 1025, 32)  # lane 0 of the block, and the partial block's element
    x = ((37 * lane) % 101 - 50).astype(np.float32)
    assert np.abs(values[lane] - x).max() <= 50 / 3 / 2 * (1 + 2**-16)  # half a step; one unit of y is 2^-16 of a step
    assert [f"{values[i]:.8g}" for i in (0, 32, 320)] == ["-50", "16.666666", "-33.333332"]


def test_sizes_of_the_document():
    text = DOCUMENT[DOCUMENT.index("## 13."):DOCUMENT.index("## 14.")]
    rows = re.findall(r"^\| `(.*?)` \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|$", text, re.M)
    assert len(rows) >= 10
    for spec, head_bytes, *sizes in rows:
        assert int(head_bytes) == second.div_up(64 + 4 + second.div_up(len(spec), 4) * 4 + 40, 32) * 32
        parsed = second.parse_spec(spec.encode())
        assert [4 * second.region_words(parsed, count) for count in (5, 1000, 1000000)] == [int(s) for s in sizes]


# What must be refused.


@pytest.mark.parametrize("name", SMALL + ["empty"])
def test_truncated_frame_is_refused(name):
    message = golden(name)
    assert {refused_field(message[:size]) for size in range(len(message))} == {"total_bytes"}
    assert refused_field(message + b"\0") == "total_bytes"


def field_of_byte(at, head_bytes):
    fields = {range(0, 4): {"magic"}, range(4, 6): {"version"}, range(8, 16): {"total_bytes"},
              range(44, 48): {"head_bytes", "head_check"}, range(56, 64): {"body_check"}}
    for place, names in fields.items():
        if at in place:
            return names
    return {"head_check"} if at < head_bytes else {"body_check"}


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("flip", [0x01, 0x80, 0xFF])
def test_flipped_byte_is_refused(name, flip):
    message = golden(name)
    for at in range(len(message)):
        damaged = bytearray(message)
        damaged[at] ^= flip
        assert refused_field(bytes(damaged)) in field_of_byte(at, head_bytes_of(message)), f"byte {at}"


def put(anchor, offset, form, *values):
    """Overwrites bytes; offset counts from the header, the table's first row, the body, or back from the end."""

    def edit(message):
        spec_count, tensor_count = struct.unpack_from("<II", message, 36)
        start = {"header": 0, "body": head_bytes_of(message), "end": len(message)}
        start["row"] = second.read_specs(bytes(message), spec_count, start["body"])[1]
        struct.pack_into("<" + form, message, start[anchor] + offset, *values)

    return edit


def swap(old, new):
    """Replaces text of the same length in the specs."""

    def edit(message):
        assert len(old) == len(new) and message.count(old) == 1
        message[:] = message.replace(old, new)

    return edit


def append_word(message):
    message += bytes(4)
    struct.pack_into("<Q", message, 8, len(message))


MARKER, QNAN, INF, MINUS_ZERO = second.MARKER, 0x7FC00001, 0x7F800000, 0x80000000
# In mixed, the regions are qsgd 1030 (131 words), fp32 10, onebit 0, then 19 words of padding up to onebit 1024; the
# row of bf16 has 3 elements and so 2 words, as topk would have for them. Rows 3 and 6 of 40 bytes are meant below.
LIES = [
    (2, "fp32_1", put("header", 0, "4s", b"GWIS"), "magic"),
    (3, "fp32_1", put("header", 4, "H", 2), "version"),
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
    (14, "mixed", put("header", 40, "I", 9), "head_bytes"),
    (14, "fp16_33", put("header", 44, "I", 160), "head_bytes"),
    (15, "fp32_1", put("row", 8, "Q", 2**41), "tensor[0].count"),
    (15, "mixed", put("row", 40 + 8, "Q", 2**64 - 1030), "tensor[1].count"),
    (16, "fp32_1", put("row", 16, "Q", 1024), "tensor[0].first"),
    (16, "fp32_1", put("row", 16, "Q", 2**40 + 32768), "tensor[0].first"),
    (17, "fp32_1", put("row", 32, "H", 1), "tensor[0].spec"),
    (17, "mixed", put("row", 32, "H", 1), "tensor[0].spec"),
    (18, "fp32_1", put("row", 34, "B", 3), "tensor[0].dtype"),
    (19, "fp32_1", put("row", 39, "B", 1), "tensor[0].reserved"),
    (20, "fp32_1", put("row", 24, "Q", 4), "tensor[0].offset"),
    (20, "mixed", put("row", 3 * 40 + 24, "Q", 4 * 141), "tensor[3].offset"),
    (21, "mixed", put("row", 6 * 40 + 32, "H", 3), "spec_count"),
    (21, "fp32_1", put("body", -1, "B", 1), "head_bytes"),
    (21, "fp32_1", put("row", 8, "Q", 2), "total_bytes"),
    (21, "fp32_1", append_word, "total_bytes"),
    (23, "mixed", put("body", 4 * 150, "I", 1), "padding"),
    (23, "fp16_33", put("end", -2, "H", 1), "padding"),
    (23, "qsgd_33", put("end", -5, "B", 0x10), "padding"),
    (24, "qsgd_33", put("end", -4, "I", MINUS_ZERO), "side"),
    (24, "qsgd_33", put("end", -4, "I", INF), "side"),
    (24, "qsgd_33", put("end", -4, "I", QNAN), "side"),
    (24, "terngrad_clip0", put("end", -4, "I", 0xFFC00000), "side"),
    (24, "onebit_paper", put("end", -8, "I", MARKER), "side"),
    (24, "onebit_paper", put("end", -4, "I", MARKER), "side"),
    (24, "onebit_paper", put("end", -8, "I", MINUS_ZERO), "side"),
    (24, "onebit_paper", put("end", -4, "I", MINUS_ZERO), "side"),
    (24, "onebit_paper", put("end", -4, "I", 0x3F800000), "side"),
    (24, "onebit_paper", put("end", -4, "I", 0xFF800000), "side"),
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
    (27, "fp32_1", put("body", 0, "I", INF), "codes"),
    (27, "fp32_1", put("body", 0, "I", 0xFFC00000), "codes"),
    (27, "fp16_33", put("body", 0, "H", 0xFC00), "codes"),
    (27, "fp16_33", put("body", 2, "H", 0x7E01), "codes"),
    (27, "bf16_33", put("body", 0, "H", 0x7F80), "codes"),
    (27, "bf16_33", put("body", 2, "H", 0xFFC0), "codes"),
    (27, "qsgd_33", put("body", 0, "B", 0x7F), "codes"),
    (27, "qsgd_1025", put("body", 0, "B", 0xF7), "codes"),
    (27, "terngrad_clip0", put("body", 0, "B", 0x57), "codes"),
]


@pytest.mark.parametrize("rule, name, edit, field", LIES, ids=lambda value: value if isinstance(value, str) else None)
def test_resealed_lie_is_refused_by_its_rule(rule, name, edit, field):
    message = bytearray(golden(name))
    edit(message)
    assert bytes(message) != golden(name)
    assert refused_field(reseal(bytes(message))) == field, f"rule {rule}"


def test_lies_cover_every_rule_that_a_sealed_message_can_break():
    rules = [int(rule) for rule in re.findall(r"^\| (\d+) \| .* \|$", DOCUMENT[DOCUMENT.index("## 9."):], re.M)]
    assert rules[:27] == list(range(1, 28))
    assert {rule for rule, *_ in LIES} == set(range(1, 28)) - {1, 6, 22}  # cut below a header; the checks themselves


def test_an_invalid_code_in_a_marked_unit_is_refused_too():
    message = bytearray(golden("qsgd_33"))
    put("end", -4, "I", MARKER)(message)
    assert (bits(second.decode(reseal(bytes(message))).tensors[0].values) == MARKER).all()
    put("body", 0, "B", 0x7F)(message)
    assert refused_field(reseal(bytes(message))) == "codes"


def test_count_is_checked_against_the_callers_limit():
    message = golden("topk_1200")
    assert refused_field(message, limit=1199) == "tensor[0].count"
    assert second.decode(message, limit=1200).tensors[0].count == 1200


def test_topk_on_a_whole_tensor_takes_no_more_than_indices_of_a_word_can_tell():
    message = bytearray(golden("topk_paper"))
    put("row", 8, "Q", 2**32 - 1)(message)
    assert refused_field(reseal(bytes(message)), limit=2**40) == "total_bytes"  # the words are not there
    put("row", 8, "Q", 2**32)(message)
    assert refused_field(reseal(bytes(message)), limit=2**40) == "tensor[0].count"
    put("row", 16, "Q", 5)(message)  # rule 16 comes first, as this part of rule 15 needs a valid spec
    assert refused_field(reseal(bytes(message)), limit=2**40) == "tensor[0].first"


def test_what_decodes_without_harm_is_not_refused():
    zeros = bytearray(golden("qsgd_33"))
    put("end", -4, "I", 0)(zeros)  # codes other than that of zero, under a norm of 0
    assert not (bits(second.decode(reseal(bytes(zeros))).tensors[0].values) & 0x7FFFFFFF).any()
    unused = bytearray(golden("onebit_zeros"))  # all codes are 0: nothing uses the second side value
    before = second.decode(bytes(unused)).tensors[0].values
    put("end", -4, "I", 0xBF800000)(unused)
    np.testing.assert_array_equal(bits(second.decode(reseal(bytes(unused))).tensors[0].values), bits(before))
