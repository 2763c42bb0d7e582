"""One fault at a time: a step that fails at a point must leave what plain torch leaves, and a retry must be exact."""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from typing import Any

import torch
from torch import nn

from ckptdeco import context
from ckptdeco.engine import pending
from ckptdeco.engine.running import running
from tests.support.faults import Faults, errors_in_turn
from tests.support.fragile import Case
from tests.support.layers import batch
from tests.support.oracle import assert_equal, copy_inputs, observe, seed_everything
from tests.support.world import differences, freeze, state_of, switches, thaw

__all__ = ["KINDS", "Reference", "Setting", "complaints", "count"]

KINDS = ("user", "operator", "line", "call")
_SEED = 11


@dataclasses.dataclass(frozen=True)
class Setting:
    """What is run: a case under a policy, after some steps without a fault."""

    case: Case
    policy: Any
    warm: int

    def __str__(self) -> str:
        return f"{self.case} under {self.policy} after {self.warm} steps"


class Reference:
    """The plain run of a setting: all states it goes through, by how far the step came, and its result."""

    def __init__(self, setting: Setting) -> None:
        case = setting.case
        model, x = _made(case)
        _warm_up(setting, model, x, contextlib.nullcontext())
        self.states: dict[int, list[dict[str, bytes]]] = {}
        others = case.others()
        x = copy_inputs(x)
        faults = Faults("plain")

        def sample() -> None:
            known = self.states.setdefault(faults.n_user, [])
            state = state_of(model, x, x.grad, *others)
            if not known or known[-1] != state:
                known.append(state)

        faults.sample = sample
        seed_everything(_SEED)
        with faults:
            sample()
            out = case.step(model, x, contextlib.nullcontext(), others)
            sample()
        self.result = observe(model, x, out)
        self.final = state_of(model, x, x.grad, *others)


def count(setting: Setting, kind: str) -> list[str]:
    """The points of a kind that the step passes."""
    model, x = _made(setting.case)
    _warm_up(setting, model, x, setting.policy)
    faults = Faults(kind)
    faults.places = []
    x, others = copy_inputs(x), setting.case.others()
    seed_everything(_SEED)
    with faults:
        setting.case.step(model, x, setting.policy, others)
    return faults.places


def complaints(setting: Setting, reference: Reference, kind: str, at: int) -> list[str]:
    """What is wrong after a fault at point `at`; [] if nothing is. To be called without the garbage collector."""
    found, refs = _fail_and_retry(setting, reference, kind, at)
    if not setting.case.stores_graph:
        alive = [name for name, ref in refs if ref() is not None]
        if alive:
            found.append(f"alive at the end: {alive}")
    if pending._calls or (not setting.case.stores_graph and any(ref() for ref in pending._leftover)):
        found.append("values still wait")
    return found


def _fail_and_retry(
    setting: Setting, reference: Reference, kind: str, at: int
) -> tuple[list[str], list[tuple[str, Any]]]:
    found: list[str] = []
    case = setting.case
    model, x0 = _made(case)
    _warm_up(setting, model, x0, setting.policy)
    frozen = freeze(model)
    before = switches()
    refs = [(name or "model", weakref.ref(module)) for name, module in model.named_modules()]
    _inputs[:] = []
    x = copy_inputs(x0)
    others = case.others()
    faults = Faults(kind, at, errors_in_turn(kind, at))
    seed_everything(_SEED)
    try:
        with faults:
            case.step(model, x, setting.policy, others)
        found.append(f"the fault at {faults.where or at} was swallowed" if faults.where else "no fault was raised")
    except BaseException as error:
        if not faults.where:
            raise
        if type(error) is not faults.error:
            found.append(f"{faults.error.__name__} became {error!r}")
    now = switches()
    found += [f"{name}: {before[name]!r} became {now[name]!r}" for name in differences(before, now)]
    if faults.where:
        found += _unlike_plain(reference, faults, state_of(model, x, x.grad, *others))
    torch.ones(1, requires_grad=True).sum().backward()  # torch holds a backward that failed until the next one
    if not case.stores_graph and not faults.is_of_torch:
        alive = [name for name, ref in _inputs if ref() is not None]
        if alive:
            found.append(f"alive after the fault: {alive}")
    _restore(now, before)

    thaw(model, frozen)
    x, others = copy_inputs(x0), case.others()
    seed_everything(_SEED)
    try:
        out = case.step(model, x, setting.policy, others)
        _compare(reference, model, x, out, others, found)
    except BaseException as error:
        found.append(f"the retry raised {error!r}")
    return found, refs


def _compare(reference: Reference, model: nn.Module, x: Any, out: Any, others: list[Any], found: list[str]) -> None:
    try:
        seen = observe(model, x, out)
        for field in dataclasses.fields(seen):
            assert_equal(getattr(reference.result, field.name), getattr(seen, field.name), field.name)
    except AssertionError as error:
        found.append(f"the retry: {error}")
    names = differences(reference.final, state_of(model, x, x.grad, *others))
    if names:
        found.append(f"the retry left other {names}")


def _unlike_plain(reference: Reference, faults: Faults, state: dict[str, bytes]) -> list[str]:
    """Names in which the state is unlike each state of the plain run as far as the step came."""
    candidates = reference.states.get(faults.n_user)
    if not candidates:
        return [f"a plain run has no state after {faults.n_user} points"]
    nearest = min((differences(candidate, state) for candidate in candidates), key=len)
    return [f"state unlike plain: {sorted(nearest)}"] if nearest else []


_inputs: list[tuple[str, Any]] = []  # weak references to what layers were given


def _note_input(module: nn.Module, args: Any) -> None:
    if not running.recomputing:
        _inputs.append((type(module).__name__, weakref.ref(args[0].untyped_storage())))


def _restore(now: dict[str, Any], before: dict[str, Any]) -> None:
    """So that one fault's damage is not reported for the next."""
    running.frame, running.recomputing = before["frame"], before["recomputing"]
    while torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
        torch._C._autograd._pop_saved_tensors_default_hooks()
    if context.active() is not None:
        context._top.set(None)
    torch.set_grad_enabled(before["grad mode"])
    torch.set_default_dtype(before["default dtype"])
    torch.use_deterministic_algorithms(before["deterministic"][0])


def _made(case: Case) -> tuple[nn.Module, torch.Tensor]:
    seed_everything(0)
    model = case.build()
    for layer in model.body.layers[1:]:
        layer.register_forward_pre_hook(_note_input)
    return model, batch(6)


def _warm_up(setting: Setting, model: nn.Module, x: torch.Tensor, context: Any) -> None:
    for step in range(setting.warm):
        seed_everything(step)
        setting.case.step(model, copy_inputs(x), context, setting.case.others())
        for parameter in model.parameters():
            parameter.grad = None
