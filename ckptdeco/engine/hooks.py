"""Forward hooks on modules inside a layer: they fire as often as without checkpointing.

A hook may only watch (it logs, counts, collects features), or change what the layer computes (weight norm by hooks, an
adapter). While a layer call runs, its hooks are replaced in their dictionaries by spies that tell the two apart. If all
of them only watched, they are silent in the recompute, and what they saved for backward is stored, since it is not in
the layer's own computation. If one of them took part, all run again, since they may work in pairs. Hooks that came or
went between forward and backward are put back for the recompute.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable
from functools import partial
from operator import is_
from typing import TYPE_CHECKING, Any

import torch

from ckptdeco.engine.attributes import versions_of
from ckptdeco.engine.fingerprint import fingerprint
from ckptdeco.engine.running import running
from ckptdeco.engine.streams import bytes_of
from ckptdeco.engine.torch_private import HOOK_ATTRIBUTES, global_module_hooks
from ckptdeco.engine.tree import tensors_in
from ckptdeco.engine.undo import Undo

if TYPE_CHECKING:
    from ckptdeco.engine.probe import Probe
    from ckptdeco.engine.state import Snapshot

__all__ = ["Hooks", "Listener", "listen", "put_back"]

_Dictionary = dict[int, Any]


class _Spy:
    """Stands for a hook in its dictionary while layer calls run; lets it through on threads that run none."""

    __slots__ = ("hook", "users")

    def __init__(self, hook: Any) -> None:
        self.hook = hook
        self.users: set[int] = set()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        listener = running.listener
        return self.hook(*args, **kwargs) if listener is None else listener.hear(self.hook, args, kwargs)


_Placed = list[tuple[_Dictionary, int, _Spy]]

_PATIENCE_S = 1.0
_turn = threading.Lock()  # held while spies come and go, never while user code runs (R35)


def _take_turn() -> threading.Lock:
    """The lock, taken. What it guards takes microseconds: who waits in vain finds it orphaned by an interrupt."""
    global _turn
    turn = _turn
    if not turn.acquire(timeout=_PATIENCE_S):
        turn = _turn = threading.Lock()
        turn.acquire()
    return turn


def _install(dictionaries: Iterable[_Dictionary], placed: _Placed) -> None:
    turn = _take_turn()
    try:
        for hooks in dictionaries:
            for key, hook in list(hooks.items()):
                spy = hook if isinstance(hook, _Spy) else _Spy(hook)
                placed.append((hooks, key, spy))
                spy.users.add(id(placed))
                hooks[key] = spy
    finally:
        turn.release()


def _remove(placed: _Placed) -> None:
    """The undo of `_install`; may be called again."""
    turn = _take_turn()
    try:
        for hooks, key, spy in placed:
            spy.users.discard(id(placed))
            if not spy.users and hooks.get(key) is spy:
                hooks[key] = spy.hook
    finally:
        turn.release()


class Hooks:
    """The hooks of one layer call: which there were, and whether they took part in what it computed."""

    __slots__ = ("by_module", "took_part")

    def __init__(self, snapshots: list[Snapshot], took_part: bool) -> None:
        self.took_part = took_part
        self.by_module = [_copies(module) for snapshot in snapshots for module in snapshot.modules] if took_part else []


def _copies(module: Any) -> dict[str, Any]:
    """The hook dictionaries of a module as they are now, without spies."""
    found = {}
    for name in HOOK_ATTRIBUTES:
        hooks = module.__dict__[name]
        found[name] = OrderedDict([(k, h.hook if isinstance(h, _Spy) else h) for k, h in hooks.items()])
    return found


class _Silence:
    """Hears hooks in a recompute, and lets none run."""

    def hear(self, hook: Any, args: Any, kwargs: Any) -> None:
        return None


_SILENCE = _Silence()


class Listener:
    """Hears the hooks of one layer call; a context manager around its forward."""

    __slots__ = ("is_close", "outer", "placed", "probe", "ranges", "snapshots", "took_part")

    def __init__(self, snapshots: list[Snapshot], probe: Probe, is_close: bool) -> None:
        self.snapshots = snapshots
        self.probe = probe
        self.is_close = is_close  # whether to look at module state and values, too
        self.took_part = False
        self.ranges: list[tuple[int, int]] = []  # of saved tensors that belong to hooks
        self.placed: _Placed = []
        self.outer = running.listener

    def __enter__(self) -> Listener:
        _install(_dictionaries(self.snapshots), self.placed)
        running.listener = self
        return self

    def __exit__(self, *exc: object) -> None:
        self.leave()

    def leave(self) -> None:
        """The forward is over; may be called again."""
        running.listener = self.outer
        _remove(self.placed)
        if isinstance(self.outer, Listener):  # a layer call inside another
            self.outer.took_part |= self.took_part

    def hear(self, hook: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a hook, and find out whether it took part."""
        saved = self.probe.saved
        start, before = len(saved), self._look(args, kwargs)
        selection, running.selection = running.selection, None  # `save=` means operations of the layer's own
        try:
            result = hook(*args, **kwargs)
        finally:
            running.selection = selection
        if result is not None or not _same(before, self._look(args, kwargs)):
            self.took_part = True
        if len(saved) > start:
            self.ranges.append((start, len(saved)))
        return result

    def _look(self, args: Any, kwargs: Any) -> list[Any]:
        tensors = tensors_in([args[1:], kwargs])
        seen: list[Any] = [*versions_of(tensors)]
        seen.append(bytes_of(torch.default_generator.get_state()))
        own = (
            getattr(args[0], "__dict__", {}) if args else {}
        )  # a hook is given its module first: weight norm writes there
        seen += [value for name, value in own.items() if name not in HOOK_ATTRIBUTES]
        if self.is_close:
            seen += map(fingerprint, tensors)
            for snapshot in self.snapshots:
                for module in snapshot.modules:
                    seen += [value for name, value in module.__dict__.items() if name not in HOOK_ATTRIBUTES]
                seen += versions_of(snapshot.tensors)
                seen += [tensor for owner in snapshot.owners for tensor in owner.values()]
        return seen

    def finish(self) -> Hooks:
        """The call is over: what only watched keeps what it saved, which no recompute will bring back."""
        if not self.took_part:
            self.probe.set_apart(self.ranges)
        return Hooks(self.snapshots, self.took_part)


