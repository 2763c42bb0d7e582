"""One layer call: run its forward as a probe, then drop what autograd saved, or keep it (R1, R3, R19).

While the call runs its saved tensors are packed but held. At its end the engine knows what the call drew, wrote and
changed. If it did something it was not protected for, everything stays (the call is stored), and the next call of
this kind is protected. Otherwise the saved tensors are dropped and the call remembers how to get them back: its
inputs (kept tensors, or references to the calls that produced them), generator states, autocast and module state.

Strong references lead only backwards in time: saved slot -> call -> producing call. There is no list of calls.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextvars import copy_context
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ckptdeco.engine import ambient, recompute, rng
from ckptdeco.engine.dataflow import Chain, Upstream, has_custom_functions, stamp_outputs
from ckptdeco.engine.fingerprint import fingerprint
from ckptdeco.engine.kept import Kept, keep
from ckptdeco.engine.layer import LayerInfo, Protection
from ckptdeco.engine.record import Record
from ckptdeco.engine.rerun import Waiting, traced
from ckptdeco.engine.running import Frame, running
from ckptdeco.engine.saved import NO_TASK, Saved, is_parameter, unpack
from ckptdeco.engine.state import Snapshot
from ckptdeco.engine.tree import Template, flatten_arguments, path_of, tensors_in
from ckptdeco.schedule.actions import Action

__all__ = ["Call", "Inputs", "Options", "Reference", "run"]


class Options(NamedTuple):
    """How calls are recomputed; torch's names."""

    preserve_rng_state: bool = True
    determinism_check: str = "default"
    early_stop: bool = True
    debug: bool = False


class Inputs:
    """Arguments of one call: its tensors in order, and the template they fit in."""

    __slots__ = ("args", "kwargs", "template", "tensors")

    tensors: list[Tensor]
    template: Template

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.args = args
        self.kwargs = kwargs
        self.tensors, self.template = flatten_arguments(args, kwargs)


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
        kept = self.call.kept_outputs.get(self.index)
        if kept is not None:
            return kept.get()
        output = self.output()
        return output.detach() if output is not None and output._version == self.version else None


class Call:
    """What is needed to run a layer call again. Frozen at forward; backward reads nothing else (R7)."""

    __slots__ = (
        "__weakref__", "ambient", "at_backward", "body", "context", "decisions", "devices", "flags",
        "has_inner_backward", "has_references", "info", "is_checked", "kept_outputs", "mutated", "options",
        "position", "protection", "rebuilt", "record", "size", "slots", "snapshot", "sources", "template", "trace",
        "unpacked", "waiting", "watch",
    )  # fmt: skip

    # Set by `run`, right after the call is made.
    options: Options
    at_backward: Callable[[int, int], Sequence[Action]]
    position: int
    record: Record
    devices: rng.Devices
    ambient: ambient.Ambient
    size: int  # most calls that a walk to this one runs (R24)
    has_references: bool

    def __init__(self, body: Callable[..., Any], inputs: Inputs, info: LayerInfo, protection: Protection) -> None:
        self.body = body
        self.context = copy_context()
        self.template = inputs.template
        self.flags = [(t.requires_grad, t.grad_fn is None) for t in inputs.tensors]  # per consuming call (R22)
        self.info = info
        self.protection = protection
        self.mutated = protection.mutated_inputs
        self.sources: list[Kept | Reference] = []
        self.slots: list[weakref.ref[Saved] | None] = []  # per saved tensor; None where it was kept as it is
        self.kept_outputs: dict[int, Kept] = {}
        self.waiting: dict[int, Waiting] = {}  # by backward pass (R35)
        self.rebuilt: dict[int, dict[int, Tensor]] = {}  # inputs kept again during backward (levels)
        self.decisions: list[object] = []
        self.watch: rng.Watch | None = None  # the random number streams as they were at entry
        self.snapshot: Snapshot | None = None
        self.trace: list[str] | None = None
        self.has_inner_backward = False
        self.unpacked = False  # a backward went through: no later call may refer to this one (R15)
        self.is_checked = False

    serve = recompute.serve

    def input_name(self, index: int) -> str:
        """What errors call a tensor among the arguments: ``input mask`` or ``input states[0]['k']``."""
        path = path_of(self.template, index) or ""  # [0][1]… for the second positional, [1]['mask']… for a keyword
        key, _, rest = path[4:].partition("]")
        if path.startswith("[1]"):
            return f"input {key.strip(chr(39))}{rest}"
        names = self.info.parameters
        number = int(key) if key.isdigit() else -1
        return f"input {names[number] if 0 <= number < len(names) else key}{rest}"

    def references(self) -> list[Reference]:
        """The inputs that are not kept."""
        return [source for source in self.sources if type(source) is Reference]


