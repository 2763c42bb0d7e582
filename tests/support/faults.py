"""Raising an exception at one point of a training step, every point in turn, and what may be seen afterwards.

Points are of four kinds:

* `user`: where the layers of `tests/support/fragile.py` call `point`, in forward, recompute, hooks and backward;
* `operator`: every operator that torch runs, the engine's own among them;
* `line`: every line of the package, where a `KeyboardInterrupt` may come;
* `call`: right after every call of a C function made by the package, and at the entry of each of its functions; that
  is where CPython looks for signals.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ckptdeco.engine.running import running
from ckptdeco.engine.torch_private import graph_task_id
from ckptdeco.errors import CheckpointError

PACKAGE = str(Path(sys.modules[CheckpointError.__module__].__file__ or "").parent)
ENGINE_KINDS = ("line", "call")
_OUT_OF_REACH = {"_forget"}  # a finalizer, which cannot raise
_NOP = dis.opmap["NOP"]
_DEMO = f"{PACKAGE}/demo"


class Failure(Exception):
    """Raised on purpose."""


class Faults:
    """Counts the points of one kind that a step passes and raises at one of them.

    Attributes:
        n: points passed.
        n_user: the user's points passed outside of recomputes: how far a step came, comparable with a plain run.
        where: the point at which it was raised.
        is_of_torch: whether that was in an operator of autograd's own backward, which keeps a reference to its graph
            after an exception there, also in a plain run.
        places: the points passed, if asked for.
    """

    def __init__(self, kind: str, at: int | None = None, error: type[BaseException] = Failure) -> None:
        self.kind = kind
        self.at = at
        self.error = error
        self.n = self.n_user = 0
        self.where = ""
        self.is_of_torch = False
        self.places: list[str] | None = None
        self.sample: Callable[[], None] | None = None  # called between what the user's code does
        self._stack: list[Any] = []

    def pass_by(self, where: str) -> None:
        """One point; raises if it is the one."""
        self.n += 1
        if self.places is not None:
            self.places.append(where)
        if self.n - 1 == self.at:
            self.where = where
            self.is_of_torch = self.kind == "operator" and graph_task_id() != -1 and not running.recomputing
            raise self.error(f"on purpose at {where}")

    def __enter__(self) -> Faults:
        global _active
        _active = self
        if self.kind == "operator" or self.sample is not None:
            mode = _Operators(self)
            mode.__enter__()
            self._stack.append(mode)
        if self.kind == "line":
            sys.settrace(self._trace)
        if self.kind == "call":
            sys.setprofile(self._profile)
        return self

    def __exit__(self, *error: Any) -> None:
        global _active
        sys.settrace(None)
        sys.setprofile(None)
        _active = None
        while self._stack:
            self._stack.pop().__exit__(*error)

    def _trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        code = frame.f_code
        if not _is_ours(code):
            return None
        return self._trace_line

    def _trace_line(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line" and not _is_out_of_reach(frame):
            self.pass_by(_place(frame))
        return self._trace_line

    def _profile(self, frame: FrameType, event: str, arg: Any) -> None:
        if event == "call" and frame.f_code.co_name == "<genexpr>":
            return  # `any(…)` may be closing it where it waits, and Python swallows what is raised meanwhile
        if event in ("call", "c_return") and _is_ours(frame.f_code) and not _is_out_of_reach(frame):
            self.pass_by(f"{_place(frame)} {event} {getattr(arg, '__name__', '')}")


_active: Faults | None = None


def _is_ours(code: Any) -> bool:
    name = code.co_filename
    return name.startswith(PACKAGE) and not name.startswith(_DEMO) and code.co_qualname not in _OUT_OF_REACH


def _is_out_of_reach(frame: FrameType) -> bool:
    """Where no interrupt comes (`try:`), and where none can be dealt with: an `__exit__` before it has begun."""
    if frame.f_lasti >= 0 and frame.f_code.co_code[frame.f_lasti] == _NOP:
        return True
    return frame.f_code.co_name == "__exit__" and frame.f_lasti <= 4


def _place(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename.removeprefix(PACKAGE)[1:]}:{frame.f_lineno} {frame.f_code.co_qualname}"


class _Operators(TorchDispatchMode):
    def __init__(self, faults: Faults) -> None:
        super().__init__()
        self.faults = faults

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        faults = self.faults
        if faults.sample is not None:
            faults.sample()
        if faults.kind == "operator":
            faults.pass_by(f"{func} {'recompute' if running.recomputing else ''}")
        out = func(*args, **(kwargs or {}))
        if faults.sample is not None:
            faults.sample()
        return out


def point(where: str, *, is_progress: bool = True) -> None:
    """A place in the user's code where something may fail."""
    faults = _active
    if faults is None or faults.where:
        return
    if faults.sample is not None:
        faults.sample()
    if is_progress and not running.recomputing:
        faults.n_user += 1
    if faults.sample is not None:
        faults.sample()
    if faults.kind == "user":
        faults.pass_by(f"{where} {'recompute' if running.recomputing else ''}")


def errors_in_turn(kind: str, at: int) -> type[BaseException]:
    """The exception for a point: all kinds of them at the user's and operators' points, an interrupt elsewhere."""
    if kind in ENGINE_KINDS:
        return KeyboardInterrupt
    return (Failure, KeyboardInterrupt, torch.OutOfMemoryError, SystemExit)[at % 4]
