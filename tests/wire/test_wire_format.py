# SPDX-License-Identifier: Apache-2.0
"""docs/wire-format.md suffices: second_decoder.py was written from it alone and reads every golden frame bit for bit
(fft: within what the document allows, with numpy's transform in place of the library's own, both ways).

The other half of the promise is what must be refused (section 9). A frame that is damaged is refused by its checksums;
a *malformed* frame is a golden frame with one wrong thing in it and the checksums made right again (reseal), so that
only the rule in question can refuse it. The document's own examples and tables are read from its text and checked as
well.
"""

import json
import re
import struct
from pathlib import Path

import numpy as np
import pytest

import second_codecs as codecs
import second_decoder as second
import second_specs as specs
from malformed_frames import GOLDEN, MALFORMED, MARKER, MINUS_ZERO, golden, head_bytes_of, put, reseal, words_of

HERE = Path(__file__).resolve().parent
DOCUMENT = (HERE.parents[1] / "docs/wire-format.md").read_text(encoding="utf-8")
MANIFEST = json.loads((GOLDEN / "manifest.json").read_text(encoding="utf-8"))
FRAMES = MANIFEST["frames"] + MANIFEST["large"]
DTYPES = ["f32", "f16", "bf16"]
# The smallest frame of every codec that has elements.
SMALL = ["fp32_1", "fp16_33", "bf16_33", "qsgd_33", "terngrad_clip0", "onebit_paper", "topk_1200", "topk_coded_1",
         "optquant_33", "optquant_fitted2", "dqsgd_33", "rangefloat_33", "loggrid_33", "unigrid_33", "casq_3",
         "casq_paper_1", "fft_33"]


def refused_field(message, **options):
    with pytest.raises(second.Refused) as refused:
        second.decode(message, **options)
    return refused.value.field


def bits(values):
    return np.ascontiguousarray(values, "<f4").view("<u4")


# What must be read.


def test_every_golden_message_is_in_the_manifest():
    assert MANIFEST["wire_format"] == 2
    assert {f"{frame['name']}.gw" for frame in FRAMES} == {path.name for path in GOLDEN.glob("*.gw")}
    assert len(FRAMES) == len({frame["name"] for frame in FRAMES}) > 0


def assert_as_expected(tensor, expected):
    """Bit for bit, except for fft; a NaN has the bits of the marker there too."""
    near = np.zeros(tensor.count, bool)
    if tensor.spec.startswith("fft"):
        with np.errstate(invalid="ignore"):
            near = np.abs(tensor.values.astype(np.float64) - expected.astype(np.float64)) <= tensor.slack
    else:
        assert tensor.slack == 0
    np.testing.assert_array_equal(np.where(near, 0, bits(tensor.values)), np.where(near, 0, bits(expected)))


@pytest.mark.parametrize("frame", FRAMES, ids=lambda frame: frame["name"])
def test_golden_frame_decodes_bit_for_bit(frame):
    message = golden(frame["name"])
    assert f"{second.xxh64(message):016x}" == frame["message_xxh64"]
    decoded = second.decode(message)
    assert decoded[:4] == tuple(frame[key] for key in ("step", "stage", "rank", "world"))
    assert [(t.name_hash, t.spec, t.count, t.first, DTYPES[t.dtype], t.shape) for t in decoded.tensors] == [
        (second.xxh64(t["name"].encode()), t["spec"], t["count"], t["first"], t["dtype"], tuple(t.get("shape", ())))
        for t in frame["tensors"]]
    assert [t.values.size for t in decoded.tensors] == [t["count"] for t in frame["tensors"]]
    found = b"".join(t.values.tobytes() for t in decoded.tensors)
    if frame in MANIFEST["frames"]:
        found = (GOLDEN / f"{frame['name']}.f32").read_bytes()
        ends = np.cumsum([t.count for t in decoded.tensors], dtype=int)
        assert len(found) == 4 * sum(t.count for t in decoded.tensors)
        for tensor, expected in zip(decoded.tensors, np.split(np.frombuffer(found, "<f4"), ends)):
            assert_as_expected(tensor, expected)
    assert f"{second.xxh64(found):016x}" == frame["decoded_xxh64"]


def test_golden_frames_show_tables_of_every_codec_that_learns():
    seen = {}
    for frame in FRAMES:
        for tensor in second.decode(golden(frame["name"])).tensors:
            seen.setdefault(tensor.spec.partition(":")[0], set()).add(bool(tensor.table))
    assert set(seen) == set(specs.CODECS)
    assert {name for name, tables in seen.items() if tables == {False, True}} == {
        "optquant", "dqsgd", "rangefloat", "casq", "fft"}
    assert all(False in tables for tables in seen.values())


