"""Putting back what measured steps change: random number streams, a model's state, and optimizers that they ran."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ckptdeco.engine import rng
from ckptdeco.engine.host_rng import global_streams
from ckptdeco.engine.streams import OfDevice, streams_in

__all__ = ["ModelState", "Optimizers"]


class _Value:
    """One value as it was: the object, and a copy of what it held, on the CPU."""

    def __init__(self, value: Any) -> None:
        self.value = value
        if isinstance(value, Tensor):
            # On the CPU, so that it does not raise the peak that is measured.
            self.copy: Any = value.detach().to("cpu", copy=True, memory_format=torch.preserve_format)
        else:
            self.copy = copy.deepcopy(value)

    def again(self) -> Any:
        """The same object, with what it held."""
        if not isinstance(self.value, Tensor):
            return self.copy
        if not _is_bit_equal(self.value.detach(), self.copy):
            with torch.no_grad():
                self.value.detach().copy_(self.copy)
        return self.value


def _is_bit_equal(value: Tensor, other: Tensor) -> bool:
    """Whether nothing need be written; when in doubt, no."""
    try:
        value = value.to(other.device)
        if value.shape != other.shape or value.stride() != other.stride() or value.dtype != other.dtype:
            return False
        octets = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (value, other)]
        return torch.equal(*octets)
    except (RuntimeError, NotImplementedError):  # quantized, sparse, sharded
        return False


class ModelState:
    """A model's parameters, buffers, gradients and flags, and the random number streams, as they are now.

    Args:
        model: the model.
        others: where else streams of random numbers may be, such as the function that is run.

    Cost:
        Memory: a copy of parameters, gradients and buffers, on the CPU.
    """

    def __init__(self, model: nn.Module, *others: Any) -> None:
        modules = list(model.modules())
        self._flags = [(module, module.training) for module in modules]
        self._tables: list[tuple[dict[str, Any], dict[str, _Value]]] = []
        seen: dict[int, _Value] = {}
        for table in [table for module in modules for table in (module._parameters, module._buffers)]:
            kept = {name: seen.setdefault(id(tensor), _Value(tensor)) for name, tensor in table.items()}
            self._tables.append((table, kept))
        self.parameters = [value.value for value in seen.values() if isinstance(value.value, nn.Parameter)]
        self._gradients = [(p, _Value(p.grad)) for p in self.parameters]
        tensors = [value.value for value in seen.values() if isinstance(value.value, Tensor)]
        devices = [OfDevice(device) for device in rng.devices_of(tensors)]
        held = streams_in([*map(vars, modules), *others])
        self._streams = rng.capture([*global_streams(), *devices, *held])

    def clear_gradients(self) -> None:
        """Set all gradients to None, as peak memory is defined."""
        for parameter, _ in self._gradients:
            parameter.grad = None

    def put_back(self) -> None:
        """Make all as it was, bit for bit."""
        for table, kept in self._tables:
            for name in [name for name in table if name not in kept]:
                del table[name]
            for name, value in kept.items():
                tensor = value.again()
                if table.get(name) is not tensor:
                    table[name] = tensor
        for parameter, value in self._gradients:
            parameter.grad = value.again()
        for module, flag in self._flags:
            if module.training != flag:
                module.training = flag
        rng.restore(self._streams)


class Optimizers:
    """The optimizers that a step runs, found when they step, as they were before."""

    def __init__(self, *, may_put_back: bool) -> None:
        self._may_put_back = may_put_back
        self._found: dict[int, tuple[Any, Callable[[], None]]] = {}
        self._handle: Any = register_optimizer_step_pre_hook(self._note)

    def _note(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if id(optimizer) not in self._found:
            back = _saved(optimizer) if self._may_put_back else lambda: None
            self._found[id(optimizer)] = optimizer, back

    @property
    def n_bytes(self) -> int:
        """Bytes of their state."""
        storages: dict[int, int] = {}
        for optimizer, _ in self._found.values():
            for tensor in _tensors_in(optimizer.state.values()):
                storages[id(tensor)] = tensor.nbytes
        return sum(storages.values())

    def close(self) -> None:
        """Look no further; put back what was saved."""
        self._handle.remove()
        for _, back in self._found.values():
            back()
        self._found.clear()


def _tensors_in(states: Iterable[dict[str, Any]]) -> list[Tensor]:
    return [value for state in states for value in state.values() if isinstance(value, Tensor)]


def _saved(optimizer: Any) -> Callable[[], None]:
    states = {p: {key: _Value(value) for key, value in state.items()} for p, state in optimizer.state.items()}
    groups = [
        {key: _Value(value) for key, value in group.items() if key != "params"} for group in optimizer.param_groups
    ]

    def back() -> None:
        for parameter in [parameter for parameter in optimizer.state if parameter not in states]:
            del optimizer.state[parameter]
        for parameter, values in states.items():
            optimizer.state[parameter] = {key: value.again() for key, value in values.items()}
        for group, values in zip(optimizer.param_groups, groups, strict=False):
            group.update({key: value.again() for key, value in values.items()})

    return back
