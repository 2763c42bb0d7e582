"""Switches of the process and of the model that are in another position in backward than they were in forward."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from tests.support.flights import state_of
from tests.support.layers import DIM, Layer, Stack, Stem, batch
from tests.support.oracle import total
from tests.support.subject import checkpointable

BIG = 64


class Multiplies(Layer):
    """Products whose bits depend on precision and kernel, with a reading of the switches themselves."""

    def __init__(self, dim: int = BIG) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(dim, dim), nn.Linear(dim, dim)

    @checkpointable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.one(x)) * _reading()
        with torch.autocast("cpu", enabled=False):
            h = torch.sin(self.two(h.float()))
        return h.to(x.dtype) * 1e-2 + x


def _reading() -> float:
    """What user code sees of the switches; the last factor is smaller than any normal number."""
    warns = 0.25 * torch.is_deterministic_algorithms_warn_only_enabled()
    return 1 + warns + 0.0625 * bool(torch.backends.mkldnn.enabled) + float(torch.tensor(1e-40) * 1e38)


@contextlib.contextmanager
def _precision(value: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(value)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextlib.contextmanager
def _deterministic(warn_only: bool) -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def _flag(where: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(where, name)
    setattr(where, name, value)
    try:
        yield
    finally:
        setattr(where, name, before)


@contextlib.contextmanager
def _no_denormals() -> Iterator[None]:
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


@contextlib.contextmanager
def _nested_autocast() -> Iterator[None]:
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.autocast("cpu", dtype=torch.float16):
        yield


SWITCHES = {
    "matmul precision": lambda: _precision("medium"),
    "deterministic": lambda: _deterministic(warn_only=False),
    "deterministic, warn only": lambda: _deterministic(warn_only=True),
    "mkldnn": lambda: torch.backends.mkldnn.flags(enabled=False),
    "precision of one backend": lambda: _flag(torch.backends.mkldnn.matmul, "fp32_precision", "bf16"),
    "denormals": _no_denormals,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "autocast without cache": lambda: torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False),
    "autocast in autocast": _nested_autocast,
    "anomaly mode": lambda: torch.autograd.set_detect_anomaly(True),
    "default device": lambda: torch.device("cpu"),
}
every_switch = pytest.mark.parametrize("switch", SWITCHES.values(), ids=SWITCHES)
ignore = pytest.mark.filterwarnings("ignore::UserWarning")


def _build() -> Stem:
    return Stem(Stack([Multiplies() for _ in range(4)]), BIG)


def _wide() -> tuple[torch.Tensor]:
    return (batch(16, BIG) * 1e-2,)


@ignore
@every_switch
def test_switch_of_forward_holds_in_the_recompute(switch: Any, same: Any) -> None:
    def step(model: Stem, inputs: Any, context: Any) -> Any:
        with switch(), context():
            out = model(*inputs)
        total(out).backward()
        return out

    same(_build, step, _wide)


@ignore
@every_switch
def test_switch_of_backward_does_not_reach_the_recompute(switch: Any, same: Any) -> None:
    def step(model: Stem, inputs: Any, context: Any) -> Any:
        with context():
            out = model(*inputs)
        loss = total(out)
        with switch():
            loss.backward()
            reading = _reading()
        return out, reading, _reading()

    same(_build, step, _wide)


@ignore
def test_autocast_around_both_with_its_cache_of_weights(same: Any) -> None:
    def step(model: Stem, inputs: Any, context: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16), context():
            with torch.no_grad():
                model(*inputs)  # fills the cache with weights that lead to no graph
            outs = [model(*inputs), model(*inputs)]
            for out in outs:
                total(out).backward()
        return outs

    same(_build, step, _wide)


class Small(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    @checkpointable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.two(torch.sin(self.one(x)))) + x


@pytest.mark.parametrize("changes", [True, False], ids=["changes", "captures"])
def test_hooks_that_are_there_in_forward_only(changes: bool, same: Any) -> None:
    """On the model, the layers and within them; what is captured is what plain forward captures, once."""

    def step(model: Stack, inputs: Any, context: Any) -> Any:
        seen: list[Any] = []
        handles = []
        for module in model.modules():
            if changes:
                handles.append(module.register_forward_hook(lambda m, args, out: out * 1.5))
            else:
                handles.append(module.register_forward_hook(lambda m, args, out: seen.append(out.detach().mean())))
        with context():
            out = model(*inputs)
        for handle in handles:
            handle.remove()
        n = len(seen)
        total(out).backward()
        return out, seen, n

    same(lambda: Stack([Small() for _ in range(5)]), step)


def test_cached_parametrisations_around_forward_only(same: Any) -> None:
    def build() -> Stack:
        model = Stack([Small() for _ in range(5)])
        for layer in model.layers:
            parametrizations.weight_norm(layer.one)
            parametrizations.orthogonal(layer.two)
        return model

    def step(model: Stack, inputs: Any, context: Any) -> Any:
        with parametrize.cached(), context():
            outs = [model(*inputs), model(*inputs)]
        sum(total(out) for out in outs).backward()
        return outs

    same(build, step)


def test_cached_parametrisations_around_both(same: Any) -> None:
    def step(model: Stack, inputs: Any, context: Any) -> Any:
        with parametrize.cached(), context():
            outs = [model(*inputs), model(*inputs)]
            sum(total(out) for out in outs).backward()
        return outs

    def build() -> Stack:
        model = Stack([Small() for _ in range(5)])
        for layer in model.layers:
            parametrizations.weight_norm(layer.one)
        return model

    same(build, step)


@pytest.mark.parametrize("is_tied", [True, False])
def test_other_parameters_by_functional_call(is_tied: bool, same: Any) -> None:
    def step(model: Stack, inputs: Any, context: Any) -> Any:
        others = {name: (p.detach() * 1.5).requires_grad_() for name, p in model.named_parameters()}
        derived = {name: p * 2 for name, p in model.named_parameters()}
        with context():
            outs = [
                torch.func.functional_call(model, given, inputs, tie_weights=is_tied) for given in (others, derived)
            ]
        total(outs).backward()
        return outs, {name: p.grad for name, p in others.items()}

    same(lambda: Stack([Small() for _ in range(5)]), step)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("how", ["set_adapter", "disable_adapter"])
def test_adapter_switched_between_forward_and_backward(how: str, same: Any) -> None:
    peft = pytest.importorskip("peft")

    def build() -> nn.Module:
        config = peft.LoraConfig(target_modules=["one", "two"], r=2, lora_dropout=0.2, init_lora_weights=False)
        model = peft.get_peft_model(Stack([Small() for _ in range(5)]), config)
        model.add_adapter("other", config)
        return model

    def step(model: Any, inputs: Any, context: Any) -> Any:
        with context():
            model.set_adapter("default")
            outs = [model(*inputs)]
            if how == "set_adapter":
                model.set_adapter("other")
                outs.append(model(*inputs))
            elif how == "disable_adapter":
                with model.disable_adapter():
                    outs.append(model(*inputs))
        total(outs[::-1]).backward()
        flags = [p.requires_grad for p in model.parameters()]
        return outs, flags

    same(build, step)


def test_flags_toggled_between_forward_and_backward(same: Any) -> None:
    def step(model: Stack, inputs: Any, context: Any) -> Any:
        with context():
            outs = [model(*inputs)]
            model.requires_grad_(False)
            model.layers[1].requires_grad_(True)
            model.eval()
            outs.append(model(*inputs))
        total(outs).backward()
        flags = [(p.requires_grad, p.grad is None) for p in model.parameters()]
        model.requires_grad_(True).train()
        return outs, repr(flags), state_of(model)

    same(lambda: Stack([Small() for _ in range(5)]), step)
