"""Op-selective saving: what expensive operations returned stays, and they are not run again (`save=`).

A torch-function mode sees the operations of a layer call. Of each that is selected it keeps the result, and notes which
of the tensors that autograd saved in it are views of its arguments: a recompute has those arguments again, so it gives
these, and the result, without running the operation. What else the operation saved stays, too (the log-sum-exp of an
attention kernel). Everything around is dropped and recomputed as usual.

Streams that it drew from go on where it left them. Where all that might not be exact the operation is simply run again:
its result was changed in place, it returned a view of an argument, or a backward runs inside the layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ckptdeco.engine.attributes import as_non_leaf
from ckptdeco.engine.effects import Effects
from ckptdeco.engine.kept import storage_address, storage_of
from ckptdeco.engine.operations import Operation, arguments_of, look_at
from ckptdeco.engine.rng import restore
from ckptdeco.engine.running import running
from ckptdeco.engine.saved import is_parameter
from ckptdeco.engine.torch_private import grad_mode, is_plain_autograd, unseen_by_modes
from ckptdeco.engine.tree import tensors_in

if TYPE_CHECKING:
    from ckptdeco.engine.collect import Rerun
    from ckptdeco.engine.hooks import Hooks
    from ckptdeco.engine.probe import Probe

__all__ = ["InSelection", "Selects"]

_requires_grad = attrgetter("requires_grad")
_data: Any = Tensor.data
_BACKWARD = frozenset({torch.autograd.grad, torch.autograd.backward, Tensor.backward})
#: Functions that give access to the memory of a tensor, through which it may be written without a new version.
_EXPOSING = frozenset(
    {
        _data.__get__, Tensor.numpy, Tensor.__array__, Tensor.__dlpack__, Tensor.untyped_storage, Tensor.storage,
        Tensor.data_ptr, torch.unsafe_chunk, torch.unsafe_split, Tensor.unsafe_chunk, Tensor.unsafe_split,
    }
)  # fmt: skip
_WATCHED = _BACKWARD | _EXPOSING
_LEAST_GAIN = 2  # bytes dropped for each byte that is kept although the plain call keeps it not


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


class InSelection:
    """The body of one layer call, whose selected operations run once.

    Attributes:
        futile: why it makes no sense to save anything of the call, if so; it is then stored whole.
        kept_bytes: what is kept of the operations: their results and what only they saved.
        still_saved_bytes: the part of this that counts among the saved tensors of the call.
    """

    __slots__ = (
        "ends_with_call",
        "first",
        "function",
        "futile",
        "kept_bytes",
        "operations",
        "selects",
        "still_saved_bytes",
    )

    def __init__(self, function: Callable[..., Any], selects: Selects, *, ends_with_call: bool) -> None:
        self.function = function
        self.selects = selects
        self.ends_with_call = ends_with_call  # nobody runs the call again for its output: the last result is not needed
        self.operations: dict[int, Operation] = {}  # that are selected, by number
        self.first: _First | None = None  # the run in forward, until it is settled
        self.futile = ""
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
        self.first = _First(self, frame.collector)
        with self.first:
            return self.function(*args, **kwargs)

    def settle(
        self, hooks: Hooks | None, set_apart: Sequence[tuple[int, int]], inputs: list[Tensor], result: Any
    ) -> str:
        """The call is over: forget what cannot be used, and tell the probe what stays.

        Args:
            hooks: those of modules inside, if there were any.
            set_apart: saved tensors of theirs, which are the call's no more.
            inputs: of the call.
            result: of the call.

        Returns:
            Why the call is to be stored whole, if so.
        """
        first, self.first = self.first, None
        if first is None:
            return ""
        if first.is_off or (hooks is not None and hooks.took_part):
            self.operations.clear()
        probe = first.probe
        kept: dict[int, int] = {}
        for number, operation in [*self.operations.items()]:
            if set_apart:
                operation.without(set_apart)
            rest = (slot.value for slot in probe.saved[operation.end :])
            if not operation.is_usable() or id(operation.storage()) in first.exposed:
                del self.operations[number]
                continue
            if self.ends_with_call and all(value is None or is_parameter(value) for value in rest):
                operation.result = None
                if not operation.held:  # a recompute stops before its kernel
                    del self.operations[number]
                    continue
            probe.held |= operation.held
            for value in (operation.result, *(probe.saved[slot].value for slot in operation.held)):
                if value is not None:
                    kept[storage_address(value)] = value.untyped_storage().nbytes()
        self.kept_bytes = sum(kept.values())
        saved = probe.storages()
        self.still_saved_bytes = sum([n_bytes for address, n_bytes in kept.items() if address in saved])
        if self.kept_bytes == self.still_saved_bytes:
            return ""
        # Nothing is gained by dropping what is kept, or lives on anyway as the input of this call or of the next.
        others = {*kept, *map(storage_address, inputs)}
        if self.ends_with_call:
            others.update(map(storage_address, tensors_in(result)))
        gained = sum([n_bytes for address, n_bytes in saved.items() if address not in others])
        # During its recompute the call has both what it gained and what it kept.
        is_worth_it = gained >= _LEAST_GAIN * (self.kept_bytes - self.still_saved_bytes)
        if not is_worth_it:
            self.futile = "what save= would keep of it is about as much as what it would drop"
        return self.futile


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
        if func in _WATCHED:
            self.watch(func, args)
        elif not self.is_inside and running.selection is not None:  # which hooks inside are run without
            is_selected = self.selects.operation(func)
            if is_selected or (self.selects.has_names and getattr(func, "__name__", "") != "__get__"):
                return self.around(func, args, kwargs, is_selected)
        return func(*args, **kwargs)

    def around(self, func: Callable[..., Any], args: Any, kwargs: Any, is_selected: bool) -> Any:
        """Run an operation that may be selected: only those that take part in the graph count."""
        if not grad_mode():
            return func(*args, **kwargs)
        arguments = arguments_of(args, kwargs)
        if not self.is_inside and not any(map(_requires_grad, arguments)):
            return func(*args, **kwargs)
        number, self.n = self.n, self.n + 1
        return self.run_or_give(number, func, args, kwargs, arguments, is_selected)

    def run_or_give(
        self, number: int, func: Any, args: Any, kwargs: Any, arguments: list[Tensor], is_selected: bool
    ) -> Any:
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

    def watch(self, func: Any, args: Any) -> None:
        """A function that makes results unusable."""

    def name(self, value: Any, name: str) -> None:
        """The user names a result."""


class _First(_Mode):
    """The run in forward."""

    def __init__(self, selection: InSelection, probe: Probe) -> None:
        super().__init__(selection)
        self.probe = probe
        self.is_off = False  # a backward ran inside: it needs the graph
        self.exposed: set[int] = set()  # storages, by identity, that may be written without a new version
        self.nameable: dict[int, tuple[int, Operation]] = {}  # by address of the storage that the operation filled

    def watch(self, func: Any, args: Any) -> None:
        if func not in _EXPOSING:
            self.is_off = True
            return
        with unseen_by_modes():
            storage = storage_of(args[0]) if args and isinstance(args[0], Tensor) else None
        if storage is not None:
            self.exposed.add(id(storage))

    def run_or_give(
        self, number: int, func: Any, args: Any, kwargs: Any, arguments: list[Tensor], is_selected: bool
    ) -> Any:
        start = len(self.probe.saved)
        is_quiet = func in self.selects.quiet
        effects = None if is_quiet else Effects(func, args, kwargs, arguments, self.probe.watch, self.is_inside)
        result = func(*args, **kwargs)
        if type(result) is not Tensor or not result.requires_grad or result.layout is not torch.strided:
            return result
        if (effects is not None and effects.are_seen()) or not is_plain_autograd():
            return result
        with torch.no_grad(), unseen_by_modes():
            operation = look_at(self.probe.saved, start, result, arguments, is_layer=self.is_inside)
            if operation is None:
                return result
            if effects is not None:
                operation.drawn = effects.drawn()
            if is_selected:
                operation.keep(result)
                self.selection.operations[number] = operation
            else:
                self.nameable[storage_address(result)] = number, operation
        return result

    def name(self, value: Any, name: str) -> None:
        if not self.selects.name(name):
            return
        with torch.no_grad(), unseen_by_modes():
            for tensor in tensors_in(value):
                number, operation = self.nameable.get(storage_address(tensor), (-1, None))
                if operation is not None:
                    operation.keep(tensor)
                    if operation.result is not None:
                        self.selection.operations[number] = operation


class _Again(_Mode):
    """A run in backward."""

    def __init__(self, selection: InSelection, run: Rerun) -> None:
        super().__init__(selection)
        self.run = run

    def run_or_give(
        self, number: int, func: Any, args: Any, kwargs: Any, arguments: list[Tensor], is_selected: bool
    ) -> Any:
        operation, run = self.selection.operations.get(number), self.run
        if operation is None or run.n != operation.start or run.has_inner_backward:
            return func(*args, **kwargs)
        stops_here = 0 <= run.last < operation.end  # at a tensor that it saves: nobody asks for its result
        if not stops_here and not operation.is_usable():
            return func(*args, **kwargs)
        with unseen_by_modes():
            values = {slot: view.of(arguments) for slot, view in operation.views.items()}
            if None not in values.values():
                return self._give(operation, values)
        return func(*args, **kwargs)

    def _give(self, operation: Operation, values: dict[int, Any]) -> Tensor:
        """The result without the operation; its saved tensors are packed as if it had run."""
        for slot in range(operation.start, operation.end):
            if slot in values:
                self.run.pack(values[slot])
            else:
                self.run.n = slot + 1
        restore(operation.drawn)
        assert operation.result is not None
        result = operation.result.detach().requires_grad_()
        return result.view_as(result) if operation.is_view else as_non_leaf(result)
