"""Layers that something else checkpoints already: recomputed twice if they were decorated, hence refused."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from ckptdeco.errors import PolicyError

__all__ = ["check_not_checkpointed"]

# By which models of transformers and diffusers, and of timm, know that their own checkpointing is on.
_FLAGS = ("gradient_checkpointing", "grad_checkpointing")
# By which it is switched off, and how that reads.
_SWITCHES = {
    "activation_checkpointing_disable": "activation_checkpointing_disable()",
    "gradient_checkpointing_disable": "gradient_checkpointing_disable()",
    "disable_gradient_checkpointing": "disable_gradient_checkpointing()",
    "set_grad_checkpointing": "set_grad_checkpointing(False)",
}


def check_not_checkpointed(model: nn.Module, name: str, layer: nn.Module) -> None:
    """Refuse a layer that is checkpointed, stands within something that is, or holds something that is.

    Raises:
        PolicyError: it is; says by what, and how to switch that off.
    """
    path = name.split(".")
    around = [(".".join(path[:i]), model.get_submodule(".".join(path[:i]))) for i in range(len(path))]
    within = [(f"{name}.{inner}".rstrip("."), module) for inner, module in layer.named_modules()]
    for where, module in [*around, *within]:
        for is_on, what, fix in _MEANS:
            if is_on(module):
                place = "it" if where == name else where or type(model).__name__
                raise PolicyError("model", name, f"{what} is on for {place}: recomputed twice", fix(model, around))


def _is_flagged(module: nn.Module) -> bool:
    return any(getattr(module, flag, False) is True for flag in _FLAGS)


def _is_wrapper(module: nn.Module) -> bool:
    return type(module).__name__ == "CheckpointWrapper"


def _is_hooked(module: nn.Module) -> bool:
    hooks = getattr(module, "_forward_pre_hooks", {}).values()
    return any(getattr(hook, "__module__", "").endswith("checkpoint_activation") for hook in hooks)


def _switch(model: nn.Module, around: list[tuple[str, nn.Module]]) -> str:
    for where, module in around:
        for method, call in _SWITCHES.items():
            if callable(getattr(module, method, None)):
                owner = ".".join(filter(None, ["model", where]))
                return f"call {owner}.{call}, and leave gradient_checkpointing out of the trainer's arguments"
    return f"set {' or '.join(_FLAGS)} to False on it"


_Test = Callable[[nn.Module], bool]
_Fix = Callable[[nn.Module, list[tuple[str, nn.Module]]], str]
_MEANS: tuple[tuple[_Test, str, _Fix], ...] = (
    (_is_flagged, "the model's own gradient checkpointing", _switch),
    (
        _is_wrapper,
        "checkpoint_wrapper",
        lambda *_: "leave out apply_activation_checkpointing, and activation_checkpointing in the settings of FSDP",
    ),
    (_is_hooked, "the composable checkpoint of torch.distributed", lambda *_: "do not call it on this module"),
)