def fft_tensors():
    """Of every golden fft tensor: its spec, its region and what was encoded."""
    for frame in MANIFEST["frames"]:
        if any(tensor["spec"].startswith("fft") for tensor in frame["tensors"]):
            message = golden(frame["name"])
            x, at = np.fromfile(GOLDEN / f"{frame['name']}.in.f32", "<f4"), 0
            spec_count, tensor_count, head_bytes = struct.unpack_from("<III", message, 36)
            found, rows = second.read_specs(message, spec_count, head_bytes)
            for row in range(tensor_count):
                count, _, offset, number = struct.unpack_from("<QQQH", message, rows + 40 * row + 8)
                spec = found[number]
                if spec.name == "fft":
                    region = words_of(message)[offset // 4 :][: codecs.region_words(spec, count)]
                    yield pytest.param(spec, region, x[at : at + count], id=f"{frame['name']}-{row}")
                at += count


def in_range(spec, part):
    """Parts as far as a rangefloat of norm 1 reaches, and how far off it may take them: half a pattern's width, or a
    whole one in mode=paper. The most negative number is one pattern less than 1 where codes are full."""
    r, m = specs.range_numbers(spec, specs.f32_bits(1)), specs.mantissa(spec)
    least, lowest = (float(specs.floats_of([int(pattern) << (23 - m)])[0])
                     for pattern in (r.base, r.base + r.bottom - 1))
    width = np.exp2(np.floor(np.log2(np.maximum(np.abs(part), 2.0**-126))) - m)
    return np.maximum(part, -lowest), np.maximum(width, least) / (1 if spec.parameters["mode"] == "paper" else 2)


@pytest.mark.parametrize("spec, region, x", list(fft_tensors()))
def test_kept_bins_are_those_of_a_librarys_transform(spec, region, x):
    """Section 11, up to the 1e-5 of the largest bin that it leaves to the transform."""
    for start, elements, words in codecs.fft_units(spec, region, x.size):
        size, scale, (re, im) = codecs.fft_unit(spec, words, elements)
        unit, k = x[start : start + elements].astype(np.float64), codecs.fft_shape(spec, elements)[1]
        assert (scale is None) == (not np.isfinite(unit).all())
        if scale is None:
            continue
        keep = codecs.bits_of(words[: size // 64]).astype(bool)
        if not unit.any():
            assert scale == 0 and keep[:k].all() and not words[size // 64 :].any()
            continue
        X = np.fft.rfft(unit, size)
        X = np.append(X[0].real + 1j * X[-1].real, X[1:-1])  # bin 0 holds two real ones
        amplitude = np.abs(X) * np.where(np.arange(X.size) == 0, np.sqrt(0.5), 1)
        most = max(np.abs(X.real[keep]).max(), np.abs(X.imag[keep]).max())
        if not keep.all():
            assert amplitude[keep].min() >= amplitude[~keep].max() - 1e-5 * np.abs(X).max()
        assert abs(scale - min(most / size, codecs.LARGEST)) <= 1e-5 * scale + 2.0**-149
        for found, expected in ((re, X.real / most), (im, X.imag / most)):
            step = 0
            if spec.parameters["format"] == "range":
                expected, step = in_range(spec, expected)
            assert (np.abs(found - expected) <= 1e-5 + step)[keep].all()
            assert not found[~keep].any()


def test_default_tables_of_the_document():
    """What stands in the document's examples as words, and its sums."""
    default = dict(zip(specs.CODECS, (specs.parse_spec(text.encode()) for text in canonical_examples().values())))
    assert specs.levels(default["optquant"])[[0, -1]].tolist() == [-1, 1]
    assert specs.order_or_shares(default["casq"]) == [3, 0, 2, 1]  # 14.10 names it
    for b in range(1, 5):
        text = default["casq"].text.replace("bits=2", f"bits={b}")
        assert sorted(specs.order_or_shares(specs.parse_spec(text.encode()))) == list(range(2**b))
        shares = specs.order_or_shares(specs.parse_spec(text.replace("tile", "paper").encode()))
        assert len(shares) == 2**b and 65000 <= sum(shares) <= 65536
    assert specs.width(default["dqsgd"]) == 4 and specs.mantissa(default["rangefloat"]) == 4


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


def canonical_examples():
    """The last column of the table in section 3.1, by codec."""
    text = DOCUMENT[DOCUMENT.index("### 3.1"):DOCUMENT.index("### 3.2")]
    rows = re.findall(r"^\| (`.*?`) \|.*\| `(.*?)` \|$", text, re.M)
    return {name: example if name in example else name
            for names, example in rows for name in re.findall("`(.*?)`", names)}


def worked_examples():
    form = r"### 14\.(?:[1-7]|9) (\w+)[^\n]*\n\n```\n(.*?)```\n(.*?)(?=\n##)"
    for name, dump, prose in re.findall(form, DOCUMENT, re.S):
        message = b"".join(bytes.fromhex(line[6:54]) for line in dump.splitlines())
        addresses = [int(line[:4], 16) for line in dump.splitlines()]
        decodes_to = re.findall(r"\(([0-9a-f]{8})\)", prose[re.search(r"Decodes\s+to", prose).end():])
        H, words = re.search(r"H\s+is\s+([0-9a-f]{16})\s+over\s+(\d+)\s+words", prose).groups()
        yield pytest.param(message, addresses, decodes_to, int(H, 16), int(words), id=name)


def short_examples():
    """The rows of 14.10, their specs filled up with the values of the canonical examples."""
    for title, words, decodes_to in re.findall(r"^\| (`.*?) \| ([0-9a-f ]*)\| ([0-9a-f ]{44}) \|$",
                                               DOCUMENT[DOCUMENT.index("### 14.10"):], re.M):
        name, _, given = re.match("`(.*?)`", title)[1].partition(":")
        text = canonical_examples()[name]
        for item in given.split(",") if given else ():
            key = item.partition("=")[0]
            text = re.sub(rf"\b{key}=[^,]+", item, text) if f"{key}=" in text else f"{text},{item}"
        table = re.search(r", table ([0-9a-f]{8})", title)
        spec = specs.parse_spec(text.encode(), [int(table[1], 16)] if table else [])
        yield pytest.param(spec, *(np.array([int(word, 16) for word in column.split()], "<u4")
                                   for column in (words, decodes_to)), id=title.replace("`", ""))


def test_canonical_examples_of_the_document_are_canonical():
    assert list(canonical_examples()) == list(specs.CODECS)
    assert [specs.parse_spec(text.encode()).name for text in canonical_examples().values()] == list(specs.CODECS)


def test_every_codec_has_a_worked_example():
    examples = [example.id for example in worked_examples()] + [example.values[0].name for example in short_examples()]
    assert list(dict.fromkeys(examples)) == list(specs.CODECS)
    assert len(examples) == 8 + 14


@pytest.mark.parametrize("message, addresses, decodes_to, H, words", list(worked_examples()))
def test_worked_example_of_the_document(message, addresses, decodes_to, H, words):
    assert addresses == sorted(set(addresses)) and addresses[-1] < len(message)
    tensor, = second.decode(message).tensors
    assert [f"{pattern:08x}" for pattern in bits(tensor.values)] == decodes_to and len(decodes_to) == 5
    assert words_of(message).size == words
    assert struct.unpack_from("<Q", message, 56)[0] == second.mix64((H + words * 0x9E3779B97F4A7C15) % 2**64)


@pytest.mark.parametrize("spec, words, decodes_to", list(short_examples()))
def test_short_example_of_the_document(spec, words, decodes_to):
    assert words.size == codecs.region_words(spec, 5)
    found, slack = codecs.decode_region(spec, words, 5)
    tensor = second.Tensor(0, 5, 0, spec.text, spec.table, 0, (), found.view("<f4"), slack)
    assert_as_expected(tensor, decodes_to.view("<f4"))


def test_full_block_of_the_document():
    text = DOCUMENT[DOCUMENT.index("### 14.8"):]
    region = np.zeros(100, "<u4")
    for at, value in re.findall(r"^\| (\d+) \| ([0-9a-f]{8}) \|", text, re.M):
        region[int(at)] = int(value, 16)
    region[97:] = [int(value, 16) for value in re.search(r"\| 97, 98, 99 \| ([0-9a-f, ]+) \|", text)[1].split(", ")]
    spec = specs.parse_spec(b"qsgd:bits=3,bucket=512,norm=max,rounding=nearest")
    assert codecs.region_words(spec, 1025) == 100
    values = codecs.decode_levels(spec, region, 1025).view("<f4")
    lane = np.arange(0, 1025, 32)  # lane 0 of the block, and the partial block's element
    x = ((37 * lane) % 101 - 50).astype(np.float32)
    assert np.abs(values[lane] - x).max() <= 50 / 3 / 2 * (1 + 2**-16)  # half a step; one unit of y is 2^-16 of a step
    assert [f"{values[i]:.8g}" for i in (0, 32, 320)] == ["-50", "16.666666", "-33.333332"]


def test_sizes_of_the_document():
    text = DOCUMENT[DOCUMENT.index("## 13."):DOCUMENT.index("## 14.")]
    rows = re.findall(r"^\| `(.*?)` \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|$", text, re.M)
    assert {spec.partition(":")[0] for spec, *_ in rows} == set(specs.CODECS) and len(rows) >= 24
    for spec, head_bytes, *sizes in rows:
        assert int(head_bytes) == specs.div_up(64 + 4 + specs.div_up(len(spec), 4) * 4 + 40, 32) * 32
        parsed = specs.parse_spec(spec.encode())
        assert [4 * codecs.region_words(parsed, count) for count in (5, 1000, 1000000)] == [int(s) for s in sizes]
    fitted, = re.findall(r"64 \+ 4 \+ (\d+) \+ 12 \+ 40 = (?:\d+)", text)
    assert int(fitted) == specs.div_up(len(canonical_examples()["fft"]), 4) * 4
    assert f"= {64 + 4 + int(fitted) + 52}," in text


# What must be refused.


@pytest.mark.parametrize("path", sorted((HERE / "version1").glob("*.gw")), ids=lambda path: path.stem)
def test_a_message_of_version_one_is_refused_by_its_version(path):
    assert refused_field(path.read_bytes()) == "version"


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


@pytest.mark.parametrize("rule, name, edit, field", MALFORMED,
                         ids=lambda value: value if isinstance(value, str) else None)
def test_malformed_frame_is_refused_by_its_rule(rule, name, edit, field):
    message = bytearray(golden(name))
    edit(message)
    assert bytes(message) != golden(name)
    assert refused_field(reseal(bytes(message))) == field, f"rule {rule}"


def test_malformed_frames_cover_every_rule_that_a_sealed_message_can_break():
    rules = [int(rule) for rule in re.findall(r"^\| (\d+) \| .* \|$", DOCUMENT[DOCUMENT.index("## 9."):], re.M)]
    assert rules[:29] == list(range(1, 30))
    # Rules 1, 6 and 22 are a message cut below a header and the checks themselves.
    assert {rule for rule, *_ in MALFORMED} == set(range(1, 30)) - {1, 6, 22}


@pytest.mark.parametrize("name, code", [("qsgd_33", 0x7F), ("dqsgd_33", 0x7F), ("unigrid_33", 0xFF),
                                        ("loggrid_33", 0x07), ("rangefloat_min_max_eps", 0x1FF)])
def test_an_invalid_code_in_a_marked_unit_is_refused_too(name, code):
    message = bytearray(golden(name))
    put("end", -4, "I", MARKER)(message)
    put("body", 0, "H", 0)(message)
    assert (bits(second.decode(reseal(bytes(message))).tensors[0].values) == MARKER).all()
    put("body", 0, "H", code)(message)
    assert refused_field(reseal(bytes(message))) == "codes"


def test_count_is_checked_against_the_callers_limit():
    message = golden("topk_1200")
    assert refused_field(message, limit=1199) == "tensor[0].count"
    assert second.decode(message, limit=1200).tensors[0].count == 1200


@pytest.mark.parametrize("name", ["topk_paper", "casq_paper_1"])
def test_a_whole_tensor_takes_no_more_than_indices_of_a_word_can_tell(name):
    message = bytearray(golden(name))
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
    unused = bytearray(golden("onebit_zeros"))  # all codes are 0: nothing uses the second scale
    before = second.decode(bytes(unused)).tensors[0].values
    put("end", -4, "I", 0xBF800000)(unused)
    np.testing.assert_array_equal(bits(second.decode(reseal(bytes(unused))).tensors[0].values), bits(before))
    small = bytearray(golden("rangefloat_33"))
    put("end", -4, "I", 0)(small)  # top and bottom are 1: codes above 2 are the last negative one, -0
    put("body", 0, "3B", 1, 2, 255)(small)
    assert bits(second.decode(reseal(bytes(small))).tensors[0].values)[:3].tolist() == [0, MINUS_ZERO, MINUS_ZERO]
    counts = bytearray(golden("casq_paper_counts"))
    before = second.decode(bytes(counts)).tensors[0].values
    put("end", -4, "I", 2**32 - 1)(counts)
    np.testing.assert_array_equal(bits(second.decode(reseal(bytes(counts))).tensors[0].values), bits(before))
    part = bytearray(golden("fft_float"))
    put("body", 4 * 16, "I", MINUS_ZERO)(part)
    assert np.isfinite(second.decode(reseal(bytes(part))).tensors[0].values).all()


def test_a_width_of_zero_takes_no_words_and_yields_zeros():
    tensors = [t for t in second.decode(golden("mixed_tables")).tensors if t.spec.startswith("dqsgd")]
    assert [(t.table, t.count) for t in tensors] == [((0,), 2048), ((0,), 3), ((0,), 1500)]
    assert not any(bits(t.values).any() for t in tensors)


def test_padding_before_an_empty_region_is_checked():
    """The last region of mixed_tables has no words, but its place is a multiple of 32 words."""
    message = bytearray(golden("mixed_tables"))
    put("end", -4, "I", 1)(message)
    assert refused_field(reseal(bytes(message))) == "padding"
