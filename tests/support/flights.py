"""Programs with one, two or three passes in flight, and what modules remember besides parameters and buffers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from tests.support.oracle import Under, total

_BASE = frozenset(nn.Module().__dict__)


def state_of(value: Any) -> Any:
    """What may be seen of a value, as a tree of tensors and plain values; modules by their attributes and buffers."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone(), value.requires_grad
    if isinstance(value, nn.Module):
        own = {name: item for name, item in value.__dict__.items() if name not in _BASE or name == "training"}
        parts = {**own, **value._buffers, **value._parameters, **value._modules}
        return {name: state_of(part) for name, part in parts.items()}
    if isinstance(value, Mapping):
        return {repr(key): state_of(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return tuple(state_of(item) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: state_of(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return value if isinstance(value, (bool, int, float, str, set, type(None))) else type(value).__name__


def one_pass(model: nn.Module, inputs: Any, under: Under) -> Any:
    """Forward, backward."""
    with under():
        out = model(*inputs)
    total(out).backward()
    return out, state_of(model)


def two_in_flight(model: nn.Module, inputs: Any, under: Under) -> Any:
    """Two forwards, then their backwards in the same order."""
    with under():
        outs = [model(*inputs), model(*inputs)]
    for out in outs:
        total(out).backward()
    return outs, state_of(model)


def three_in_flight(model: nn.Module, inputs: Any, under: Under) -> Any:
    """Three forwards, then their backwards in another order, the first after a further forward."""
    with under():
        outs = [model(*inputs) for _ in range(2)]
        total(outs[1]).backward()
        outs.append(model(*inputs))
        total(outs[0]).backward()
        total(outs[2]).backward()
    return outs, state_of(model)


def backward_twice(model: nn.Module, inputs: Any, under: Under) -> Any:
    """Forward, two backwards."""
    with under():
        out = model(*inputs)
        total(out).backward(retain_graph=True)
        between = state_of(model)
        total(out).backward()
    return out, between, state_of(model)


def forward_without_backward(model: nn.Module, inputs: Any, under: Under) -> Any:
    """A forward that is dropped, an evaluation, and then a pass."""
    with under():
        model(*inputs)
        with torch.no_grad():
            before = model(*inputs)
        out = model(*inputs)
    total(out).backward()
    return before, out, state_of(model)


FLIGHTS = (one_pass, two_in_flight, three_in_flight, backward_twice, forward_without_backward)


def all_flights(model: nn.Module, inputs: Any, under: Under) -> Any:
    """One after the other: one pass, several in flight, backward twice, a forward without backward."""
    return [flight(model, inputs, under) for flight in FLIGHTS]


def training_flights(model: nn.Module, inputs: Any, under: Under) -> Any:
    """The same without the forward in which grad is off."""
    return [flight(model, inputs, under) for flight in FLIGHTS[:-1]]
