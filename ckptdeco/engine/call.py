"""One layer call: run its forward as a probe, then drop what autograd saved, or keep it (R1, R3, R19).

While the call runs its saved tensors are packed but held. At its end the engine knows what the call drew, wrote and
changed. If it did something it was not protected for, everything stays (the call is stored), and the next call of
this kind is protected. Otherwise the saved tensors are dropped and the call remembers how to get them back: its
inputs (kept tensors, or references to the calls that produced them), generator states, autocast and module state.

Strong references lead only backwards in time: saved slot -> call -> producing call. There is no list of calls.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from contextvars import copy_context
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.nn.utils.parametrize import ParametrizationList

from ckptdeco.engine import ambient, observe, recompute, rng
from ckptdeco.engine.attributes import keep_value, signature, versions_of
from ckptdeco.engine.changes import copy_unsaved, learn_changes
from ckptdeco.engine.collect import Waiting
from ckptdeco.engine.dataflow import Chain, Upstream, nodes_between, stamp_outputs
from ckptdeco.engine.fingerprint import fingerprint
from ckptdeco.engine.hooks import Hooks, listen
from ckptdeco.engine.kept import Kept
from ckptdeco.engine.layer import LayerInfo, Protection, layer_info
from ckptdeco.engine.overlap import Window
from ckptdeco.engine.probe import Probe, learn
from ckptdeco.engine.record import Record
from ckptdeco.engine.rerun import traced
from ckptdeco.engine.roots import modules_behind, referred
from ckptdeco.engine.running import Frame, running
from ckptdeco.engine.saved import Saved, unpack
from ckptdeco.engine.selection import InSelection
from ckptdeco.engine.sources import Reference, find_sources
from ckptdeco.engine.state import ModuleTree, Snapshot
from ckptdeco.engine.streams import streams_in
from ckptdeco.engine.torch_private import are_weights_cached, pop_hooks, push_hooks, refuses_hooks
from ckptdeco.engine.tree import (
    Held,
    Template,
    flatten_arguments,
    is_flat,
    objects_in,
    path_of,
    tensors_in,
    with_held_objects,
)
from ckptdeco.errors import UncheckpointableError
from ckptdeco.schedule.actions import Action

__all__ = ["Call", "Inputs", "Options", "Reference", "run"]

_NO_SWITCHES = (None, None)


class Options(NamedTuple):
    """How calls are recomputed; torch's names."""

    preserve_rng_state: bool = True
    determinism_check: str = "default"
    early_stop: bool = True
    debug: bool = False

    def overridden(self, early_stop: bool | None, debug: bool | None) -> Options:
        """With what torch's context managers say; None: nothing."""
        return self._replace(
            early_stop=self.early_stop if early_stop is None else early_stop,
            debug=self.debug if debug is None else debug,
        )


class Inputs:
    """Arguments of one call: its tensors in order, and the template they fit in."""

    __slots__ = ("args", "has_others", "kwargs", "template", "tensors")

    tensors: list[Tensor]
    template: Template

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.args = args
        self.kwargs = kwargs
        self.tensors, self.template = flatten_arguments(args, kwargs)
        # Arguments that are not simply one tensor each: they may hold modules, generators or objects that change.
        self.has_others = not is_flat(self.template) and not all(
            isinstance(value, Tensor) for value in (*args, *kwargs.values())
        )


