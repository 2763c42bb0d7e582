"""Live activation bytes of one training step, operator by operator.

*Peak activation memory* is the most bytes allocated within one step and not yet freed, begun with all gradients None,
without those that end as some parameter's gradient: these exist under every policy. Parameters, optimizer state and the
batch exist before the step and are not counted.
"""

from __future__ import annotations

import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch

# The class lives in a module with a private name; torch's own (public) counter of operators is built on it as well.
from torch.utils.flop_counter import TorchDispatchMode  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class Point:
    """The state right after an allocation or a release.

    Attributes:
        n_operators: operators that had finished (the one that allocates is counted).
        elapsed_s: seconds since the meter was entered; the meter itself slows the step down.
        live_bytes: bytes of activations alive.
    """

    n_operators: int
    elapsed_s: float
    live_bytes: int


@dataclass(frozen=True, slots=True)
class ActivationTrace:
    """What an `ActivationMeter` saw.

    Attributes:
        timeline: one point for each change, in order, beginning with a point of zero bytes.
        marks: the point at which each `ActivationMeter.mark` was set.
        n_calls: how often each operator ran, by its full name (``aten.mm.default``).
    """

    timeline: tuple[Point, ...]
    marks: Mapping[str, Point]
    n_calls: Mapping[str, int]

    @property
    def peak_bytes(self) -> int:
        """The most bytes alive at any point."""
        return max(point.live_bytes for point in self.timeline)


@dataclass(frozen=True, slots=True)
class _Event:
    n_operators: int
    elapsed_s: float
    serial: int
    delta_bytes: int


class ActivationMeter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts every storage that operators allocate while it is entered, in forward, backward and recompute alike.

    A storage is counted from when it first leaves an operator until it is freed. Kept out: storages an operator was
    given (parameters, buffers, the batch and whatever else existed before), and those that are a parameter's gradient
    at exit. Not seen: scratch memory inside a kernel.

    Args:
        parameters: those whose gradients are left out.

    Cost:
        no memory but a small event for each allocation and release; Python runs for every operator (tens of µs each),
        so time a step without it. Results, RNG streams and lifetimes of tensors are those of a run without it.

    Example:
        >>> layer = torch.nn.Linear(8, 8)
        >>> x = torch.ones(4, 8, requires_grad=True)
        >>> with ActivationMeter(layer.parameters()) as meter:
        ...     loss = layer(x).sum()
        ...     meter.mark("backward")
        ...     loss.backward()
        >>> meter.trace.marks["backward"].live_bytes  # the loss; sum() does not save its input
        4
    """

    trace: ActivationTrace

    def __init__(self, parameters: Iterable[torch.nn.Parameter] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._parameters = list(parameters)
        self._events: list[_Event] = []
        self._marks: dict[str, int] = {}
        # Keyed by id: a storage's Python object lives as long as the storage does, also when only C++ holds it.
        self._known: dict[int, tuple[weakref.ref[torch.UntypedStorage], int, int]] = {}
        self._calls: Counter[Any] = Counter()
        self._gradients: set[int] = set()
        self._n_operators = 0
        self._n_serials = 0
        self._start_s = 0.0

    def mark(self, name: str) -> None:
        """Note the current point as ``name``, for example the turn from forward to backward."""
        self._record(-1, 0)
        self._marks[name] = len(self._events)

    @property
    def n_points(self) -> int:
        """Points of the timeline so far."""
        return len(self._events)

    def serial(self, storage: torch.UntypedStorage) -> int:
        """Number of a storage among those that operators made while the meter was entered; -1 for others."""
        known = self._known.get(id(storage))
        return -1 if known is None else known[1]

    def leave_out(self, gradient: torch.Tensor) -> None:
        """Leave a parameter's gradient out of the count although it may be gone at exit."""
        known = self._known.get(id(gradient.untyped_storage())) if gradient.layout is torch.strided else None
        if known is not None:
            self._gradients.add(known[1])

    def __enter__(self) -> ActivationMeter:
        self._start_s = time.perf_counter()
        self._record(-1, 0)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, traceback)  # type: ignore[no-untyped-call]
        self.trace = self._build_trace()
        self._known.clear()  # a dead weakref calls nobody: what is freed from now on is not of this step
        self._events.clear()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not torch.ops.aten.lift_fresh.default:  # torch.tensor(...): its argument is what it has just made
            for storage in _storages((args, kwargs)):
                if id(storage) not in self._known:
                    self._track(storage, -1, 0)
        out = func(*args, **kwargs)
        self._n_operators += 1
        self._calls[func] += 1
        for storage in _storages(out):
            self._see_output(storage)
        return out

    def _see_output(self, storage: torch.UntypedStorage) -> None:
        n_bytes = storage.nbytes()
        known = self._known.get(id(storage))
        if known is None:
            self._n_serials += 1
            self._track(storage, self._n_serials, n_bytes)
            self._record(self._n_serials, n_bytes)
        elif known[1] >= 0 and known[2] != n_bytes:  # resized in place
            self._track(storage, known[1], n_bytes)
            self._record(known[1], n_bytes - known[2])

    def _track(self, storage: torch.UntypedStorage, serial: int, n_bytes: int) -> None:
        key = id(storage)

        def freed(reference: weakref.ref[torch.UntypedStorage]) -> None:
            known = self._known.get(key)
            if known is not None and known[0] is reference:
                del self._known[key]
                if serial >= 0:
                    self._record(serial, -n_bytes)

        self._known[key] = (weakref.ref(storage, freed), serial, n_bytes)

    def _record(self, serial: int, delta_bytes: int) -> None:
        self._events.append(_Event(self._n_operators, time.perf_counter() - self._start_s, serial, delta_bytes))

    def _build_trace(self) -> ActivationTrace:
        gradients = {
            self._known[key][1]
            for key in (id(p.grad.untyped_storage()) for p in self._parameters if p.grad is not None)
            if key in self._known
        } | self._gradients
        live_bytes = 0
        timeline = []
        for event in self._events:
            if event.serial not in gradients:
                live_bytes += event.delta_bytes
            timeline.append(Point(event.n_operators, event.elapsed_s, live_bytes))
        marks = {name: timeline[n_events - 1] for name, n_events in self._marks.items()}
        n_calls = {str(operator): n for operator, n in self._calls.items()}
        return ActivationTrace(tuple(timeline), marks, n_calls)


def measure_step(
    forward: Callable[[], torch.Tensor], parameters: Iterable[torch.nn.Parameter], mark: str = "backward"
) -> ActivationTrace:
    """Run ``forward().backward()`` once, from gradients of None, and trace its activations.

    Args:
        forward: runs the forward pass and returns the loss.
        parameters: their gradients are set to None first, and are left out of the count.
        mark: name of the mark set between forward and backward.

    Returns:
        the trace; ``trace.marks[mark].live_bytes`` is what forward left alive.

    Cost:
        one training step, slowed down by the meter.
    """
    parameters = list(parameters)
    for parameter in parameters:
        parameter.grad = None
    with ActivationMeter(parameters) as meter:
        loss = forward()
        meter.mark(mark)
        loss.backward()  # type: ignore[no-untyped-call]
    return meter.trace


def _storages(tree: Any) -> Iterator[torch.UntypedStorage]:
    """The storages of the strided tensors in what operators take and return."""
    if isinstance(tree, torch.Tensor):
        if tree.layout is torch.strided:
            yield tree.untyped_storage()
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            yield from _storages(item)
    elif isinstance(tree, dict):
        yield from _storages(tuple(tree.values()))
