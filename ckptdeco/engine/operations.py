"""One operation of a layer call whose result stays (`save=`); what it saved is got from its arguments again."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ckptdeco.engine.fingerprint import fingerprint
from ckptdeco.engine.kept import storage_address
from ckptdeco.engine.rng import Draws
from ckptdeco.engine.saved import Saved, is_parameter
from ckptdeco.engine.tree import tensors_in

__all__ = ["Operation", "arguments_of", "look_at"]

_MAX_STEPS = 6
_CAST = "ToCopyBackward0"
_VIEW_NAMES = ("T", "Transpose", "Permute", "View", "UnsafeView", "ReshapeAlias", "Expand", "Unsqueeze")
_VIEWS = frozenset(f"{name}Backward0" for name in _VIEW_NAMES)


class View:
    """A saved tensor that is an argument of the operation, or a view or a cast of it."""

    __slots__ = ("argument", "dtype", "like", "offset", "shape", "stride")

    def __init__(self, argument: int, value: Tensor, source: Tensor) -> None:
        self.argument = argument
        self.dtype = value.dtype
        self.shape, self.stride = value.shape, value.stride()
        self.offset = value.storage_offset() - (source.storage_offset() if value.dtype == source.dtype else 0)
        self.like = source.shape, source.stride(), source.dtype

    def of(self, arguments: list[Tensor]) -> Tensor | None:
        """The same of the arguments in a recompute; None if they are laid out in another way."""
        if self.argument >= len(arguments):
            return None
        source = arguments[self.argument].detach()
        if (source.shape, source.stride(), source.dtype) != self.like:
            return None
        if self.dtype != source.dtype:
            return source.to(self.dtype).as_strided(self.shape, self.stride, self.offset)
        return source.as_strided(self.shape, self.stride, source.storage_offset() + self.offset)


class Operation:
    """One operation of a call, and its places among the saved tensors."""

    __slots__ = (
        "drawn", "end", "geometry", "held", "is_view", "kind", "result", "start", "storage", "version", "views",
    )  # fmt: skip

    def __init__(self, start: int, end: int, result: Tensor, views: dict[int, View], held: set[int]) -> None:
        self.start = start
        self.end = end
        self.views = views
        self.held = held  # slots that stay if the result does
        self.is_view = result._is_view()
        self.kind = _kind(result)
        self.geometry = result.shape, result.stride(), result.storage_offset()
        self.storage: Any = weakref.ref(result.untyped_storage())
        self.result: Tensor | None = None
        self.version = result._version
        self.drawn: Draws = ()  # streams that it drew from, as it left them

    def keep(self, over: Tensor) -> None:
        """Keep the result, over which `over` lies, if that is what it says."""
        if over._version == self.version and _kind(over) == self.kind and over.untyped_storage() is self.storage():
            kept = over.detach()
            is_whole = (kept.shape, kept.stride(), kept.storage_offset()) == self.geometry
            self.result = kept if is_whole else kept.as_strided(*self.geometry)

    def is_usable(self) -> bool:
        """Whether the result is kept, and has the values that the operation gave it."""
        return self.result is not None and self.result._version == self.version

    def without(self, ranges: Sequence[tuple[int, int]]) -> None:
        """The saved tensors in these ranges are no longer counted."""
        places = [i for start, end in ranges for i in range(start, end)]
        self.views = {_moved(slot, places): view for slot, view in self.views.items() if slot not in places}
        self.held = {_moved(slot, places) for slot in self.held if slot not in places}
        self.start, self.end = _moved(self.start, places), _moved(self.end, places)


def _moved(slot: int, places: list[int]) -> int:
    return slot - sum(place < slot for place in places)


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.is_conj(), tensor.is_neg()


def arguments_of(args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors among the arguments of an operation that have a place in memory."""
    return [tensor for tensor in tensors_in([args, kwargs]) if tensor.layout is torch.strided]


def look_at(
    saved: list[Saved], start: int, result: Tensor, arguments: list[Tensor], *, is_layer: bool
) -> Operation | None:
    """What can be told of an operation that has just run; None if it is to be run again.

    Args:
        saved: what the call has saved so far.
        start: where that of the operation begins.
        result: what it returned.
        arguments: the tensors that it was given.
        is_layer: whether it is a layer inside, all of whose saved tensors stay, however many.
    """
    addresses = [storage_address(tensor) for tensor in arguments]
    address = storage_address(result)
    if address in addresses:
        return None
    views: dict[int, View] = {}
    held: set[int] = set()
    extra: dict[int, int] = {}
    for slot in range(start, len(saved)):
        value = saved[slot].value
        if value is None or is_parameter(value):
            continue
        argument = _argument_of(value, arguments, addresses)
        if argument is None:
            held.add(slot)
            extra[storage_address(value)] = value.nbytes
        else:
            views[slot] = View(argument, value, arguments[argument])
    extra.pop(address, None)
    if sum(extra.values()) > result.nbytes and not is_layer:  # more than the result is worth
        return None
    return Operation(start, len(saved), result, views, held)


def _argument_of(value: Tensor, arguments: list[Tensor], addresses: list[int]) -> int | None:
    """Which argument a saved tensor is a view or a cast of."""
    if value.layout is not torch.strided:
        return None
    address = storage_address(value)
    here = [i for i, other in enumerate(addresses) if other == address and _kind(arguments[i]) == _kind(value)]
    if here or address in addresses:
        place = _extent(value)
        within = [i for i in here if _contains(_extent(arguments[i]), place)]
        return min(within, key=lambda i: _extent(arguments[i]) != place, default=None)
    node, index = value.grad_fn, value.output_nr
    if node is None:
        return _equal_cast(value, arguments)
    for _ in range(_MAX_STEPS):
        name = node.name()
        if name != _CAST and name not in _VIEWS:
            return None
        node, index = node.next_functions[0]
        if node is None:
            return None
        if name == _CAST:
            break
    else:
        return None
    for i, source in enumerate(arguments):
        is_it = source.grad_fn is node and source.output_nr == index
        if (is_it or getattr(node, "variable", None) is source) and _is_whole_cast(value, source):
            return i
    return None


def _extent(tensor: Tensor) -> tuple[int, int]:
    """Its first place in the storage, and the one behind its last."""
    first = int(tensor.storage_offset())
    if not tensor.numel():
        return first, first
    last = first + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return first, int(last) + 1


def _contains(outer: tuple[int, int], inner: tuple[int, int]) -> bool:
    return outer[0] <= inner[0] and inner[1] <= outer[1]


def _is_whole_cast(value: Tensor, source: Tensor) -> bool:
    """Whether the storage of `value` is what a cast of `source` has."""
    n_bytes = source.numel() * value.element_size()
    return source.dtype != value.dtype and value.untyped_storage().nbytes() == n_bytes and _is_dense(source)


def _is_dense(tensor: Tensor) -> bool:
    """Whether it fills its place in memory: a cast then lies there in the same way."""
    n = 1
    for step, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and step != n:
            return False
        n *= size
    return True


def _equal_cast(value: Tensor, arguments: list[Tensor]) -> int | None:
    """The same for one that carries no graph: only its values tell (frozen weights under autocast)."""
    for i, source in enumerate(arguments):
        if source.requires_grad or not _is_whole_cast(value, source) or not value.dtype.is_floating_point:
            continue
        again = View(i, value, source).of(arguments)
        if again is not None and fingerprint(again) == fingerprint(value):
            return i
    return None
