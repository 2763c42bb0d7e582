"""Surroundings of a pass: what is in force in forward, and not in backward."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from tests.fuzz.catalogue import Around


class Autocast(Around):
    @staticmethod
    def enter() -> Any:
        return torch.autocast("cpu", torch.bfloat16)


class AutocastWithoutCache(Around):
    @staticmethod
    def enter() -> Any:
        return torch.autocast("cpu", torch.bfloat16, cache_enabled=False)


class DefaultDtype(Around):
    @staticmethod
    @contextlib.contextmanager
    def enter() -> Iterator[None]:
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(before)


class Deterministic(Around):
    @staticmethod
    @contextlib.contextmanager
    def enter() -> Iterator[None]:
        before = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before)


class MathAttention(Around):
    @staticmethod
    def enter() -> Any:
        return sdpa_kernel(SDPBackend.MATH)


class Offload(Around):
    @staticmethod
    def enter() -> Any:
        return save_on_cpu()


class CopiesOfSaved(Around):
    @staticmethod
    def enter() -> Any:
        return saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t)


class _Softer(TorchFunctionMode):
    """Changes what one function computes."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out * 0.5 if func is torch.tanh else out


class FunctionMode(Around):
    @staticmethod
    def enter() -> Any:
        return _Softer()


class DefaultDevice(Around):
    @staticmethod
    def enter() -> Any:
        return torch.device("cpu")


class EnabledGrad(Around):
    @staticmethod
    def enter() -> Any:
        return torch.enable_grad()
