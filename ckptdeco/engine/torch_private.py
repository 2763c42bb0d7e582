"""The few private names of torch that have no public counterpart, in one place.

`tests/unit/engine/test_torch_private.py` pins what each of them must do; a torch release that moves one fails there.
"""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
import torch.nn.modules.module as _module
import torch.utils.checkpoint
from torch.autograd import forward_ad
from torch.nn.utils import parametrize
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _get_current_dispatch_mode_stack

__all__ = [
    "HOOK_ATTRIBUTES",
    "NUMERICS",
    "SETTINGS",
    "TorchDispatchMode",
    "are_weights_cached",
    "at_end_of_backward",
    "attention_backends",
    "checkpoint_switches",
    "disable_dynamo",
    "dispatch_mode_again",
    "dispatch_modes",
    "exec_group",
    "fresh_memory_filled",
    "function_mode_again",
    "function_modes",
    "generator_address",
    "global_module_hooks",
    "grad_mode",
    "graph_task_id",
    "has_saved_tensor_hooks",
    "is_inside_torch_checkpoint",
    "is_plain_autograd",
    "is_torch_function_on",
    "pop_hooks",
    "push_hooks",
    "refuses_hooks",
    "set_grad_mode",
    "torch_function_on",
    "unseen_by_modes",
]

_F = TypeVar("_F", bound=Callable[..., Any])

#: Id of the backward pass (graph task) that runs on this thread, -1 outside of one. Nested passes have their own.
graph_task_id: Callable[[], int] = torch._C._current_graph_task_id


#: Decorates what a compiled region must not look into; unlike `torch.compiler.disable` it loads no compiler.
disable_dynamo: Callable[[_F], _F] = getattr(torch, "_disable_dynamo")  # noqa: B009  (not exported for type checkers)


def generator_address(generator: torch.Generator) -> int:
    """Where the object of C++ behind a generator is in memory."""
    address: int = generator._cdata  # type: ignore[attr-defined]
    return address


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call `callback` when the backward pass that runs on this thread ends. Only valid inside one."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


_flash: Callable[[], bool] = torch._C._get_flash_sdp_enabled
_memory_efficient: Callable[[], bool] = torch._C._get_mem_efficient_sdp_enabled
_math: Callable[[], bool] = torch._C._get_math_sdp_enabled


def attention_backends() -> tuple[bool, bool, bool]:
    """Whether flash, memory-efficient and plain attention are on; `torch.backends.cuda` takes a frame for each."""
    return _flash(), _memory_efficient(), _math()


#: Puts a pair of saved-tensor hooks on this thread's stack, as `saved_tensors_hooks` does when it is entered.
push_hooks: Callable[[Callable[..., Any], Callable[..., Any]], None] = (
    torch._C._autograd._push_saved_tensors_default_hooks
)
#: The `torch.utils.checkpoint.GraphExecGroup` that is entered on this thread, or None.
exec_group: Callable[[], Any] = torch._C._get_graph_exec_group

_checkpoint: Any = torch.utils.checkpoint


def checkpoint_switches() -> tuple[bool | None, bool | None]:
    """What `set_checkpoint_early_stop` and `set_checkpoint_debug_enabled` say now; None where they are not used."""
    return _checkpoint._enable_checkpoint_early_stop, _checkpoint._checkpoint_debug_enabled


_forward_ad: Any = forward_ad
_hooks_enabled: Callable[[], bool] = torch._C._autograd._saved_tensors_hooks_is_enabled  # type: ignore[attr-defined]
_functorch_level: Callable[[], Any] = torch._C._functorch.maybe_current_level
_top_hooks: Callable[[bool], Any] = torch._C._autograd._top_saved_tensors_default_hooks

_pop_hooks: Callable[[], None] = torch._C._autograd._pop_saved_tensors_default_hooks

grad_mode: Callable[[], bool] = torch.is_grad_enabled
#: Unlike `torch.enable_grad` it is one step, which no interrupt can divide.
set_grad_mode: Callable[[bool], None] = torch._C._set_grad_enabled


def pop_hooks(pack: Any) -> None:
    """Remove the innermost saved-tensor hooks if they are those with this pack hook; may be called once more."""
    top = _top_hooks(False)
    if top is not None and top[0] is pack:
        _pop_hooks()


def is_plain_autograd() -> bool:
    """False where saved-tensor hooks do not work or the tensors are not what they seem (R32).

    That is inside `torch.func` transforms, at a forward-AD level, with hooks disabled, and while tracing.
    """
    if _functorch_level() is not None or not _hooks_enabled():
        return False
    return bool(_forward_ad._current_level < 0) and not torch._C._is_tracing()


#: Where a module holds its forward hooks: two dictionaries of hooks by number, and what says how to call them.
HOOK_ATTRIBUTES = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks_with_kwargs",
)


def global_module_hooks() -> tuple[dict[int, Any], dict[int, Any]]:
    """The dictionaries of forward hooks and pre-hooks that all modules have in common."""
    return _module._global_forward_hooks, _module._global_forward_pre_hooks


