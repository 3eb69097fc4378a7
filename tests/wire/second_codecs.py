# SPDX-License-Identifier: Apache-2.0
"""The regions of the second decoder: how large they are and which values they hold, codec by codec.

Written from sections 5 to 7 of docs/wire-format.md alone. A codec has its shape in unit_elements, code_bits and
scale_words, and one function in DECODERS:

    decode_region(spec, region, count, first) -> bits of the tensor's f32 values, and how far off they may be

Bits are never trusted to a float: values are built as u32 patterns, so that -0, subnormals and the marker stay what
they are. Where codes are cut from words, the document's *string of bits* is taken at its word: the words of a lane are
laid end to end, opened to single bits, and every b bits make a code. Only the values of fft may be off; they come from
a library's transform in double, so that two transforms check each other.
"""

import numpy as np

from second_specs import (
    div_up, f32_bits, fixed_range, floats_of, levels, mantissa, order_or_shares, range_numbers, refuse_if, theta, width)

MARKER = 0x7FC00000
INFINITY = 0x7F800000
LARGEST = np.finfo(np.float32).max
M32 = 2**32 - 1


# Units and regions (section 5).

def unit_elements(spec, count):
    if spec.name in ("fp32", "fp16", "bf16") or spec.name == "dqsgd" and width(spec) == 0:
        return 1
    if spec.name in ("qsgd", "optquant", "dqsgd", "nuqsgd"):
        return spec.parameters["bucket"]
    if spec.name in ("rangefloat", "loggrid", "unigrid"):
        return spec.parameters["bucket"] if spec.parameters["scale"] == "bucket" else count
    if spec.name == "fft":
        return spec.parameters["chunk"]
    return 32768 if spec.parameters["mode"] == "tile" else count


CODE_BITS = {"fp32": 32, "fp16": 16, "bf16": 16, "terngrad": 2, "onebit": 1}  # of most others: a parameter
SCALE_WORDS = {"fp32": 0, "fp16": 0, "bf16": 0, "onebit": 2}  # of casq: scale_words; of all others: 1


def code_bits(spec):
    if spec.name == "dqsgd":
        return width(spec)
    if spec.name == "loggrid":
        return (2 * spec.parameters["k"] + 2).bit_length()  # the least b with 2^b >= 2 * k + 3
    if spec.name == "fft" and spec.parameters["format"] == "float":
        return 32
    return CODE_BITS.get(spec.name) or spec.parameters["bits"]


def share_of(part, elements):
    """part * elements, rounded up as topk's k and casq's m are."""
    want = part * float(elements)
    return int(want) + (int(want) < want)


def kept(spec, elements):
    return min(max(share_of(spec.parameters["ratio"], elements), 1), elements)


