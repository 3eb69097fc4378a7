# SPDX-License-Identifier: Apache-2.0
"""The text of a low-rank codec, "lowrank:rank=4,bits=8,alternate=off", and the matrices that it is about. The core does
not know it: factors are exchanged by codecs of the core, and products are torch's (_lowrank.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .._errors import UsageError
from ._hook import memory_order

NAME = "lowrank"
# How factors are sent, by `bits`. They are rounded to nearest, since what that leaves out comes again. Short buckets
# keep the strong rows of a factor apart from the weak ones.
FACTOR_CODECS = {
    4: "qsgd:bits=4,bucket=64,rounding=nearest",
    8: "qsgd:bits=8,bucket=128,rounding=nearest",
    16: "bf16",
    32: "fp32",
}
_ALLOWED = {"rank": "an integer from 1 to 64", "bits": "one of 4, 8, 16, 32", "alternate": "one of on, off"}


def is_lowrank(spec: str) -> bool:
    return spec.partition(":")[0].strip() == NAME


@dataclass(frozen=True)
class LowRank:
    rank: int = 4
    bits: int = 8
    alternate: bool = False
    lossless = False
    feedback = momentum = True

    @classmethod
    def parse(cls, spec: str) -> "LowRank":
        _, colon, rest = spec.partition(":")
        given: dict[str, str] = {}
        for item in rest.split(",") if colon else []:
            name, equals, value = (part.strip() for part in item.partition("="))
            if name not in _ALLOWED or not equals:
                raise UsageError(
                    f"codec is '{spec}': lowrank has no parameter '{item.strip()[:40]}'; it has rank=, bits= and "
                    "alternate=",
                    field=name or "codec",
                )
            if name in given:
                raise UsageError(f"codec is '{spec}': {name} is given twice", field=name)
            given[name] = value
        rank, bits = given.get("rank", str(cls.rank)), given.get("bits", str(cls.bits))
        alternate = given.get("alternate", "on" if cls.alternate else "off")
        fine = {
            "rank": rank.isascii() and rank.isdecimal() and len(rank) <= 2 and 1 <= int(rank) <= 64,
            "bits": bits in map(str, FACTOR_CODECS),
            "alternate": alternate in ("on", "off"),
        }
        for name, value in (("rank", rank), ("bits", bits), ("alternate", alternate)):
            if not fine[name]:
                raise UsageError(
                    f"codec is '{spec}': {name} is '{value[:40]}'; allowed is {_ALLOWED[name]}", field=name
                )
        return cls(int(rank), int(bits), alternate == "on")

    def __str__(self) -> str:
        return f"{NAME}:rank={self.rank},bits={self.bits},alternate={'on' if self.alternate else 'off'}"

    def fits(self, shape: "MatrixShape") -> bool:
        """Whether both factors exist and are less to send than the matrix itself."""
        small = self.rank * (shape.rows + shape.columns) * self.bits < 32 * shape.rows * shape.columns
        return self.rank <= min(shape.rows, shape.columns) and small


class MatrixShape:
    """A tensor of two or more dimensions as a matrix: the first dimension, and all others together. Dimensions are in
    the order of memory, as gradients stand in DDP's buckets; in another memory format columns stand in another order.
    """

    def __init__(self, like: torch.Tensor) -> None:
        order = memory_order(like)
        self.rows = like.shape[order[0] if order is not None else 0]  # with gaps: its gradient has none
        self.columns = like.numel() // max(self.rows, 1)

    def of(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.view(self.rows, self.columns)
