# SPDX-License-Identifier: Apache-2.0
"""Codec, Rules, the registry and the exceptions."""

import copy
import pickle

import pytest

import gradwire
from conftest import EVERY_CODEC


@pytest.mark.parametrize("spec", EVERY_CODEC)
def test_a_codec_is_its_string(spec):
    codec = gradwire.Codec(spec)
    assert codec == gradwire.Codec(str(codec)) and hash(codec) == hash(gradwire.Codec(str(codec)))
    assert codec.name == spec.split(":")[0] and str(codec) in repr(codec)
    text = ",".join(f"{name}={value}" for name, value in codec.parameters.items())
    whole = codec.name + (":" + text if text else "")
    # A parameter that a codec got later is left out of its text where it has its default.
    assert gradwire.Codec(whole) == codec and str(codec) == whole[: len(str(codec))]
    assert pickle.loads(pickle.dumps(codec)) == copy.deepcopy(codec) == codec


def test_what_was_learned_is_part_of_a_codec(gradient):
    plain = gradwire.Codec("optquant:bits=2")
    fitted = gradwire.fit(plain, gradient)
    assert plain.learns and not plain.table and fitted.table and fitted.describe() != plain.describe()
    assert fitted != plain and str(fitted) == str(plain)
    assert pickle.loads(pickle.dumps(fitted)) == fitted == plain.with_table(fitted.table)
    assert hash(pickle.loads(pickle.dumps(fitted))) == hash(fitted)
    assert fitted.with_(bits=2) == plain  # the table is left behind
    assert gradwire.fit("qsgd", gradient) == gradwire.Codec("qsgd")


def test_sizes_and_traits():
    assert gradwire.Codec("fp32").lossless and not gradwire.Codec("fp16").lossless
    assert (
        gradwire.Codec("qsgd").unbiased and gradwire.Codec("onebit").feedback and not gradwire.Codec("onebit").unbiased
    )
    assert gradwire.Codec("fp16").bytes(1000) == 2000 and gradwire.Codec("fp16").bits(1000) == 16
    assert gradwire.Codec("fp16").bits(0) == 0
    assert gradwire.Codec("qsgd").unit == 1024 and gradwire.Codec("onebit:mode=paper").unit == 0
    assert gradwire.Codec("qsgd:bits=4").with_(bits=3, bucket=512) == gradwire.Codec("qsgd:bits=3,bucket=512")


def test_a_codec_is_not_equal_to_something_else():
    assert gradwire.Codec("fp32") != "fp32" and gradwire.Codec("fp32") is not None
    assert {gradwire.Codec("fp32"): 1}[gradwire.Codec("fp32")] == 1


@pytest.mark.parametrize(
    "spec, field, words",
    [
        ("qsdg", "codec", "qsdg"),
        ("", "codec", ""),
        ("qsgd:bits=9", "bits", "from 2 to 8"),
        ("qsgd:bots=4", "bots", "bots"),
        ("qsgd:bits", "bits", "bits"),
        ("fp32:bits=4", "bits", "fp32"),
    ],
)
def test_a_wrong_spec_is_refused_by_name(spec, field, words):
    with pytest.raises(gradwire.UsageError, match=words) as refused:
        gradwire.Codec(spec)
    assert refused.value.kind == "usage" and refused.value.rank is None and "\n" not in str(refused.value)
    assert field in (refused.value.field, "codec", "bits") and isinstance(refused.value, ValueError)


def test_a_wrong_value_or_table_is_refused():
    with pytest.raises(gradwire.UsageError, match="from 2 to 8"):
        gradwire.Codec("qsgd").with_(bits=99)
    with pytest.raises(gradwire.UsageError) as refused:
        gradwire.Codec("optquant:bits=2").with_table([1, 2, 3])
    assert refused.value.field == "table"
    with pytest.raises(TypeError):
        gradwire.Codec(None)


def test_the_registry_says_what_every_codec_takes():
    rows = gradwire.codecs()
    assert {"fp32", "qsgd", "optquant", "casq", "dqsgd", "fft", "rangefloat", "topk"} <= {row["codec"] for row in rows}
    for row in rows:
        codec = gradwire.Codec(row["codec"])
        assert gradwire.Codec(row["example"]).name == row["codec"] and row["summary"]
        assert (row["lossless"], row["unbiased"], row["feedback"], row["learns"]) == (
            codec.lossless,
            codec.unbiased,
            codec.feedback,
            codec.learns,
        )
        assert {p["name"]: p["default"] for p in row["parameters"]} == codec.parameters
        assert all(p["allowed"] and p["meaning"] for p in row["parameters"])


def test_rules_give_the_first_match():
    rules = gradwire.Rules("*.bias=fp32;1d=fp16;*=qsgd:bits=4")
    assert rules.codec_for("a.bias", 2, 10).name == "fp32"
    assert rules.codec_for("a.scale", 1, 10).name == "fp16"
    assert rules.codec_for("a.weight", 2, 10) == gradwire.Codec("qsgd:bits=4")
    assert str(gradwire.Rules(str(rules))) == str(rules)
    with pytest.raises(gradwire.UsageError, match="last rule"):
        gradwire.Rules("a=fp32")


def test_exceptions_keep_their_fields_when_pickled():
    with pytest.raises(gradwire.Error) as refused:
        gradwire.Codec("qsgd:bits=99")
    again = pickle.loads(pickle.dumps(refused.value))
    assert type(again) is gradwire.UsageError and str(again) == str(refused.value)
    assert (again.kind, again.field, again.rank) == ("usage", "bits", None)


def test_the_family_of_exceptions():
    assert issubclass(gradwire.Error, RuntimeError)
    for name, parents in {
        "UsageError": (ValueError,),
        "FrameError": (ValueError,),
        "FileError": (OSError,),
        "MismatchError": (),
        "EngineError": (),
        "DeviceError": (),
        "UnsupportedError": (),
    }.items():
        error = getattr(gradwire, name)("words", field="f", rank=3)
        assert isinstance(error, (gradwire.Error, *parents)) and all(isinstance(error, parent) for parent in parents)
        assert (str(error), error.field, error.rank) == ("words", "f", 3)