def function_modes() -> tuple[Any, ...]:
    """The torch-function modes that are active on this thread, outermost first; the default device is one of them."""
    if not torch._C._len_torch_function_stack():
        return ()
    return tuple(_get_current_function_mode_stack())  # type: ignore[no-untyped-call]


def function_mode_again(mode: Any) -> Any:
    """What enters `mode` once more; a device context must be a new one, since it remembers where it was entered."""
    return DeviceContext(mode.device) if type(mode) is DeviceContext else mode


def dispatch_modes() -> tuple[Any, ...]:
    """The dispatch modes that are active on this thread, outermost first."""
    if not torch._C._len_torch_dispatch_stack():
        return ()
    return tuple(_get_current_dispatch_mode_stack())


@contextmanager
def dispatch_mode_again(mode: Any) -> Iterator[None]:
    """Have `mode` on top of the stack once more, without what its class does when a user enters it."""
    base: Any = TorchDispatchMode
    base.__enter__(mode)
    try:
        yield
    finally:
        base.__exit__(mode, None, None, None)


def has_saved_tensor_hooks() -> bool:
    """Whether saved-tensor hooks of somebody are active on this thread."""
    return _top_hooks(False) is not None


def refuses_hooks(error: BaseException) -> bool:
    """Whether `error` says that saved-tensor hooks are active where code wants none (`torch.func.grad`)."""
    code = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        code = frame.f_code
    return code is not None and code.co_name == "disable_saved_tensors_hooks"


def is_inside_torch_checkpoint() -> bool:
    """Whether `torch.utils.checkpoint` runs a region of its own on this thread, for the first time or again."""
    hooks = _top_hooks(False)
    return hooks is not None and getattr(hooks[0], "__module__", None) == "torch.utils.checkpoint"


@contextmanager
def fresh_memory_filled() -> Iterator[None]:
    """Have torch fill uninitialised memory with known values, as its deterministic mode does."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    switch: Any = torch.utils.deterministic
    fills = switch.fill_uninitialized_memory
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            torch.use_deterministic_algorithms(True, warn_only=True)
            switch.fill_uninitialized_memory = True
            yield
        finally:
            switch.fill_uninitialized_memory = fills
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])


is_torch_function_on: Callable[[], bool] = torch._C._is_torch_function_enabled
torch_function_on: Callable[[], Any] = torch._C._EnableTorchFunction


@contextmanager
def unseen_by_modes() -> Iterator[None]:
    """Run operators that the user's dispatch and function modes do not see."""
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        yield


def are_weights_cached() -> bool:
    """Whether parametrised weights are computed once and then kept, by `torch.nn.utils.parametrize.cached`."""
    return parametrize._cache_enabled > 0


_c: Any = torch._C
_OPERATORS = ("matmul", "conv", "rnn")
_SMALLEST = 5e-324


def _precision() -> tuple[str | None, ...]:
    """How exactly products of float32 are computed, on the CPU."""
    read = _c._get_fp32_precision_getter
    try:
        overall = torch.get_float32_matmul_precision()
    except RuntimeError:  # set for each backend by itself
        overall = None
    return overall, read("mkldnn", "matmul"), read("mkldnn", "conv"), read("mkldnn", "rnn")


def _set_precision(state: tuple[str | None, ...]) -> None:
    if state[0] is not None:
        torch.set_float32_matmul_precision(state[0])
    for operator, wanted in zip(_OPERATORS, state[1:], strict=True):
        if _c._get_fp32_precision_getter("mkldnn", operator) != wanted:
            _c._set_fp32_precision_setter("mkldnn", operator, wanted)


def _keeps_denormals() -> bool:
    """Whether this thread computes with numbers too small to be normal; there is no other way to ask."""
    return _SMALLEST * 1.0 != 0.0


def _keep_denormals(wanted: bool) -> None:
    torch.set_flush_denormal(not wanted)


#: Switches of the process that change what the CPU computes: how each is read, and how it is set.
NUMERICS: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (_precision, _set_precision),
    (_c._get_mkldnn_enabled, _c._set_mkldnn_enabled),
    (_c._get_mkldnn_deterministic, _c._set_mkldnn_deterministic),
    (_keeps_denormals, _keep_denormals),
)

#: All of `NUMERICS`, attention backends, switches, autocast and the numbers of modes, read without frames of Python's:
#: while these stay the same, so does what the functions above say.
SETTINGS: tuple[Callable[[], Any], ...] = (
    _c._is_any_autocast_enabled,
    _c._len_torch_function_stack,
    _c._len_torch_dispatch_stack,
    torch.get_default_dtype,
    _c._get_deterministic_algorithms,
    _c._get_deterministic_algorithms_warn_only,
    _c._get_float32_matmul_precision,
    *[partial(_c._get_fp32_precision_getter, "mkldnn", operator) for operator in _OPERATORS],
    _c._get_mkldnn_enabled,
    _c._get_mkldnn_deterministic,
    _SMALLEST.__bool__,  # a thread that flushes denormals takes it for zero
    _flash,
    _memory_efficient,
    _math,
    partial(getattr, _checkpoint, "_enable_checkpoint_early_stop"),
    partial(getattr, _checkpoint, "_checkpoint_debug_enabled"),
)
