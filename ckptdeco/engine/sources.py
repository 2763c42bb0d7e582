"""What a layer call holds of its inputs: references to the call just before, or kept tensors (R1, R24, R25, R28)."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from torch import Tensor

from ckptdeco.engine.dataflow import Upstream
from ckptdeco.engine.fingerprint import fingerprint
from ckptdeco.engine.kept import Kept, keep
from ckptdeco.engine.running import Frame
from ckptdeco.schedule.actions import Action

if TYPE_CHECKING:
    from ckptdeco.engine.call import Call

__all__ = ["Reference", "find_sources"]


class Reference:
    """An input that is not kept: output `index` of an earlier call (R1)."""

    __slots__ = ("call", "index", "output", "version")

    def __init__(self, call: Call, index: int, output: Tensor) -> None:
        self.call = call
        self.index = index
        self.output = weakref.ref(output)  # somebody may hold it anyway (R28)
        self.version = output._version

    def boundary(self) -> Tensor | None:
        """The value, if it need not be recomputed: promoted to a boundary (R25), or alive and unchanged (R28)."""
        reference = self.call.kept_outputs.get(self.index)
        kept = None if reference is None else reference()
        if kept is not None:
            return kept.get()
        output = self.output()
        return output.detach() if output is not None and output._version == self.version else None


def find_sources(
    call: Call,
    tensors: list[Tensor],
    upstream: Upstream,
    action: Action,
    limit: int | None,
    check: bool,
    frame: Frame | None,
) -> None:
    """Decide per input: a reference to the call just before, or a kept tensor (R24, R25)."""
    call.size = 1
    candidates = _references(call, tensors, upstream, action, limit, check)
    for i, tensor in enumerate(tensors):
        if i in call.mutated:
            call.sources.append(Kept(tensor.detach().clone()))
            continue
        stamp = upstream.stamps[i]
        if i in candidates:
            call.sources.append(Reference(candidates[i], stamp.index, tensor))  # type: ignore[union-attr]
            stamp.consumer = True  # type: ignore[union-attr]
            continue
        kept = stamp.kept() if stamp is not None and stamp.kept is not None else None
        if kept is None:
            kept = keep(tensor, frame, is_stamped=stamp is not None)
        if stamp is not None:
            stamp.kept = weakref.ref(kept)
            producer = stamp.call() if stamp.call is not None else None
            if producer is not None:  # weakly: it is not to be alive in the producer's own backward
                producer.kept_outputs[stamp.index] = stamp.kept
        call.sources.append(kept)
    call.has_references = bool(candidates)


def _references(
    call: Call, tensors: list[Tensor], upstream: Upstream, action: Action, limit: int | None, check: bool
) -> dict[int, Call]:
    """Inputs that may be references, with the calls they come from; none if a walk would become too large."""
    if action is not Action.DROP or _is_gathered(call):
        return {}
    found: dict[int, Call] = {}
    producers: dict[int, Call] = {}
    protection = call.protection
    for i, stamp in enumerate(upstream.stamps):
        if stamp is None or stamp.call is None or stamp.consumer or stamp.position != call.position - 1:
            continue
        if i in protection.boundary_inputs or i in protection.mutated_inputs:
            continue
        producer = stamp.call()
        if producer is None or producer.unpacked or _is_gathered(producer) or stamp.index in producer.kept_outputs:
            continue
        if stamp.values is not None and check and fingerprint(tensors[i]) != stamp.values:
            protection.boundary_inputs[i] = "it was written between the layers by an operation autograd does not see"
            call.record.broken_by = protection.boundary_inputs[i]
            continue
        found[i] = producer
        producers[id(producer)] = producer
    size = 1 + sum(producer.size for producer in producers.values())
    longest = 1 + max((producer.size for producer in producers.values()), default=0)
    if size > (longest if limit is None else limit):
        call.record.broken_by = f"its segment would have {size} layer calls"
        return {}
    call.size = size
    return found


def _is_gathered(call: Call) -> bool:
    """Whether its parameters are there only while hooks around it say so (R13): it is run again in its own backward."""
    tree = call.info.tree
    return tree is not None and tree.is_gathered
