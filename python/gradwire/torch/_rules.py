# SPDX-License-Identifier: Apache-2.0
"""A codec says how one tensor is encoded. Rules map names to codecs: "PATTERN=CODEC;...;*=CODEC", where the first
pattern that matches decides. Users give either; hooks work with rules.
"""

from typing import Any, Callable, Iterable

from .. import _core
from .._errors import UsageError
from ._lowrank_spec import LowRank, is_lowrank
from ._register import refuse


def codec_of(spec: str) -> "_core.Codec | LowRank":
    return LowRank.parse(spec) if is_lowrank(spec) else _core.Codec(spec)


def has_lowrank(codec: Any) -> bool:
    """Whether a codec, or one of rules, is lowrank, which the core does not know."""
    return isinstance(codec, str) and any(is_lowrank(spec) for _, spec in _parts(codec))


def _is_rules(text: str) -> bool:
    name, equals, _ = text.partition("=")
    return bool(equals) and ":" not in name  # in a codec an '=' comes only after its ':'


def _parts(text: str) -> list[tuple[str, str]]:
    """(pattern, codec) of each rule. A codec alone has no pattern."""
    if not _is_rules(text):
        return [("", text.strip())]
    split = (rule.partition("=") for rule in text.split(";"))
    return [(pattern.strip(), spec.strip()) for pattern, _, spec in split]


def without_lowrank(rules: str, codec: str = "fp32") -> str:
    """The rules with another codec in the place of every lowrank."""
    return ";".join(f"{pattern}={codec if is_lowrank(spec) else spec}" for pattern, spec in _parts(rules))


def chosen_by(rules: str, tensors: Iterable[tuple[str, int, int]]) -> "list[_core.Codec | LowRank]":
    """The codec of each tensor: (name, dimensions, elements)."""
    each = [
        (None if pattern == "*" else _core.Rules(f"{pattern}=fp16;*=fp32"), codec_of(spec))
        for pattern, spec in _parts(rules)
    ]
    return [
        next(codec for rule, codec in each if rule is None or str(rule.codec_for(*tensor)) == "fp16")
        for tensor in tensors
    ]


def lowrank_rules_of(codec: str, min_elements: int) -> str:
    """As rules_of, for a hook that knows lowrank."""
    parts = _parts(codec)
    specs = [str(LowRank.parse(spec)) if is_lowrank(spec) else None for _, spec in parts]
    if not _is_rules(codec):
        return rules_of("fp32", min_elements).rpartition("=")[0] + f"={specs[0]}"
    known = _parts(rules_of(without_lowrank(codec), min_elements))
    return ";".join(f"{pattern}={mine or spec}" for mine, (pattern, spec) in zip(specs, known))


def rules_of(codec: Any, min_elements: int, field: str = "codec") -> str:
    """Rules as they are. A codec as rules that leave tensors with one dimension, or with fewer than `min_elements`
    elements, in fp32."""
    if isinstance(codec, _core.Rules):
        return written_out(str(codec))
    if not isinstance(codec, (str, _core.Codec)):
        raise UsageError(
            f"{field} is of type {type(codec).__name__}; allowed are a codec such as 'optquant:bits=4', rules such as "
            "'*.bias=fp32;*=optquant:bits=4', a gradwire.Codec and gradwire.Rules",
            field=field,
        )
    text = str(codec)
    refuse(text, field)
    if _is_rules(text):
        return written_out(str(_core.Rules(text)))
    small = f"<{min_elements}=fp32;" if min_elements > 0 else ""
    return f"1d=fp32;{small}*={_core.Codec(text)}"


def written_out(rules: str) -> str:
    """The core writes a single rule as its codec alone."""
    return rules if ";" in rules else f"*={rules}"


def with_codec(rules: str, chosen: Callable[["_core.Codec | LowRank"], bool], codec: str) -> str:
    """The rules with `codec` in the place of every codec that is `chosen`."""
    changed = []
    for rule in rules.split(";"):
        pattern, _, spec = rule.partition("=")
        changed.append(f"{pattern}={codec}" if chosen(codec_of(spec)) else rule)
    return ";".join(changed)


def by_whole(rules: str, tensors: Iterable[tuple[str, int, int, int]]) -> str:
    """Rules that give a part of a tensor the codec of the whole: "<N" is about wholes, and the coder sees parts.
    tensors: (name, dimensions, elements of the whole, elements of the part)."""
    if not rules:
        return ""
    chosen, exceptions = _core.Rules(rules), ""
    for name, dimensions, whole, part in tensors:
        wanted = chosen.codec_for(name, dimensions, whole)
        if str(chosen.codec_for(name, dimensions, part)) != str(wanted):
            exceptions += f"{name}={wanted};"
    return exceptions + rules


def check_patterns(rules: str, names: Iterable[str], what: str, field: str = "codec") -> None:
    """Refuses a pattern that matches no name: it is misspelled, or written for another model. Patterns by dimension and
    by size ("1d", "2d", "<1024") are not about names, and need not match."""
    names = list(names)
    for rule in rules.split(";"):
        pattern = rule.partition("=")[0].strip()
        if pattern in ("1d", "2d", "*") or pattern.startswith("<"):
            continue
        alone = _core.Rules(f"{pattern}=fp16;*=fp32")
        if not any(str(alone.codec_for(name, 2, 1)) == "fp16" for name in names):
            raise UsageError(
                f"the rule '{rule.strip()}' matches no {what} of this model; they are {_some(names)}", field=field
            )


def _some(names: list[str]) -> str:
    shown = ", ".join(f"'{name}'" for name in names[:8])
    return shown if len(names) <= 8 else f"{shown} and {len(names) - 8} more"