def listen(snapshots: list[Snapshot], probe: Probe, is_close: bool, took_part: bool) -> Listener | None:
    """Who hears the hooks of a call that is about to run; None if there are none, or none of them may run.

    Args:
        snapshots: the modules of the layer.
        probe: what holds its saved tensors.
        is_close: whether to look at module state and values around each hook.
        took_part: whether a hook of an earlier call of this kind did.
    """
    if running.listener is _SILENCE or not _has_hooks(snapshots):
        return None
    listener = Listener(snapshots, probe, is_close)
    listener.took_part = took_part
    return listener


def _same(before: list[Any], after: list[Any]) -> bool:
    return len(before) == len(after) and all(
        one is other or (type(one) in (int, bytes) and one == other) for one, other in zip(before, after, strict=True)
    )


def _dictionaries(snapshots: list[Snapshot]) -> list[_Dictionary]:
    found = {id(hooks): hooks for snapshot in snapshots for hooks in snapshot.hooks if hooks}
    found.update({id(hooks): hooks for hooks in global_module_hooks() if hooks})
    return list(found.values())


def _has_hooks(snapshots: list[Snapshot]) -> bool:
    """Whether any module that the call may run, or all modules, have forward hooks. The usual answer costs nothing."""
    return any(global_module_hooks()) or any(any(snapshot.hooks) for snapshot in snapshots)


def put_back(undo: Undo, hooks: Hooks | None, snapshots: list[Snapshot]) -> None:
    """For a recompute: no hooks if those of forward only watched, else those of forward."""
    if hooks is None and not _has_hooks(snapshots):
        return
    undo.append(partial(setattr, running, "listener", running.listener))
    if hooks is None or not hooks.took_part:
        placed: _Placed = []
        undo.append(partial(_remove, placed))
        _install(_dictionaries(snapshots), placed)
        running.listener = _SILENCE
        return
    running.listener = None
    modules = [module for snapshot in snapshots for module in snapshot.modules]
    for module, copies in zip(modules, hooks.by_module, strict=True):
        for name, wanted in copies.items():
            present = module.__dict__[name]
            if list(present) != list(wanted) or not all(map(is_, present.values(), wanted.values())):
                undo.append(partial(module.__dict__.__setitem__, name, present))
                module.__dict__[name] = OrderedDict(wanted)
