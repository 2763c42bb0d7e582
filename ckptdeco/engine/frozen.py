"""Objects of any class that can be pickled, as bytes: to notice that one was changed in place, and to copy it.

NumPy arrays, generators of Python and NumPy, objects with slots or with a `__reduce__` of their own. Tensors, modules,
functions and classes in them are passed by reference: they are looked at elsewhere, or do not change. Large objects
are not looked at.
"""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Callable, Iterator
from enum import Enum
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["copy_frozen", "freeze"]

_MOST = 1 << 16  # bytes
_BY_REFERENCE = (
    Tensor, nn.Module, type, FunctionType, BuiltinFunctionType, MethodType, ModuleType, Enum, torch.Generator, Iterator,
)  # fmt: skip


class _TooLarge(Exception):
    pass


class _Bounded(io.BytesIO):
    def write(self, data: Any) -> int:
        if self.tell() + len(data) > _MOST:
            raise _TooLarge
        return super().write(data)


class _Freezer(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=4)
        self.references: list[Any] = []

    def persistent_id(self, value: Any) -> int | None:
        if not isinstance(value, _BY_REFERENCE):
            if getattr(value, "nbytes", 0) > _MOST:
                raise _TooLarge
            return None
        self.references.append(value)
        return len(self.references) - 1


class _Thawer(pickle.Unpickler):
    references: list[Any]

    def persistent_load(self, pid: Any) -> Any:
        return self.references[pid]


def freeze(value: Any) -> tuple[bytes, list[Any]] | None:
    """The object as bytes and what it refers to; None if it cannot be frozen, or is by reference itself."""
    if isinstance(value, _BY_REFERENCE):
        return None
    file = _Bounded()
    freezer = _Freezer(file)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            freezer.dump(value)
    except Exception:  # pickling runs code of the object's class, which may refuse in any way
        return None
    return file.getvalue(), freezer.references


def copy_frozen(value: Any, keep: Callable[[Any], Any]) -> Any:
    """A copy of an object that can be frozen, else the object; `keep` gives what stands for what it refers to."""
    frozen = freeze(value)
    if frozen is None:
        return value
    thawer = _Thawer(io.BytesIO(frozen[0]))
    thawer.references = [keep(reference) for reference in frozen[1]]
    try:
        return thawer.load()
    except Exception:  # as above
        return value
