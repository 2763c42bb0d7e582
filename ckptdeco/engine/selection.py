"""Op-selective saving: what expensive operations returned stays, and they are not run again (`save=`).

A torch-function mode sees the operations of a layer call. Of each that is selected it keeps the result, and notes which
of the tensors that autograd saved in it are views of its arguments: a recompute has those arguments again, so it gives
these, and the result, without running the operation. What else the operation saved stays, too (the log-sum-exp of an
attention kernel). Everything around is dropped and recomputed as usual.

Streams that it drew from go on where it left them. Where all that might not be exact the operation is simply run again:
its result was changed in place, it returned a view of an argument, or a backward runs inside the layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ckptdeco.engine.host_rng import global_streams
from ckptdeco.engine.kept import storage_address
from ckptdeco.engine.rng import Draws, capture, devices_of, restore
from ckptdeco.engine.running import running
from ckptdeco.engine.saved import is_parameter
from ckptdeco.engine.streams import OfDevice
from ckptdeco.engine.torch_private import unseen_by_modes
from ckptdeco.engine.tree import tensors_in

if TYPE_CHECKING:
    from ckptdeco.engine.collect import Rerun
    from ckptdeco.engine.probe import Probe

__all__ = ["InSelection", "Selects"]


class Selects:
    """What is selected. The base class selects nothing; `ckptdeco.save` says what users may.

    Attributes:
        has_names: whether results may be selected by name, so that all operations have to be looked at.
        quiet: functions that surely draw no random numbers.
    """

    has_names = False
    quiet: frozenset[Any] = frozenset()

    def operation(self, function: Any) -> bool:
        """Whether the results of this function of torch stay."""
        return False

    def name(self, name: str) -> bool:
        """Whether results of this name stay."""
        return False

    def layer(self, layer: Any, name: str) -> bool:
        """Whether the results of this decorated layer inside the call stay."""
        return False


class _View:
    """A saved tensor that is an argument of the operation, or a view or a cast of it."""

    __slots__ = ("argument", "dtype", "like", "offset", "shape", "stride")

    def __init__(self, argument: int, value: Tensor, source: Tensor) -> None:
        self.argument = argument
        self.dtype = value.dtype
        self.shape, self.stride = value.shape, value.stride()
        self.offset = value.storage_offset() - source.storage_offset() if value.dtype == source.dtype else 0
        self.like = source.shape, source.stride(), source.dtype

    def of(self, arguments: list[Tensor]) -> Tensor | None:
        """The same of the arguments in a recompute; None if they are laid out in another way."""
        if self.argument >= len(arguments):
            return None
        source = arguments[self.argument].detach()
        if (source.shape, source.stride(), source.dtype) != self.like:
            return None
        if self.dtype != source.dtype:
            return source.to(self.dtype).as_strided(self.shape, self.stride, 0)
        return source.as_strided(self.shape, self.stride, source.storage_offset() + self.offset)


class _Operation:
    """One operation of a call, and its places among the saved tensors."""

    __slots__ = ("drawn", "end", "geometry", "held", "needs_grad", "result", "start", "version", "views")

    def __init__(self, start: int, end: int, result: Tensor, views: dict[int, _View], held: set[int]) -> None:
        self.start = start
        self.end = end
        self.views = views
        self.held = held  # slots that stay if the result does
        self.needs_grad = result.requires_grad
        self.geometry = result.shape, result.stride(), result.storage_offset()
        self.result: Tensor | None = None
        self.version = result._version
        self.drawn: Draws = ()  # streams that it drew from, as it left them

    def keep(self, over: Tensor) -> None:
        """Keep the result, which lies in the storage of `over`."""
        if over._version == self.version:
            self.result = over.detach().as_strided(*self.geometry)

    def is_usable(self) -> bool:
        """Whether the result is kept, and has the values that the operation gave it."""
        return self.result is not None and self.result._version == self.version


class InSelection:
    """The body of one layer call, whose selected operations run once.

    Attributes:
        kept_bytes: what is kept of the operations: their results and what only they saved.
        still_saved_bytes: the part of this that counts among the saved tensors of the call.
    """

    __slots__ = ("ends_with_call", "function", "kept_bytes", "operations", "selects", "still_saved_bytes")

    def __init__(self, function: Callable[..., Any], selects: Selects, *, ends_with_call: bool) -> None:
        self.function = function
        self.selects = selects
        self.ends_with_call = ends_with_call  # nobody runs the call again for its output: the last result is not needed
        self.operations: dict[int, _Operation] = {}  # that are selected, by number
        self.kept_bytes = self.still_saved_bytes = 0

    def anew(self) -> Callable[..., Any]:
        """The same with everything run, for a run that only answers a question."""
        return self.function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it: for the first time, or again."""
        frame = running.frame
        if frame is None or frame.collector is None:
            return self.function(*args, **kwargs)
        if frame.again:
            with _Again(self, frame.collector):
                return self.function(*args, **kwargs)
        first = _First(self, frame.collector)
        with first:
            result = self.function(*args, **kwargs)
        first.settle()
        return result


