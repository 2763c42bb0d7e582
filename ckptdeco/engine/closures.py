"""Functions whose closure is frozen: a recompute sees what its variables held when forward ran.

`lambda x: layer(x)` in a loop looks `layer` up when it is called; by the time of backward the loop is over.
"""

from __future__ import annotations

import functools
from types import CellType, FunctionType
from typing import Any

from ckptdeco.engine.running import running

__all__ = ["rerunnable"]

_MAX_DEPTH = 4  # of functions that call functions


def rerunnable(function: Any) -> Any:
    """`function`, or if it has a closure, a callable that runs it as it is in forward and as it was in a recompute."""
    kept = _frozen(function)
    return function if kept is function else _Rerunnable(function, kept)


class _Rerunnable:
    __slots__ = ("function", "kept")

    def __init__(self, function: Any, kept: Any) -> None:
        self.function = function
        self.kept = kept

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        frame = running.frame
        if frame is None or not frame.again:
            return self.function(*args, **kwargs)
        return _frozen(self.kept)(*args, **kwargs)  # what one recompute writes to its variables, the next does not see


def _frozen(function: Any, depth: int = 0) -> Any:
    """A copy of a plain function with the present values of its closure; anything else is returned as it is.

    Functions in the closure are frozen in their turn. Other values are kept as they are: an object that is changed in
    place is seen changed.
    """
    if type(function) is functools.partial:
        inner = _frozen(function.func, depth)
        return function if inner is function.func else functools.partial(inner, *function.args, **function.keywords)
    if type(function) is not FunctionType or function.__closure__ is None or depth > _MAX_DEPTH:
        return function
    try:
        cells = tuple([CellType(_frozen(cell.cell_contents, depth + 1)) for cell in function.__closure__])
    except ValueError:  # a variable that has no value yet
        return function
    copy = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, cells)
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__dict__.update(function.__dict__)
    return copy
