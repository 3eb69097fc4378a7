# SPDX-License-Identifier: Apache-2.0
"""The small GPT of examples/ddp_gpt.py, for the scripts that train it in their own ways."""

import importlib.util

from rows import BENCH


def example():
    spec = importlib.util.spec_from_file_location("ddp_gpt", BENCH.parent / "examples/ddp_gpt.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
