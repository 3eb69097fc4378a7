# SPDX-License-Identifier: Apache-2.0
"""The package runs in every Python that pyproject.toml allows, though these tests mostly run in a newer one. What the
oldest lacks is therefore looked for in the sources: newer syntax, and `X | None` in an annotation that is evaluated.
"""

import ast
import re
from pathlib import Path

import gradwire

SOURCE = Path(__file__).resolve().parents[2]


def annotations(tree):
    for node in ast.walk(tree):
        for field in ("annotation", "returns"):
            if getattr(node, field, None) is not None:
                yield getattr(node, field)


def is_union(node):
    return any(isinstance(part, ast.BinOp) and isinstance(part.op, ast.BitOr) for part in ast.walk(node))


def test_the_package_has_nothing_that_its_oldest_python_lacks():
    text = (SOURCE / "pyproject.toml").read_text(encoding="utf-8")
    oldest = tuple(map(int, re.search(r'requires-python = ">=(\d+)\.(\d+)"', text).groups()))
    files = sorted(Path(gradwire.__file__).parent.rglob("*.py"))
    assert len(files) > 40
    for file in files:
        tree = ast.parse(file.read_text(encoding="utf-8"), str(file), feature_version=oldest)
        kept_as_text = any(isinstance(node, ast.ImportFrom) and node.module == "__future__" for node in tree.body)
        if oldest < (3, 10) and not kept_as_text:
            lines = [node.lineno for node in annotations(tree) if is_union(node)]
            assert not lines, f"{file.name}: lines {lines} need `from __future__ import annotations`"
