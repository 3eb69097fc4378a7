# SPDX-License-Identifier: Apache-2.0
"""These tests are about the package as users have it: installed. A gradwire that is imported from the source tree has
either no module or a stale one, so nothing is run with it.
"""

import sys
from pathlib import Path

import numpy as np
import pytest

try:
    import gradwire
except ImportError as error:
    pytest.exit(f"gradwire cannot be imported ({error}): pip install . first, and run elsewhere than in python/", 2)

SOURCE = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(SOURCE / "tests/wire"))  # second_decoder.py, which knows nothing of the library


def pytest_configure(config):
    package = Path(gradwire.__file__).resolve()
    if SOURCE / "python" in package.parents:
        pytest.exit(
            f"gradwire is imported from the source tree ({package.parent}): pip install . first, and run elsewhere",
            returncode=2,
        )


@pytest.fixture(scope="session")
def golden():
    return SOURCE / "tests/wire/golden"


@pytest.fixture(scope="session")
def torch():
    return pytest.importorskip("torch")


@pytest.fixture(scope="session")
def cuda(torch):
    """torch, where it and gradwire can use a GPU."""
    if not torch.cuda.is_available() or gradwire._core.cuda_devices() == 0:
        pytest.skip("no GPU that torch and gradwire can use")
    return torch


@pytest.fixture
def gradient():
    return np.random.default_rng(7).standard_normal(70_001).astype(np.float32)


# Every codec, and whatever else its definition says is worth a test.
EVERY_CODEC = [spec for info in gradwire.codecs() for spec in dict.fromkeys([info["example"], *info["specs"]])]


@pytest.fixture(scope="session")
def ranks():
    """Processes that are ranks; see ranks.py."""
    pytest.importorskip("torch")
    from ranks import Ranks

    pool = Ranks()
    yield pool
    pool.close()
