"""The modules whose state a call may read: the layer itself, or what a plain function refers to."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import FunctionType, MethodType
from typing import Any

from torch import nn

__all__ = ["modules_behind", "referred"]

_MAX_DEPTH = 4  # of functions that call functions
_FUNCTIONS = (FunctionType, MethodType, functools.partial)


def modules_behind(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[nn.Module]:
    """Modules among the arguments, bound to the function, in its closure, or named by it in its globals."""
    found: dict[int, nn.Module] = {}
    for value in (*referred(function), *args, *kwargs.values()):
        if isinstance(value, nn.Module):
            found[id(value)] = value
        elif isinstance(value, (list, tuple, dict)):
            items = value.values() if isinstance(value, dict) else value
            found.update({id(item): item for item in items if isinstance(item, nn.Module)})
    return list(found.values())


def referred(function: Any, depth: int = 0) -> Iterator[Any]:
    """What a function is bound to, holds in its closure or names in its globals; through functions of its module."""
    yield function
    if type(function) is functools.partial:
        yield from referred(function.func, depth)
        yield from function.args
        yield from function.keywords.values()
    elif type(function) is MethodType:
        yield function.__self__
    elif type(function) is FunctionType:
        names = function.__globals__
        values = [names.get(name) for name in function.__code__.co_names]
        values = [value for value in values if getattr(value, "__globals__", names) is names]
        for cell in function.__closure__ or ():
            try:
                values.append(cell.cell_contents)
            except ValueError:  # a variable that has no value yet
                continue
        for value in values:
            if type(value) in _FUNCTIONS and depth < _MAX_DEPTH:
                yield from referred(value, depth + 1)
            else:
                yield value
