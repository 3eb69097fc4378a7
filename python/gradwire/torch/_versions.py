# SPDX-License-Identifier: Apache-2.0
"""What is said about a version that does not suffice: of torch, and of the frameworks that gradwire fits into."""

import importlib
from types import ModuleType

from .._errors import UnsupportedError

TORCH = (2, 1)
_TESTED = "2.11, 2.13 and 2.15 were tested: pip install --upgrade torch"


def check_torch(version: str) -> None:
    """Refuses a torch that is too old."""
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())
    if len(numbers) == 2 and numbers < TORCH:
        least = ".".join(map(str, TORCH))
        raise UnsupportedError(f"torch {version} is too old; gradwire.torch needs {least}, {_TESTED}", field="torch")


def refuse_torch(version: str, error: ImportError) -> None:
    """Says which torch it is that lacks something. Returns if it was not torch."""
    if (error.name or "").partition(".")[0] == "torch":
        raise UnsupportedError(
            f"torch {version} lacks what gradwire.torch needs ({error}); {_TESTED}", field="torch"
        ) from error


def framework(names: tuple[str, ...], module: str) -> ModuleType:
    """The first of these packages that is installed."""
    for name in names:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or name.partition(".")[0] != error.name.partition(".")[0]:
                raise  # it is installed, and something that it needs is not
    package = names[0].partition(".")[0]
    raise ModuleNotFoundError(f"{module} needs {package}, which is not installed: pip install {package}", name=package)


def needs(thing: object, names: tuple[str, ...], package: str, version: str) -> None:
    """Refuses a version of a framework that lacks something. version: one that has it."""
    for name in names:
        if not hasattr(thing, name):
            kind = thing.__name__ if isinstance(thing, type) else type(thing).__name__
            found = getattr(importlib.import_module(package), "__version__", "of an unknown version")
            raise UnsupportedError(
                f"{package} {found} has no {kind}.{name}, which gradwire needs; {package} {version} has it: pip "
                f"install --upgrade {package}",
                field=package,
            )
