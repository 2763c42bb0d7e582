"""The saved-tensor hooks of one run of a call in backward: they collect, compare and stop (R10, R22, R23).

A run hands its saved tensors to whom they wait for, slot by slot, as forward recorded them; its own graph gets cells
that are emptied when it ends.
"""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING

from torch import Tensor

from ckptdeco.engine.fingerprint import fingerprint
from ckptdeco.engine.trace import Trace, first_difference
from ckptdeco.errors import SavedTensorMismatch, StaleGraphError, TensorMeta

if TYPE_CHECKING:
    from ckptdeco.engine.call import Call
    from ckptdeco.engine.saved import Saved
    from ckptdeco.engine.streams import Stream

__all__ = ["Rerun", "Stop", "Waiting", "tensor_mismatch"]


class Waiting(dict[int, tuple[Tensor, int]]):
    """Recomputed saved tensors of one call that wait to be unpacked, by slot, with the version they had when saved."""

    __slots__ = ("is_read_again",)

    def __init__(self) -> None:
        self.is_read_again = False  # a custom Function reads its saved tensors twice: keep them (R31)


class Stop(BaseException):
    """Ends a recompute whose last needed tensor exists (R10). Not an `Exception`: user code shall not catch it."""


class _StopThroughHooks(Stop, Exception):
    """The same where forward hooks take part: those that torch calls always, it calls for an `Exception` only."""


class _Cell:
    """What a recompute's own graph holds in place of a saved tensor, until the run ends (R23)."""

    __slots__ = ("value",)

    def __init__(self, value: Tensor | None) -> None:
        self.value = value


_meta = attrgetter("shape", "dtype", "device")
_EMPTY = _Cell(None)  # for the many calls in which no backward runs


class Rerun:
    """The saved-tensor hooks of one run of a call in backward."""

    __slots__ = (
        "body",
        "call",
        "cells",
        "drew",
        "error",
        "fills_memory",
        "has_inner_backward",
        "has_modes",
        "is_disturbed",
        "last",
        "n",
        "n_wanted",
        "packed",
        "stop",
        "stopped",
        "trace",
        "waiting",
        "wanted",
    )

    def __init__(self, call: Call, waiting: Waiting | None, may_stop: bool) -> None:
        self.call = call
        self.body = call.body
        self.waiting = waiting
        self.n = 0
        self.cells: list[_Cell] = []
        self.error: BaseException | None = None
        self.has_inner_backward = call.has_inner_backward
        self.fills_memory = False
        self.has_modes = True  # the dispatch modes of forward, if they are not active now
        self.drew: list[Stream] = []  # streams that forward did not draw from
        self.is_disturbed = False  # another thread drew from a stream that it uses
        self.stop = Stop if call.hooks is None or not call.hooks.took_part else _StopThroughHooks
        self.stopped = False
        self.trace: Trace | None = None
        self.packed: dict[int, int | None] = {}  # fingerprints when saved, if the call is one that has to tell (R20)
        # What is still wanted: slots whose graph is alive.
        self.wanted = wanted = [None if slot is None else slot() for slot in call.slots]
        self.n_wanted = n = len(wanted)
        self.last = -1  # slot at which to stop
        if may_stop:
            while n and wanted[n - 1] is None:
                n -= 1
            self.last = n - 1

    def tracing(self) -> Trace:
        """Record the operators of this run."""
        self.trace = Trace()
        return self.trace

    def pack(self, tensor: Tensor) -> _Cell:
        """The hook of this run's own graph: give the tensor to whom it waits for, and stop after the last one."""
        index = self.n
        if self.stopped:  # user code swallowed the stop (R20)
            raise self.stop
        self.n = index + 1
        saved = self.wanted[index] if index < self.n_wanted else None
        value = None
        if saved is not None:
            value = tensor if tensor.grad_fn is None else tensor.detach()
            if saved.meta != _meta(tensor):
                self.error = tensor_mismatch(self.call, saved, tensor, self.trace)
                raise self.error
            if self.waiting is not None:
                self.waiting[index] = value, value._version
                if self.call.structure is not None:
                    self.packed[index] = fingerprint(value)
        if index == self.last:
            self.stopped = True
            raise self.stop
        if not self.has_inner_backward:
            return _EMPTY
        if value is None:
            value = tensor if tensor.grad_fn is None else tensor.detach()
        cell = _Cell(value)
        self.cells.append(cell)
        return cell

    def unpack(self, cell: _Cell) -> Tensor:
        """What a backward within the run asks for."""
        if cell.value is None:
            raise StaleGraphError(self.call.info.label)
        return cell.value

    def end(self) -> None:
        """Let go of what the run's own graph held."""
        if self.cells:
            for cell in self.cells:
                cell.value = None
            self.cells = []

    def verify(self) -> list[int]:
        """Compare the run with forward (R22); raises. Returns slots whose values differ, if values are compared."""
        if self.error is not None:  # raised before, but user code swallowed it
            raise self.error
        call = self.call
        n_forward = self.n_wanted
        if not self.stopped and self.n != n_forward and not (self.n > n_forward and call.options.early_stop):
            raise SavedTensorMismatch(call.info.label, None, n_forward, self.n, trace=_trace(call, self.trace))
        if self.waiting is None:
            return []
        if call.structure is not None:
            self._learn_structure(self.waiting)
        if not call.is_checked:
            return []
        if call.options.determinism_check != "values":
            call.is_checked = False  # verified once (R12)
        return self._differing(self.waiting)

    def _learn_structure(self, waiting: Waiting) -> None:
        """The run was not stopped: were its tensors filled when they were saved?"""
        protection = self.call.protection
        if all(fingerprint(waiting[index][0]) == values for index, values in self.packed.items()):
            protection.structures.add(self.call.structure)
        else:
            protection.is_stop_safe = False
        self.call.structure = None

    def _differing(self, waiting: Waiting) -> list[int]:
        found = []
        ignored = self.call.protection.ignored_slots
        for index, (value, _) in waiting.items():
            saved = self.wanted[index]
            values = None if saved is None else getattr(saved, "values", None)
            if values is None or index in ignored:
                continue
            if fingerprint(value) not in (values, None):
                found.append(index)
        return found


def tensor_mismatch(call: Call, saved: Saved, tensor: Tensor | None, trace: Trace | None = None) -> SavedTensorMismatch:
    """The error for a slot that got another tensor than in forward, or none."""
    shape, dtype, device = saved.meta
    return SavedTensorMismatch(
        call.info.label,
        saved.index,
        TensorMeta(tuple(shape), dtype, device),
        None if tensor is None else TensorMeta.of(tensor),
        trace=_trace(call, trace),
    )


def _trace(call: Call, trace: Trace | None) -> str:
    return first_difference(call.trace, None if trace is None else trace.operators)
