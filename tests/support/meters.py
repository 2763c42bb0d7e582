"""Counters of bytes, layer forwards and matmuls: costs are counted here, never timed."""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

_counters: list[Counter[str]] = []
_logs: list[list[str]] = []


def tick(name: str) -> None:
    """Called by the test layers at the top of each forward. Kept outside the module: no state of the layer."""
    for counter in _counters:
        counter[name] += 1
    for log in _logs:
        log.append(f"F{name}")


def mark(name: str) -> None:
    """Notes in the logs that the backward of a call began."""
    for log in _logs:
        log.append(f"B{name}")


@contextlib.contextmanager
def count_forwards() -> Iterator[Counter[str]]:
    """Counts layer forwards by layer name, recomputes included."""
    counter: Counter[str] = Counter()
    _counters.append(counter)
    try:
        yield counter
    finally:
        _counters.remove(counter)


@contextlib.contextmanager
def log_calls() -> Iterator[list[str]]:
    """Logs "F<layer>" for each forward and "B<layer>" for each call whose backward begins (see `layers.Marked`)."""
    log: list[str] = []
    _logs.append(log)
    try:
        yield log
    finally:
        _logs[:] = [other for other in _logs if other is not log]


class ByteMeter(TorchDispatchMode):
    """Follows the bytes of every storage that an operator makes, until it is freed.

    Storages that exist before (parameters, the batch) are not counted; those that end as some parameter's gradient
    are left out of `live_bytes` and `peak_bytes`. Peak: the most bytes allocated since the meter was entered and
    not yet freed, without the gradients of parameters.
    """

    def __init__(self, parameters: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.parameters = list(parameters)
        self.events: list[tuple[int, int]] = []  # (storage number, bytes: positive when made, negative when freed)
        self._seen: dict[int, tuple[weakref.ref[Any], int, int]] = {}
        self._n_storages = 0
        for parameter in self.parameters:
            self._add(parameter, is_new=False)

    def _forget(self, key: int, number: int, n_bytes: int) -> Callable[[object], None]:
        def forget(_: object) -> None:
            if key in self._seen and self._seen[key][1] == number:
                del self._seen[key]
            if n_bytes:
                self.events.append((number, -n_bytes))

        return forget

    def _add(self, tensor: torch.Tensor, *, is_new: bool) -> None:
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):
            return
        key = storage._cdata
        if key in self._seen:
            return
        n_bytes = storage.nbytes() if is_new else 0
        number, self._n_storages = self._n_storages, self._n_storages + 1
        self._seen[key] = (weakref.ref(storage, self._forget(key, number, n_bytes)), number, n_bytes)
        if n_bytes:
            self.events.append((number, n_bytes))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for leaf in tree_iter((args, kwargs)):
            if isinstance(leaf, torch.Tensor):
                self._add(leaf, is_new=False)
        out = func(*args, **kwargs)
        for leaf in tree_iter(out):
            if isinstance(leaf, torch.Tensor):
                self._add(leaf, is_new=True)
        return out

    def _gradient_numbers(self) -> set[int]:
        grads = [p.grad.untyped_storage()._cdata for p in self.parameters if p.grad is not None]
        return {self._seen[key][1] for key in grads if key in self._seen}

    def timeline(self) -> list[int]:
        """Bytes alive after each event, gradients of parameters left out."""
        left_out = self._gradient_numbers()
        alive, line = 0, []
        for number, delta in self.events:
            if number not in left_out:
                alive += delta
                line.append(alive)
        return line

    @property
    def live_bytes(self) -> int:
        """Bytes made since the meter was entered and alive now."""
        return (self.timeline() or [0])[-1]

    @property
    def peak_bytes(self) -> int:
        """Most bytes alive at once."""
        return max(self.timeline(), default=0)


MATMULS = frozenset(
    {
        torch.ops.aten.mm.default,
        torch.ops.aten.addmm.default,
        torch.ops.aten.bmm.default,
        torch.ops.aten.baddbmm.default,
    }
)


class MatmulCounter(TorchDispatchMode):
    """Counts aten.mm, addmm, bmm and baddbmm as they run."""

    def __init__(self) -> None:
        super().__init__()
        self.n_matmuls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.n_matmuls += func in MATMULS
        return func(*args, **(kwargs or {}))


def step_peak_bytes(model: nn.Module, step: Callable[[], object]) -> int:
    """Peak bytes of one step that begins with all gradients None."""
    model.zero_grad(set_to_none=True)
    with ByteMeter(model.parameters()) as meter:
        step()
    return meter.peak_bytes


def saved_storages(model: nn.Module, call: Callable[[], object]) -> dict[int, int]:
    """Bytes by storage that autograd saves in a plain call, parameters left out."""
    own = {p.untyped_storage()._cdata for p in model.parameters()}
    held, sizes = [], {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            held.append(storage)
            sizes[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = call()
    del out
    return sizes