class _Mode(TorchFunctionMode):
    """Sees the operations of a run and counts those that may be selected."""

    def __init__(self, selection: InSelection) -> None:
        super().__init__()
        self.selection = selection
        self.selects = selection.selects
        self.n = 0
        self.is_inside = False  # a selected layer, whose operations are not looked at
        self.before: Any = None

    def __enter__(self) -> Any:
        self.before, running.selection = running.selection, self
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: object) -> None:
        running.selection = self.before
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.is_inside:
            is_selected = self.selects.operation(func)
            if is_selected or (self.selects.has_names and func.__name__ != "__get__"):
                return self.around(func, args, kwargs, is_selected)
        return func(*args, **kwargs)

    def around(self, func: Callable[..., Any], args: Any, kwargs: Any, is_selected: bool) -> Any:
        """Run an operation, or give what it returned."""
        raise NotImplementedError

    def around_layer(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The same for a selected layer inside the call."""
        if self.is_inside:
            return forward(*args, **kwargs)
        self.is_inside = True
        try:
            return self.around(forward, args, kwargs, is_selected=True)
        finally:
            self.is_inside = False

    def name(self, value: Tensor, name: str) -> None:
        """The user names a result."""


class _First(_Mode):
    """The run in forward."""

    def __init__(self, selection: InSelection, probe: Probe) -> None:
        super().__init__(selection)
        self.probe = probe
        self.nameable: dict[int, tuple[int, _Operation]] = {}  # by address of the storage that the operation filled

    def around(self, func: Callable[..., Any], args: Any, kwargs: Any, is_selected: bool) -> Any:
        number, self.n = self.n, self.n + 1
        start = len(self.probe.saved)
        devices = () if func in self.selects.quiet else devices_of(tensors_in([args, kwargs]))
        streams = () if func in self.selects.quiet else (*global_streams(), *map(OfDevice, devices))
        marks = [stream.mark() for stream in streams]
        result = func(*args, **kwargs)
        if type(result) is not Tensor or not result.requires_grad or result.layout is not torch.strided:
            return result
        with torch.no_grad(), unseen_by_modes():
            operation = self._look_at(start, result, args, kwargs)
            if operation is not None:
                moved = [stream for stream, mark in zip(streams, marks, strict=True) if stream.mark() != mark]
                operation.drawn = capture(moved)
            if operation is not None and is_selected:
                operation.keep(result)
                self.selection.operations[number] = operation
            elif operation is not None:
                self.nameable[storage_address(result)] = number, operation
        return result

    def name(self, value: Tensor, name: str) -> None:
        number, operation = self.nameable.get(storage_address(value), (-1, None))
        if operation is not None and self.selects.name(name):
            with torch.no_grad(), unseen_by_modes():
                operation.keep(value)
                self.selection.operations[number] = operation

    def _look_at(self, start: int, result: Tensor, args: Any, kwargs: Any) -> _Operation | None:
        """What can be told of an operation that has run; None if it is to be run again."""
        saved = self.probe.saved
        arguments = _arguments(args, kwargs)
        places = {storage_address(t): i for i, t in reversed([*enumerate(arguments)])}
        address = storage_address(result)
        if address in places:
            return None
        views: dict[int, _View] = {}
        held: set[int] = set()
        extra: dict[int, int] = {}
        for slot in range(start, len(saved)):
            value = saved[slot].value
            if value is None or is_parameter(value):
                continue
            argument = _argument_of(value, arguments, places)
            if argument is None:
                held.add(slot)
                extra[storage_address(value)] = value.nbytes
            else:
                views[slot] = _View(argument, value, arguments[argument])
        extra.pop(address, None)
        if sum(extra.values()) > result.nbytes and not self.is_inside:  # more than the result is worth
            return None
        return _Operation(start, len(saved), result, views, held)

    def settle(self) -> None:
        """The call is over: forget what cannot be used, and tell the probe what stays."""
        selection, saved = self.selection, self.probe.saved
        kept: dict[int, int] = {}
        for number, operation in [*selection.operations.items()]:
            rest = (slot.value for slot in saved[operation.end :])
            is_last = selection.ends_with_call and all(value is None or is_parameter(value) for value in rest)
            if is_last or not operation.is_usable():
                del selection.operations[number]
                continue
            self.probe.held |= operation.held
            for value in (operation.result, *(saved[slot].value for slot in operation.held)):
                if value is not None:
                    kept[storage_address(value)] = value.untyped_storage().nbytes()
        selection.kept_bytes = sum(kept.values())
        storages = self.probe.storages()
        selection.still_saved_bytes = sum(n_bytes for address, n_bytes in kept.items() if address in storages)


class _Again(_Mode):
    """A run in backward."""

    def __init__(self, selection: InSelection, run: Rerun) -> None:
        super().__init__(selection)
        self.run = run

    def around(self, func: Callable[..., Any], args: Any, kwargs: Any, is_selected: bool) -> Any:
        number, self.n = self.n, self.n + 1
        operation, run = self.selection.operations.get(number), self.run
        if operation is None or run.n != operation.start or run.has_inner_backward or not operation.is_usable():
            return func(*args, **kwargs)
        with unseen_by_modes():
            arguments = _arguments(args, kwargs)
            values = {slot: view.of(arguments) for slot, view in operation.views.items()}
            if None not in values.values():
                return self._give(operation, values)
        return func(*args, **kwargs)

    def _give(self, operation: _Operation, values: dict[int, Any]) -> Tensor:
        """The result without the operation; its saved tensors are packed as if it had run."""
        for slot in range(operation.start, operation.end):
            if slot in values:
                self.run.pack(values[slot])
            else:
                self.run.n = slot + 1
        restore(operation.drawn)
        assert operation.result is not None
        result = operation.result.detach()
        return result.requires_grad_().view_as(result) if operation.needs_grad else result


def _arguments(args: Any, kwargs: Any) -> list[Tensor]:
    return [tensor for tensor in tensors_in([args, kwargs]) if tensor.layout is torch.strided]


def _argument_of(value: Tensor, arguments: list[Tensor], places: dict[int, int]) -> int | None:
    """Which argument a saved tensor is a view of, or a cast by autocast."""
    argument = places.get(storage_address(value))
    if argument is not None:
        source = arguments[argument]
        is_alike = (source.dtype, source.is_conj(), source.is_neg()) == (value.dtype, value.is_conj(), value.is_neg())
        return argument if is_alike else None
    if not torch.is_autocast_enabled(value.device.type):
        return None
    for i, source in enumerate(arguments):
        geometry = [(source.shape, source.stride()), (source.shape[::-1], source.stride()[::-1])]
        if source.dtype != value.dtype and (value.shape, value.stride()) in geometry[: 2 if value.dim() == 2 else 1]:
            return i
    return None
