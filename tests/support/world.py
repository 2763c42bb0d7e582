"""What may be seen outside of a step: a model's state bit for bit, random number streams, and torch's switches."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy
import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from ckptdeco import context
from ckptdeco.engine.exclusive import _turn
from ckptdeco.engine.running import running

_STRUCTURE = ("_parameters", "_buffers", "_modules")


def _bytes_of(value: Any) -> bytes:
    if isinstance(value, torch.Tensor):
        head = f"{value.dtype}{tuple(value.shape)}{value.requires_grad and value.is_leaf}".encode()
        return head + value.detach().reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else head
    if isinstance(value, torch.Generator):
        return _bytes_of(value.get_state())
    if isinstance(value, dict):
        return b"".join((key.encode() if type(key) is str else b"?") + _bytes_of(item) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return b"[" + b"".join(map(_bytes_of, value)) + b"]"
    if isinstance(value, (int, float, str, bool, type(None))):
        return repr(value).encode()
    if hasattr(value, "__dict__") and not isinstance(value, (nn.Module, type)) and not callable(value):
        return _bytes_of(vars(value))
    return type(value).__qualname__.encode()


def state_of(model: nn.Module, *others: Any) -> dict[str, bytes]:
    """All of a model's state, of other objects that its layers change, and of the generators; digests by name."""
    with _disable_current_modes():
        return _state_of(model, *others)


def _state_of(model: nn.Module, *others: Any) -> dict[str, bytes]:
    state: dict[str, bytes] = {}
    for name, module in model.named_modules():
        for key, value in module.__dict__.items():
            if key not in _STRUCTURE:
                state[f"{name}.{key}"] = _bytes_of(value)
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            state[f"{name}.{key}"] = _bytes_of(tensor)
            state[f"{name}.{key}.grad"] = _bytes_of(None if tensor is None else tensor.grad)
    for i, other in enumerate(others):
        state[f"object {i}"] = _bytes_of(other)
    state["torch stream"] = _bytes_of(torch.get_rng_state())
    state["python stream"] = str(hash(random.getstate())).encode()
    numbers = numpy.random.get_state(legacy=True)
    state["numpy stream"] = numbers[1].tobytes() + repr((numbers[0], numbers[2:])).encode()
    return {name: hashlib.blake2b(value, digest_size=16).digest() for name, value in state.items()}


def switches() -> dict[str, Any]:
    """Everything that belongs to this thread or process and that a step has to leave as it found it."""
    free = _turn.acquire(blocking=False)
    is_held = False
    if free:
        _turn.release()
        is_held = bool(getattr(_turn, "_is_owned", bool)())
    return {
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "autocast": [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")],
        "autocast cache": torch.is_autocast_cache_enabled(),
        "default dtype": torch.get_default_dtype(),
        "deterministic": (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
        ),
        "attention": (torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled()),
        "saved-tensor hooks": torch._C._autograd._top_saved_tensors_default_hooks(False),
        "function modes": torch._C._len_torch_function_stack(),
        "function on": torch._C._is_torch_function_enabled(),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "policy": context.active(),
        "recomputing": running.recomputing,
        "frame": running.frame,
        "lock is held": is_held,
    }


def differences(expected: dict[str, Any], actual: dict[str, Any]) -> list[str]:
    """Names whose values differ."""
    return [name for name in expected.keys() | actual.keys() if expected.get(name) != actual.get(name)]


def freeze(model: nn.Module) -> list[dict[str, Any]]:
    """A copy of a model's state, to be given to `thaw`."""
    return [{key: _copy(value) for key, value in m.__dict__.items() if key not in _SHARED} for m in model.modules()]


_SHARED = {key for key in nn.Module().__dict__ if key not in ("training", "_parameters", "_buffers")}


def _copy(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, torch.Generator):
        return value.clone_state()
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    return [*map(_copy, value)] if isinstance(value, list) else value


def thaw(model: nn.Module, frozen: list[dict[str, Any]]) -> None:
    """Bring a model back to a state; parameters and buffers stay the same tensors, gradients go."""
    with torch.no_grad():
        for module, state in zip(model.modules(), frozen, strict=True):
            for key in [key for key in module.__dict__ if key not in _SHARED and key not in state]:
                del module.__dict__[key]
            for key, value in state.items():
                if key in ("_parameters", "_buffers"):
                    for name, tensor in value.items():
                        own = getattr(module, name)
                        own.copy_(tensor)
                        own.grad = None
                        if isinstance(own, nn.Parameter):
                            own.requires_grad_(True)
                elif isinstance(value, torch.Generator):
                    module.__dict__[key].set_state(value.get_state())
                else:
                    module.__dict__[key] = _copy(value)