def run(
    body: Callable[..., Any],
    inputs: Inputs,
    upstream: Upstream,
    action: Action,
    *,
    info: LayerInfo,
    options: Options,
    at_backward: Callable[[int, int], Sequence[Action]],
    limit: int | None,
    chain: Chain | None,
    position: int,
    record: Record,
) -> Any:
    """Run a layer call that a schedule wants dropped, and stamp what it returns.

    Args:
        body: the layer's forward, as it shall also be run in backward.
        inputs: its arguments.
        upstream: where these come from.
        action: `DROP_KEEP` or `DROP`.
        info: the layer.
        options: how to recompute.
        at_backward: the schedule's second question, for positions of this chain.
        limit: most calls that one walk may run (R24); None: as many as the chain is long.
        chain: the chain of this call; None for a call that is in none.
        position: its position there.
        record: what is told of this call.

    Returns:
        What `body` returned, untouched.
    """
    frame = running.frame
    tensors = inputs.tensors
    devices = rng.devices_of(tensors)
    surroundings = ambient.capture(devices)
    layer = info.layer()
    protection = info.protection((getattr(layer, "training", None), surroundings, len(tensors)))
    protection.n_calls += 1
    is_due = protection.is_check_due() or options.determinism_check == "values"
    check = is_due and options.determinism_check != "none"

    call = Call(body, inputs, info, protection)
    call.options, call.at_backward, call.position, call.record = options, at_backward, position, record
    call.devices, call.ambient = devices, surroundings
    _find_sources(call, tensors, upstream, action, limit, check, frame)

    tree = info.tree
    before = None
    if tree is not None and layer is not None:
        call.snapshot = Snapshot(tree, layer, protection.written_buffers)
        before = tree.buffer_values() if check and tree.has_buffers else None
    versions = _versions(tensors)
    if options.preserve_rng_state:
        _watch_randomness(call, inputs, is_due or protection.draws_on_host, is_due)

    probe = _Probe()
    pack = probe.pack_checked if check else probe.pack
    call.is_checked = check
    running.frame = Frame(call.decisions, again=False)
    try:
        with saved_tensors_hooks(pack, unpack):
            if options.debug:
                with traced(call):
                    result = body(*inputs.args, **inputs.kwargs)
            else:
                result = body(*inputs.args, **inputs.kwargs)
    except BaseException:
        probe.keep_all()
        raise
    finally:
        running.frame = frame

    if call.watch is not None:
        call.watch.end()
        if call.watch.drew_on_host():
            protection.draws_on_host = True
    surprise = _learn(call, protection, tensors, versions, before)
    n_dropped = 0
    shapes = tuple([t.shape for t in tensors])
    n_bytes = protection.sizes.get(shapes)
    if n_bytes is None:
        n_bytes = protection.sizes[shapes] = probe.n_bytes()
    if surprise:
        probe.keep_all()
        record.store(surprise)
    else:
        n_dropped = probe.drop(call)
        record.measure(call.sources if n_dropped else [], n_bytes)
    record.log.note(call)
    if chain is None:  # the drop-in: its calls are in no chain
        return result
    outputs = tensors_in(result)
    if check and not protection.has_custom_functions:
        protection.has_custom_functions = has_custom_functions(outputs, tensors)
    stamps = stamp_outputs(outputs, call if n_dropped else None, chain, position, frame)
    if check and n_dropped:
        for stamp in stamps:
            stamp.values = fingerprint(outputs[stamp.index])
    return result


def _watch_randomness(call: Call, inputs: Inputs, with_host: bool, is_exact: bool) -> None:
    others = rng.other_streams(call.devices, _generators(inputs, call.snapshot), with_host)
    call.watch = rng.Watch(others, is_exact)


def _versions(tensors: list[Tensor]) -> list[int]:
    return [t._version if not t.is_inference() else 0 for t in tensors]