def elias_fano(elements, k):
    """The low bits of an index, and the bits of the string behind them all."""
    low = (elements // k).bit_length() - 1
    return low, k + ((elements - 1) >> low)


def topk_parts(spec, elements, wide):
    """Words of the scales, the values and the places of a unit."""
    k, b, index = kept(spec, elements), spec.parameters["bits"], spec.parameters["index"]
    places = k if wide else div_up(k, 2)
    if index == "bitmap":
        places = div_up(elements, 32)
    if index == "coded":
        low, high = elias_fano(elements, k)
        places = div_up(k * low, 32) + div_up(high, 32)
    return (0 if b > 8 else 1 if b == 1 else 2), div_up(k * b, 32), places


def topk_words(spec, elements, wide):
    return sum(topk_parts(spec, elements, wide))


def casq_means(spec, elements):
    clusters = 2 ** spec.parameters["bits"]
    least = clusters if spec.parameters["mode"] == "paper" else min(elements, clusters)
    return max(share_of(spec.parameters["budget"], elements), least)


def scale_words(spec, elements):
    if spec.name != "casq":
        return 0 if spec.name == "dqsgd" and width(spec) == 0 else SCALE_WORDS.get(spec.name, 1)
    m = casq_means(spec, elements)
    if spec.parameters["mode"] == "tile":
        return 1 + div_up(m, 2)
    return 1 + m * (2 if spec.parameters["counts"] == "on" else 1)


def fft_shape(spec, elements):
    """size and k of a unit."""
    size = spec.parameters["chunk"]
    if elements != size:
        size = max(64, 1 << (elements - 1).bit_length())
    bins = size // 2
    want = (1 - theta(spec)) * float(bins) + 0.5
    return size, 1 if want < 1 else bins if want >= bins else int(want)


def fft_words(spec, elements):
    size, k = fft_shape(spec, elements)
    return size // 64 + div_up(2 * k * code_bits(spec), 32) + 1


def over_units(words_of_unit, count, u):
    return count // u * words_of_unit(u) + (words_of_unit(count % u) if count % u else 0)


def region_words(spec, count):
    if count == 0:
        return 0
    u = unit_elements(spec, count)
    if spec.name == "topk":
        return over_units(lambda elements: topk_words(spec, elements, u > 65536), count, u)
    if spec.name == "fft":
        return over_units(lambda elements: fft_words(spec, elements), count, u)
    b = code_bits(spec)
    codes = count // 1024 * 32 * b + div_up(count % 1024 * b, 32)
    return codes + over_units(lambda elements: scale_words(spec, elements), count, u)


def bits_of(words):
    """The string of bits that words make along the last axis."""
    return np.unpackbits(np.ascontiguousarray(words, "<u4").view(np.uint8), axis=-1, bitorder="little")


def codes_of(bits, b):
    """Every b bits of the last axis make a code, least significant bit first."""
    return bits.reshape(*bits.shape[:-1], bits.shape[-1] // b, b) @ (np.uint64(1) << np.arange(b, dtype=np.uint64))


def unpack_string(words, count, b):
    string = bits_of(words)
    refuse_if(string[count * b :].any(), "padding", "an unused bit after the codes is set")
    return codes_of(string[: count * b], b).astype(np.uint32)


def unpack(region, count, b):
    """The codes of a region and its scale words."""
    blocks, tail = divmod(count, 1024)
    full_words, tail_words = blocks * 32 * b, div_up(tail * b, 32)
    lanes = region[:full_words].reshape(blocks, b, 32).swapaxes(1, 2)  # block, lane, word of the lane's string
    full = codes_of(bits_of(lanes), b).swapaxes(1, 2)  # block, row, lane: the order of the elements
    partial = unpack_string(region[full_words : full_words + tail_words], tail, b)
    return np.concatenate([full.reshape(-1).astype(np.uint32), partial]), region[full_words + tail_words :]


# Values (sections 6, 7). Each decoder returns the bits of the tensor's f32 values.

def decode_plain(spec, region, count, first=0):
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


def norms_of(spec, scales):
    """Which units are marked, and the norms of the others."""
    marked = scales == MARKER
    if fixed_range(spec) > 0:
        malformed = scales != f32_bits(fixed_range(spec))
    else:
        malformed = scales >= INFINITY
    refuse_if((malformed & ~marked).any(), "scales",
              "a norm is negative, Inf, a NaN that is not the marker, or not the range")
    return marked, floats_of(np.where(marked, 0, scales))


def decode_levels(spec, region, count, first=0):
    """qsgd, terngrad, dqsgd, unigrid: uniform levels."""
    b = code_bits(spec)
    if b == 0:
        return np.zeros(count, np.uint32)
    codes, scales = unpack(region, count, b)
    marked, norm = norms_of(spec, scales)
    refuse_if((codes == 2**b - 1).any(), "codes", f"code {2**b - 1} means nothing")
    top = 2 ** (b - 1) - 1
    with np.errstate(over="ignore", under="ignore"):
        a = norm / np.float32(top)
        beyond = np.isinf(a * np.float32(top))
        a = (a.view("<u4") - beyond.astype("<u4")).view("<f4")  # next_below
        unit = np.arange(count) // unit_elements(spec, count)
        values = (codes.astype(np.int32) - top).astype("<f4") * a[unit]
    return np.where(marked[unit], np.uint32(MARKER), values.view("<u4"))


def decode_products(spec, region, count, first=0):
    """optquant, loggrid, nuqsgd: a code names a factor of the norm."""
    if spec.name == "optquant":
        factors = levels(spec)
    else:
        least = spec.parameters["k"] if spec.name == "loggrid" else 2 ** (spec.parameters["bits"] - 1) - 2
        powers = np.exp2(np.arange(-least, 1)).astype("<f4")
        factors = np.concatenate([-powers[::-1], np.zeros(1, "<f4"), powers])
    codes, scales = unpack(region, count, code_bits(spec))
    marked, norm = norms_of(spec, scales)
    refuse_if((codes >= factors.size).any(), "codes", f"a code is not below {factors.size}")
    unit = np.arange(count) // unit_elements(spec, count)
    with np.errstate(under="ignore"):
        values = factors[codes] * norm[unit]
    return np.where(marked[unit], np.uint32(MARKER), values.view("<u4"))


def range_bits(spec, codes, r):
    """The bits that codes of a rangefloat stand for."""
    shift, code = 23 - mantissa(spec), codes.astype(np.int64)
    positive = (r.base + code - 1) << shift
    negative = (r.base + np.minimum(code - r.top, r.bottom) - 1) << shift | 0x80000000
    return np.where(code == 0, 0, np.where(code <= r.top, positive, negative)).astype(np.uint32)


def decode_rangefloat(spec, region, count, first=0):
    codes, scales = unpack(region, count, code_bits(spec))
    marked, norm = norms_of(spec, scales)
    unit = np.arange(count) // unit_elements(spec, count)
    r = range_numbers(spec, norm.view("<u4")[unit])
    refuse_if(fixed_range(spec) > 0 and (codes > r.top + r.bottom).any(), "codes", "beyond the fixed range")
    return np.where(marked[unit], np.uint32(MARKER), range_bits(spec, codes, r))


def decode_onebit(spec, region, count, first=0):
    codes, scales = unpack(region, count, 1)
    scales = scales.reshape(-1, 2)
    marked = (scales == MARKER).all(axis=1)
    above = scales[:, 0] < INFINITY
    below = (scales[:, 1] == 0) | (scales[:, 1] > 0x80000000) & (scales[:, 1] < 0xFF800000)
    refuse_if((~(above & below) & ~marked).any(), "scales", "neither +0 or positive, then +0 or negative; nor marked")
    return scales[np.arange(count) // unit_elements(spec, count), codes]  # a marked unit has the marker at both


def topk_levels(b, scales):
    top = 2 ** (b - 1) - 1
    i = np.arange(top + 1, dtype="<f4")
    with np.errstate(over="ignore", under="ignore"):
        rise = floats_of(scales[1:]) * (i * i / np.float32(top * top)) if top else np.zeros(1, "<f4")
        return np.minimum(floats_of(scales[:1]) + rise, LARGEST)


def topk_values(b, k, scales, words):
    """The bits of k values; None where the unit is marked."""
    marked = (scales if b <= 8 else words)[0] & np.uint32(0xFFFF if b == 16 else M32) == (0x7FC0 if b == 16 else MARKER)
    malformed = scales[1:].any() if marked else (scales >= INFINITY).any()
    refuse_if(malformed, "scales", "negative, Inf, a NaN that is not the marker, or a scale beside the marker")
    string = bits_of(words)
    refuse_if(string[k * b :].any(), "padding", "an unused bit after the values is set")
    codes = codes_of(string[: k * b], b).astype(np.uint32)
    if marked:
        refuse_if(codes[b > 8 :].any(), "values", "a value beside the marker")
        return None
    if b <= 8:
        magnitude, sign = codes & np.uint32(2 ** (b - 1) - 1), codes >> np.uint32(b - 1)
        return topk_levels(b, scales).view("<u4")[magnitude] | sign << np.uint32(31)
    values = codes << np.uint32(32 - b)
    refuse_if(((values & np.uint32(0x7FFFFFFF)) >= INFINITY).any(), "values", "Inf or a NaN that is not the marker")
    return values


def topk_places(spec, k, elements, words, wide):
    index = spec.parameters["index"]
    if index == "raw":
        indices = (words if wide else np.ascontiguousarray(words).view("<u2")).astype(np.int64)
        refuse_if(indices[k:].any(), "indices", "the unused half word is not zero")
        return indices[:k]
    string = bits_of(words)
    if index == "bitmap":
        indices = np.flatnonzero(string)
        refuse_if(indices.size != k, "indices", f"{indices.size} bits, expected {k}")
        return indices
    low, high = elias_fano(elements, k)
    low_end = div_up(k * low, 32) * 32
    lower, upper = string[:low_end], np.flatnonzero(string[low_end:])
    refuse_if(lower[k * low :].any() or (upper >= high).any(), "indices", "an unused bit is set")
    refuse_if(upper.size != k, "indices", f"{upper.size} bits, expected {k}")
    lower = codes_of(lower[: k * low], low).astype(np.int64) if low else np.zeros(k, np.int64)
    return (upper - np.arange(k) << low) + lower


def decode_topk(spec, region, count, first=0):
    u, b = unit_elements(spec, count), spec.parameters["bits"]
    bits, at = np.zeros(count, np.uint32), 0
    for start in range(0, count, u):
        elements = min(u, count - start)
        k, parts = kept(spec, elements), topk_parts(spec, elements, u > 65536)
        scales, words, places = np.split(region[at : at + sum(parts)], np.cumsum(parts)[:2])
        at += sum(parts)
        values = topk_values(b, k, scales, words)
        indices = topk_places(spec, k, elements, places, u > 65536)
        refuse_if((indices >= elements).any() or (np.diff(indices) <= 0).any(), "indices", "too large or not ascending")
        if values is None:
            refuse_if(indices[-1] != k - 1, "indices", "index j of a marked unit is not j")
            bits[start : start + elements] = MARKER
        else:
            bits[start + indices] = values
    return bits


def bkdr(index):
    h = np.zeros(index.shape, np.int64)
    for shift in (0, 8, 16, 24):
        byte = index >> shift & 0xFF
        h = h * 131 + np.where(byte < 128, byte, byte - 256) & M32
    return h & 0x7FFFFFFF


def casq_buckets(spec, codes, m, index):
    """The bucket of every element of a unit, from its codes and its indices in the whole tensor."""
    clusters = 2 ** spec.parameters["bits"]
    if spec.parameters["mode"] == "paper":
        buckets = np.array([1 + ((m - clusters) * share >> 16) for share in order_or_shares(spec)])
        return (np.cumsum(buckets) - buckets)[codes] + bkdr(index % 2**32) % buckets[codes]
    count = np.bincount(codes, minlength=clusters)
    buckets = (count > 0).astype(np.int64)
    for c in order_or_shares(spec):
        if count[c] >= 2:
            buckets[c] += min(count[c] - 1, m - buckets.sum())
    start, bucket = np.cumsum(buckets) - buckets, np.empty(codes.size, np.int64)
    for c in range(clusters):
        if count[c]:
            bucket[codes == c] = start[c] + np.arange(count[c]) * buckets[c] // count[c]
    return bucket


def decode_casq(spec, region, count, first=0):
    codes, scales = unpack(region, count, code_bits(spec))
    u = unit_elements(spec, count)
    bits, at = np.zeros(count, np.uint32), 0
    for start in range(0, count, u):
        elements = min(u, count - start)
        m, place = casq_means(spec, elements), slice(start, start + elements)
        words = scales[at : at + scale_words(spec, elements)]
        at += words.size
        if words[0] == MARKER:
            refuse_if(words[1:].any(), "buckets", "a marked unit has another scale word than 0")
            bits[place] = MARKER
            continue
        refuse_if(words[0] >= INFINITY, "scales",
                  "the largest magnitude is negative, Inf or another NaN than the marker")
        bucket = casq_buckets(spec, codes[place], m, first + np.arange(start, start + elements))
        if spec.parameters["mode"] == "paper":
            means = words[1 : 1 + m]
            refuse_if(((means & np.uint32(0x7FFFFFFF)) >= INFINITY).any(), "buckets", "a mean is not finite")
            bits[place] = means[bucket]
            continue
        means = np.ascontiguousarray(words[1:]).view("<u2")
        refuse_if(means[m:].any(), "padding", "the unused half word after the means is not zero")
        refuse_if(((means & 0x7FFF) >= 0x4000).any(), "buckets", "a mean is not below 2 in magnitude")
        largest = float(floats_of(words[:1])[0])
        step = 2.0 ** (np.frexp(largest)[1] - 1) if largest else 0.0
        with np.errstate(under="ignore"):
            values = (means.view("<f2").astype(np.float64) * step).astype("<f4")
        bits[place] = values.view("<u4")[bucket]
    return bits


def fft_unit(spec, words, elements):
    """size, scale (None: the unit is marked), and the parts of all bins of a unit: one row of re, one of im."""
    size, k = fft_shape(spec, elements)
    bitmap, strings, scale = words[: size // 64], words[size // 64 : -1], words[-1]
    parts = np.zeros((2, size // 2))
    if scale == MARKER:
        refuse_if(bitmap.any(), "bitmap", "of a marked unit is not zero")
        refuse_if(strings.any(), "codes", "of a marked unit are not zero")
        return size, None, parts
    refuse_if(scale >= INFINITY, "scales", "the scale is negative, Inf or a NaN that is not the marker")
    bins = np.flatnonzero(bits_of(bitmap))
    refuse_if(bins.size != k, "bitmap", f"{bins.size} bits, expected {k}")
    codes = unpack_string(strings, 2 * k, code_bits(spec))
    if spec.parameters["format"] == "range":
        r = range_numbers(spec, f32_bits(1))
        refuse_if((codes > r.top + r.bottom).any(), "codes", f"a code is above {r.top + r.bottom}")
        codes = range_bits(spec, codes, r)
    refuse_if(((codes & np.uint32(0x7FFFFFFF)) > 0x3F800000).any(), "codes", "a part is above 1 in magnitude")
    parts[:, bins] = floats_of(codes).reshape(k, 2).T
    return size, float(floats_of([scale])[0]), parts


def fft_units(spec, region, count):
    """start, elements and words of every unit."""
    at, u = 0, unit_elements(spec, count)
    for start in range(0, count, u):
        elements = min(u, count - start)
        yield start, elements, region[at : at + fft_words(spec, elements)]
        at += fft_words(spec, elements)


def decode_fft(spec, region, count, first=0):
    """Bits, and how far the values may be off."""
    bits, slack = np.full(count, MARKER, np.uint32), np.zeros(count)
    for start, elements, words in fft_units(spec, region, count):
        size, scale, (re, im) = fft_unit(spec, words, elements)
        if scale is None:
            continue
        spectrum = np.append(re + 1j * im, im[0])  # the library has the alternating part in a bin of its own
        spectrum[0] = re[0]
        x = scale * np.fft.irfft(spectrum, size) * size
        with np.errstate(under="ignore"):
            bits[start : start + elements] = np.clip(x, -LARGEST, LARGEST).astype("<f4").view("<u4")[:elements]
        slack[start : start + elements] = 1e-5 * np.abs(x).max() + 2.0**-148
    return bits, slack


DECODERS = {"fp32": decode_plain, "fp16": decode_plain, "bf16": decode_plain, "qsgd": decode_levels,
            "terngrad": decode_levels, "onebit": decode_onebit, "topk": decode_topk, "optquant": decode_products,
            "dqsgd": decode_levels, "rangefloat": decode_rangefloat, "loggrid": decode_products,
            "unigrid": decode_levels, "casq": decode_casq, "fft": decode_fft, "nuqsgd": decode_products}


def decode_region(spec, region, count, first=0):
    """The bits of the values and how far they may be off: 0 of all codecs but fft."""
    if count == 0:
        return np.zeros(0, np.uint32), 0.0
    decoded = DECODERS[spec.name](spec, region, count, first)
    return decoded if spec.name == "fft" else (decoded, 0.0)
