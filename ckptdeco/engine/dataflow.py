"""How a layer call recognises what an earlier layer call returned, and where in a chain it stands.

Every output of a layer call is stamped on its autograd node. The stamp leads to the call only weakly: nodes live as
long as somebody holds a kept output, and that must not keep calls alive (R15). A tensor is recognised if it continues
the same graph (R14) and is the same value: same storage, geometry, version and type (R2, R16, R17). The position of a
call is that of the nearest stamped call upstream plus one, found a few nodes up from its inputs (R36).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ckptdeco.engine.kept import geometry

if TYPE_CHECKING:
    from ckptdeco.engine.call import Call
    from ckptdeco.engine.kept import Kept

__all__ = ["Chain", "Stamp", "Upstream", "nodes_between", "recognise", "stamp_outputs", "trace_inputs"]

_KEY = "ckptdeco"
_MAX_NODES = 48  # how far upstream a call looks for its predecessor (R36)


class Chain:
    """A run of layer calls of one pass, each fed by the one before; grows as they are made."""

    __slots__ = ("context", "costs", "length")

    def __init__(self, context: Any = None) -> None:
        self.length = 0
        self.costs: dict[int, tuple[int, int]] = {}  # by position: input and saved bytes
        self.context = context  # what the caller wants to find again at every call of the chain


class Stamp:
    """What an output of a layer call carries on its autograd node."""

    __slots__ = ("call", "chain", "consumer", "frame", "geometry", "index", "kept", "position", "tensor", "values")

    def __init__(self, tensor: Tensor, index: int, call: Call | None, chain: Chain, position: int, frame: Any) -> None:
        self.tensor = weakref.ref(tensor)
        self.index = index
        self.call = None if call is None else weakref.ref(call)
        self.chain = chain
        self.position = position
        self.frame = None if frame is None else weakref.ref(frame)
        self.geometry = _geometry_or_none(tensor)
        self.kept: weakref.ref[Kept] | None = None  # set once the output became a boundary (R25)
        self.consumer = False  # whether some call refers to it already
        self.values: int | None = None  # fingerprint when it left its call (R16)

    def is_value_of(self, tensor: Tensor) -> bool:
        """Whether `tensor` is this output, unchanged."""
        if self.geometry is None:
            return self.tensor() is tensor
        if self.tensor() is tensor:
            return bool(self.geometry[0] == tensor._version and self.geometry[1] == tensor.data_ptr())
        return self.geometry == _geometry_or_none(tensor)


def _geometry_or_none(tensor: Tensor) -> tuple[Any, ...] | None:
    if type(tensor) is not Tensor:  # subclasses may keep their data elsewhere: recognised as objects only
        return None
    try:
        return geometry(tensor)
    except (RuntimeError, NotImplementedError):
        return None


def stamp_outputs(outputs: list[Tensor], call: Call | None, chain: Chain, position: int, frame: Any) -> list[Stamp]:
    """Stamp what a layer call returned; what it only passed through stays its producer's."""
    stamps = []
    for index, tensor in enumerate(outputs):
        node: Any = tensor.grad_fn
        if node is None:
            continue
        marks = node.metadata.setdefault(_KEY, {})
        number = tensor.output_nr
        if number not in marks:
            marks[number] = stamp = Stamp(tensor, index, call, chain, position, frame)
            stamps.append(stamp)
    return stamps


def recognise(tensor: Tensor) -> tuple[Stamp | None, bool]:
    """The stamp of `tensor` on its own node or on an identity node directly below it, and whether it is unchanged."""
    node: Any = tensor.grad_fn
    if node is None:
        return None, False
    marks = node.metadata.get(_KEY)
    if marks is not None:
        stamp = marks.get(tensor.output_nr)
        return stamp, stamp is not None and stamp.is_value_of(tensor)
    upstream = node.next_functions
    if not upstream:
        return None, False
    below, number = upstream[0] if len(upstream) == 1 else upstream[min(tensor.output_nr, len(upstream) - 1)]
    if below is None:
        return None, False
    marks = below.metadata.get(_KEY)
    stamp = None if marks is None else marks.get(number)
    if stamp is None or stamp.geometry is None or not stamp.is_value_of(tensor):
        return stamp, False
    return stamp, True


class Upstream:
    """Where the inputs of a layer call come from."""

    __slots__ = ("broken_by", "chain", "position", "stamps")

    def __init__(self, n: int) -> None:
        self.stamps: list[Stamp | None] = [None] * n  # per input: the stamp, if the tensor is that output unchanged
        self.chain: Chain | None = None
        self.position = -1  # of the nearest layer call upstream
        self.broken_by = ""  # name of the operation between that call and this one, if any

    def _see(self, stamp: Stamp) -> bool:
        if stamp.position > self.position:
            self.chain, self.position = stamp.chain, stamp.position
            return True
        return False


def trace_inputs(tensors: list[Tensor], frame: Any) -> Upstream:
    """Find which inputs are outputs of earlier calls of the same frame, and the position of the nearest of these."""
    upstream = Upstream(len(tensors))
    for i, tensor in enumerate(tensors):
        node: Any = tensor.grad_fn
        if node is None:
            continue
        stamp, unchanged = recognise(tensor)
        if stamp is not None and _is_of(stamp, frame):
            if unchanged:
                upstream.stamps[i] = stamp
            if upstream._see(stamp) and not unchanged:
                upstream.broken_by = _describe(node, stamp)
            continue
        stamp = _search(node, frame)
        if stamp is not None and upstream._see(stamp):
            upstream.broken_by = _describe(node, stamp)
    return upstream


def _is_of(stamp: Stamp, frame: Any) -> bool:
    """Whether the stamp was set by a call of the same frame: nested calls have chains of their own."""
    if stamp.frame is None or frame is None:
        return stamp.frame is None and frame is None
    return stamp.frame() is frame


def _search(node: Any, frame: Any) -> Stamp | None:
    """Breadth-first search upstream for the nearest stamped node; of several, the furthest along its chain."""
    best: Stamp | None = None
    seen = {node}
    queue = [node]
    for current in queue:
        for below, _ in current.next_functions:
            if below is None or below in seen:
                continue
            seen.add(below)
            marks = below.metadata.get(_KEY)
            if marks is None:
                if len(queue) < _MAX_NODES:
                    queue.append(below)
                continue
            for stamp in marks.values():
                if _is_of(stamp, frame) and (best is None or stamp.position > best.position):
                    best = stamp
    return best


def nodes_between(outputs: list[Tensor], inputs: list[Tensor]) -> Iterator[Any]:
    """The autograd nodes of a layer call."""
    queue: list[Any] = [tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None]
    seen = {*queue, *[tensor.grad_fn for tensor in inputs]}
    for node in queue:
        yield node
        below = [child for child, _ in node.next_functions if child is not None and child not in seen]
        seen.update(below)
        queue += below


def _describe(node: Any, stamp: Stamp) -> str:
    if stamp.geometry is not None and _KEY in node.metadata:
        return "the output was changed in place"
    name = node.name() if hasattr(node, "name") else type(node).__name__
    return f"{name} was computed between the layers"