def _generators(inputs: Inputs, snapshot: Snapshot | None) -> list[torch.Generator]:
    """Generators that the layer is given or holds."""
    if len(inputs.args) == len(inputs.tensors) and (snapshot is None or not snapshot.has_unusual_attributes):
        return []
    found = [value for value in (*inputs.args, *inputs.kwargs.values()) if isinstance(value, torch.Generator)]
    if snapshot is not None and snapshot.has_unusual_attributes:
        for attributes in snapshot.attributes:
            found += [value for value in attributes if isinstance(value, torch.Generator)]
    return found


def _find_sources(
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
            kept = keep(tensor, frame)
        if stamp is not None:
            stamp.kept = weakref.ref(kept)
            producer = stamp.call() if stamp.call is not None else None
            if producer is not None:
                producer.kept_outputs[stamp.index] = kept
        call.sources.append(kept)
    call.has_references = bool(candidates)


def _references(
    call: Call, tensors: list[Tensor], upstream: Upstream, action: Action, limit: int | None, check: bool
) -> dict[int, Call]:
    """Inputs that may be references, with the calls they come from; none if a walk would become too large."""
    if action is not Action.DROP:
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
        if producer is None or producer.unpacked or stamp.index in producer.kept_outputs:
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


def _learn(
    call: Call,
    protection: Protection,
    tensors: list[Tensor],
    versions: list[int],
    before: dict[Any, Any] | None,
) -> str:
    """What the call did that it was not protected from; "" if nothing. The next call is protected (R19)."""
    surprise = ""
    if versions != _versions(tensors):
        mutated = {i for i, (a, b) in enumerate(zip(versions, _versions(tensors), strict=True)) if a != b}
        if not mutated <= protection.mutated_inputs:
            protection.mutated_inputs |= mutated
            surprise = "it changed an input in place"
    tree = call.info.tree
    if call.snapshot is not None and tree is not None and tree.has_buffers:
        written = call.snapshot.written_buffers()
        if before is not None:
            after = tree.buffer_values()
            written |= {key for key in after if before.get(key) != after[key]}
        if not written <= protection.written_buffers:
            protection.written_buffers |= written
            surprise = "it wrote a buffer"
    return surprise


class _Probe:
    """Holds the saved tensors of a running call until it is known what to do with them."""

    __slots__ = ("saved", "values")

    def __init__(self) -> None:
        self.saved: list[Saved] = []
        self.values: list[int | None] = []  # fingerprints, if the call is checked by value

    def pack(self, tensor: Tensor) -> Saved:
        saved = Saved(tensor)
        self.saved.append(saved)
        return saved

    def pack_checked(self, tensor: Tensor) -> Saved:
        """As `pack`, and read the values."""
        self.values.append(None if is_parameter(tensor) else fingerprint(tensor))
        return self.pack(tensor)

    def keep_all(self) -> None:
        """Store everything: as detached aliases, since the tensors themselves would close cycles."""
        for saved in self.saved:
            value = saved.value
            if value is not None and value.grad_fn is not None:
                saved.value = value.detach()

    def drop(self, call: Call) -> int:
        """Drop what can be recomputed, and note per slot what was decided (R22)."""
        slots = call.slots
        n_dropped = 0
        reference = weakref.ref
        for index, saved in enumerate(self.saved):
            value: Any = saved.value
            if saved.task != NO_TASK:  # `autograd.grad` ran inside the call
                call.has_inner_backward = True
                saved.task = NO_TASK
            if is_parameter(value):  # alive anyway, with its version (R8)
                if value.grad_fn is not None:
                    saved.value = value.detach()
                slots.append(None)
                continue
            saved.value = None
            saved.call = call
            saved.index = index
            saved.meta = value.shape, value.dtype, value.device
            saved.is_modified = value._version != saved.version  # backward must say so, as without us (R21)
            if self.values:
                saved.values = self._values(index, value, call.protection)
            slots.append(reference(saved))
            n_dropped += 1
        self.saved = []
        return n_dropped

    def _values(self, index: int, value: Tensor, protection: Protection) -> int | None:
        now = fingerprint(value)
        if now != self.values[index]:  # saved before it was filled: stopping there would give noise (R20)
            protection.is_stop_safe = False
        return now

    def n_bytes(self) -> int:
        """Bytes of the unique storages held, without parameters."""
        storages: dict[int, int] = {}
        for saved in self.saved:
            value: Any = saved.value
            if is_parameter(value):
                continue
            try:
                storage = value.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
            except (RuntimeError, NotImplementedError):
                storages[-id(saved)] = value.nbytes if value.layout is torch.strided else 0
        return sum(storages.values())
