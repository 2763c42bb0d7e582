"""timm without torchvision: its models need none of it, only their import does.

The wheel of torchvision fits only torch built for CUDA.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest

_MODULES = ("ops", "ops.misc", "transforms", "transforms.functional", "datasets", "models", "models.feature_extraction")


class _AnyClass(type):
    """A class that has every attribute."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _AnyClass(name, (), {})


class _StandIn(types.ModuleType):
    """A module that has every class."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return sys.modules.get(f"{self.__name__}.{name}") or _AnyClass(name, (), {})


@contextlib.contextmanager
def _stood_in() -> Iterator[None]:
    names = ["torchvision", *(f"torchvision.{name}" for name in _MODULES)]
    sys.modules.update({name: _StandIn(name) for name in names})
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]


def import_timm() -> Any:
    """timm, or the tests are skipped."""
    if importlib.util.find_spec("timm") is None:
        pytest.skip("needs timm", allow_module_level=True)
    with contextlib.nullcontext() if importlib.util.find_spec("torchvision") else _stood_in():
        return importlib.import_module("timm")