class Call:
    """What is needed to run a layer call again. Frozen at forward; backward reads nothing else (R7)."""

    __slots__ = (
        "__weakref__", "ambient", "at_backward", "body", "context", "decisions", "devices", "flags",
        "has_inner_backward", "has_references", "hooks", "info", "is_alone", "is_checked", "kept_outputs", "mutated",
        "options", "outputs", "position", "protection", "rebuilt", "record", "size", "slots", "snapshots", "sources",
        "structure",
        "template", "trace", "unpacked", "waiting", "watch",
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
    is_alone: bool  # in no chain: its recomputed values go with the backward pass, as torch's do

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
        self.kept_outputs: dict[int, weakref.ref[Kept]] = {}  # what keeps them goes with the calls after this
        self.waiting: dict[int, Waiting] = {}  # by backward pass (R35)
        self.rebuilt: dict[int, dict[int, Tensor]] = {}  # inputs kept again during backward (levels)
        self.decisions: list[object] = []
        self.watch: rng.Watch | None = None  # the random number streams as they were at entry
        self.snapshots: list[Snapshot] = []  # of the modules it may read
        self.outputs: list[int | None] = []  # fingerprints, if it is checked by value
        self.structure: Any = None  # of its saved tensors, if it is not known whether they are filled when saved (R20)
        self.trace: list[str] | None = None
        self.hooks: Hooks | None = None  # forward hooks of modules inside, if there were any
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
    if surroundings.switches != _NO_SWITCHES:
        options = options.overridden(*surroundings.switches)
    layer = info.layer()
    trees = _trees(info, layer, body, inputs)
    kind: tuple[Any, ...] = getattr(layer, "training", None), ambient.kind(surroundings), len(tensors)
    if info.tree is None:  # one function for many layers, as `lambda x: layer(x)` in a loop
        kind += tuple([(weakref.ref(root), root.training) for _, root in trees])
    protection = info.protection(kind)
    if protection.witnesses:
        learn_changes(protection)
    is_first = protection.is_check_due()
    # Dispatch modes that only watched so far may begin to take part: such calls are compared, each of them.
    has_watchers = bool(surroundings.dispatch_modes) and not all(protection.modes_take_part.values())
    is_due = is_first or has_watchers or options.determinism_check == "values"
    check = is_due and options.determinism_check != "none"

    call = Call(body, inputs, info, protection)
    call.options, call.at_backward, call.position, call.record = options, at_backward, position, record
    call.devices, call.ambient = devices, surroundings
    call.is_alone = chain is None
    find_sources(call, tensors, upstream, action, limit, check, frame)

    call.snapshots = [Snapshot(tree, root, protection) for tree, root in trees]
    before = [snapshot.buffer_values() for snapshot in call.snapshots] if is_due else [None] * len(trees)
    versions = versions_of(tensors)
    values = [fingerprint(tensor) for tensor in tensors] if is_due else []
    window = Window()
    if options.preserve_rng_state:
        call.watch = _watch_randomness(call, inputs, is_due)

    objects = _watch_objects(call, inputs, is_due) if inputs.has_others else []
    probe = Probe(call.watch)
    # With "values" the calls in between are compared, too, but need not be read twice in forward.
    pack: Callable[[Tensor], Any] = probe.pack_checked if is_first else probe.pack
    call.is_checked = check
    listener = listen(call.snapshots, probe, is_due, protection.hooks_take_part)
    observer = observe.observer
    if observer is not None:
        pack = observer.begins(call, chain, tensors, pack)
    try:
        window.open()
        running.frame = Frame(call.decisions, again=False, collector=probe)
        push_hooks(pack, unpack)
        if listener is None and not options.debug:
            result = body(*inputs.args, **inputs.kwargs)
        else:
            with listener or nullcontext(), traced(call) if options.debug else nullcontext():
                result = body(*inputs.args, **inputs.kwargs)
        pop_hooks(pack)
        running.frame = frame
        if observer is not None:
            observer.body_ended(call, result)
        if listener is not None:
            call.hooks = listener.finish()
            protection.hooks_take_part |= listener.took_part
        surprise = "" if call.watch is None else call.watch.end(protection.sets_streams)
        if window.close() and call.watch is not None and (window.is_rewound or call.watch.shares_draws()):
            surprise = "another thread ran a layer at the same time, and numbers were drawn"
        written = {i for i, value in enumerate(values) if fingerprint(tensors[i]) != value} if values else set()
        surprise = learn(call, protection, tensors, versions, written, trees, before) or surprise
        if objects:
            surprise = _learn_objects(protection, objects) or surprise
        if type(body) is InSelection:
            ranges = [] if listener is None or listener.took_part else listener.ranges
            surprise = body.settle(call.hooks, ranges, tensors, result) or surprise
        if are_weights_cached() and _has_parametrised_weights(call):
            surprise = "its weights are computed once for several calls (parametrize.cached)"
        buffers = _own_buffers(call, trees)
        n_dropped = 0
        shapes = tuple([t.shape for t in tensors])
        n_bytes = protection.sizes.get(shapes)
        if n_bytes is None:
            n_bytes = protection.sizes[shapes] = probe.n_bytes(buffers)
        site = position, action
        is_watched = is_first or site not in protection.known_sites
        if is_watched:
            protection.watched_sites.add(site)
        if is_watched or protection.changed_later:
            copy_unsaved(call, tensors, set(probe.storages()), is_watched=is_watched, is_stored=bool(surprise))
        if surprise:
            probe.keep_all()
            record.store(surprise)
        else:
            n_dropped = probe.drop(call, buffers)
            record.measure(call.sources if n_dropped else [], n_bytes)
        record.log.note(call)
        outputs = tensors_in(result)
        if is_due and n_dropped:
            if not protection.has_custom_functions:
                nodes = nodes_between(outputs, tensors)
                protection.has_custom_functions = any(isinstance(node, BackwardCFunction) for node in nodes)
            call.outputs = [*map(fingerprint, outputs)]
        if chain is not None:  # the calls of the drop-in are in none
            stamps = stamp_outputs(outputs, call if n_dropped else None, chain, position, frame)
            if check and n_dropped:
                for stamp in stamps:
                    stamp.values = call.outputs[stamp.index]
        protection.n_calls += 1
        if observer is not None:
            observer.is_over(call)
    except BaseException as error:  # not `finally`: see undo.py
        running.frame = frame
        window.close()
        pop_hooks(pack)
        if listener is not None:
            listener.leave()
        probe.keep_all()
        if isinstance(error, RuntimeError) and refuses_hooks(error):
            raise UncheckpointableError(
                info.label,
                "switches saved-tensor hooks off while it runs (torch.func.grad, vjp, jacrev and hessian do), so "
                "nothing of it could be recomputed",
                "leave the layer out, policy(..., skip=...), or use torch.autograd.grad in it.",
            ) from error
        raise
    return result


def _watch_objects(call: Call, inputs: Inputs, is_due: bool) -> list[tuple[Any, Any]]:
    """Objects among the arguments with their signatures, if this call is looked at; keeps copies if they change."""
    if call.protection.mutates_arguments:
        call.template = with_held_objects(call.template, _hold)
    found = objects_in(inputs.template)
    if not is_due:
        return [(value, None) for value in found if isinstance(value, Iterator)]
    return [(value, signature(value)) for value in found]


def _hold(value: Any) -> Any:
    kept = keep_value(value, clone=True)
    return value if kept is value else Held(kept, partial(keep_value, clone=True))


def _learn_objects(protection: Protection, objects: list[tuple[Any, Any]]) -> str:
    """Whether the call used up or changed an object that it was given."""
    if any(isinstance(value, Iterator) for value, _ in objects):
        return "it was given an iterator"
    if protection.mutates_arguments:
        return ""
    try:
        is_changed = any(signature(value) != before for value, before in objects)
    except RuntimeError:  # values that cannot be compared
        is_changed = False
    protection.mutates_arguments = is_changed
    return "it changed an object that it was given" if is_changed else ""


def _trees(info: LayerInfo, layer: Any, body: Any, inputs: Inputs) -> list[tuple[ModuleTree, nn.Module]]:
    """The module trees that the call may read: the layer's own and those of modules it is given or refers to."""
    trees = [] if info.tree is None or layer is None else [(info.tree, layer)]
    if info.tree is None or inputs.has_others:
        function = _function_of(body) if info.tree is None else None
        for module in modules_behind(function, inputs.args, inputs.kwargs):
            tree = layer_info(module, module.forward).tree
            if module is not layer and tree is not None:
                trees.append((tree, module))
    return trees


def _has_parametrised_weights(call: Call) -> bool:
    return any(isinstance(module, ParametrizationList) for snapshot in call.snapshots for module in snapshot.modules)


def _own_buffers(call: Call, trees: list[tuple[ModuleTree, nn.Module]]) -> set[int]:
    """Ids of the buffers that the modules hold now, and of the plain tensors that they held."""
    found: set[int] = set()
    for (tree, _), snapshot in zip(trees, call.snapshots, strict=True):
        found |= snapshot.own_tensors
        if tree.has_buffers:
            found.update([id(tensor) for owner in snapshot.owners for tensor in owner.values()])
    return found


def _function_of(body: Any) -> Any:
    """The user's function in what runs it in a context, with a frozen closure."""
    while hasattr(body, "function"):
        body = body.function
    return body


def _watch_randomness(call: Call, inputs: Inputs, is_due: bool) -> rng.Watch:
    """Watch the streams of the process, of the devices, and those that the layer holds or is given."""
    protection = call.protection
    if is_due:
        places = [place for snapshot in call.snapshots for place in snapshot.attribute_values()]
        protection.streams = tuple(streams_in([*places, *referred(_function_of(call.body))]))
    given = streams_in([inputs.args, inputs.kwargs]) if inputs.has_others else []
    held = [] if is_due else [stream for snapshot in call.snapshots for stream in snapshot.generators]
    if held:
        known = [stream.get for stream in protection.streams]
        given = [*given, *(stream for stream in held if stream.get not in known)]
    return rng.Watch(call.devices, (*protection.streams, *given) if given else protection.streams)
