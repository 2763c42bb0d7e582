"""Layers that something else checkpoints are refused: the error says how to switch that off, and doing so helps."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import ckptdeco
from tests.integrations.test_decorate import Mlp, model, trace_of
from tests.support.layers import batch
from tests.support.oracle import assert_same, forward_backward

pytestmark = pytest.mark.filterwarnings("ignore")


def refused(net: nn.Module, match: str, layers: Any = "auto") -> None:
    """Asserts the error, and that the model is as it was."""
    before = trace_of(net)
    with pytest.raises(ckptdeco.CheckpointError, match=match) as error:
        ckptdeco.decorate(net, layers)
    assert "Fix: " in str(error.value)
    assert trace_of(net) == before


def _hf(name: str) -> Any:
    pytest.importorskip("transformers")
    from tests.integrations.hf_models import MODELS

    return MODELS[name][0]()


@pytest.mark.parametrize("name", ["bert", "whisper", "llama", "t5", "swin", "mamba"])
@pytest.mark.parametrize("layers", ["auto", nn.Linear])
def test_transformers(name: str, layers: Any) -> None:
    net = _hf(name)
    net.gradient_checkpointing_enable()
    refused(
        net, r"own gradient checkpointing is on .*\n  Fix: call model\.activation_checkpointing_disable\(\)", layers
    )
    net.activation_checkpointing_disable()
    assert ckptdeco.decorate(net, layers)


def test_transformers_every_second_layer() -> None:
    net = _hf("llama")
    net.activation_checkpointing_enable(every_n_layers=2)
    refused(net, r"activation_checkpointing_disable\(\)")


def test_a_part_that_is_not_checkpointed_beside_one_that_is() -> None:
    net = _hf("clip")
    net.vision_model.activation_checkpointing_enable()
    refused(
        net, r"on for vision_model.*\n.*call model\.activation_checkpointing_disable\(\)", "vision_model.*.layers.*"
    )
    assert len(ckptdeco.decorate(net, "text_model.*.layers.*")) == 3


def test_peft_prepares_for_training_with_few_bits() -> None:
    peft = pytest.importorskip("peft")
    net = _hf("llama")
    net.is_loaded_in_8bit = True
    net = peft.get_peft_model(peft.prepare_model_for_kbit_training(net), peft.LoraConfig(r=2))
    refused(net, r"activation_checkpointing_disable\(\)")
    net.gradient_checkpointing_disable()
    assert len(ckptdeco.decorate(net)) == 3


@pytest.mark.parametrize("name", ["timm_vit", "timm_swin", "timm_convnext", "timm_resnet", "timm_efficientnet"])
def test_timm(name: str) -> None:
    from tests.integrations.vision_models import MODELS

    net: Any = MODELS[name].build()
    net.set_grad_checkpointing()
    refused(net, r"call model\.set_grad_checkpointing\(False\)")
    net.set_grad_checkpointing(False)
    assert ckptdeco.decorate(net)


@pytest.mark.parametrize("name", ["diffusers_unet", "diffusers_unet_condition", "diffusers_dit"])
def test_diffusers(name: str) -> None:
    from tests.integrations.vision_models import MODELS

    net: Any = MODELS[name].build()
    net.enable_gradient_checkpointing()
    refused(net, r"call model\.disable_gradient_checkpointing\(\)")
    refused(net, r"call model\.disable_gradient_checkpointing\(\)", nn.SiLU)
    net.disable_gradient_checkpointing()
    assert ckptdeco.decorate(net)


def _wrapped_one_by_one() -> nn.Module:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    return nn.ModuleList([checkpoint_wrapper(Mlp()) for _ in range(2)])


def _wrapped_by_fsdp() -> nn.Module:
    """What FSDP, Lightning's FSDPStrategy and accelerate's FSDP plugin (version 1) call."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

    net = model()
    apply_activation_checkpointing(net, check_fn=lambda module: isinstance(module, Mlp))
    return net


def _wrapped_by_accelerate() -> nn.Module:
    """What accelerate's FSDP plugin (version 2) calls."""
    fsdp_utils = pytest.importorskip("accelerate.utils.fsdp_utils")
    plugin = types.SimpleNamespace(activation_checkpointing_offload=False)
    accelerator = types.SimpleNamespace(state=types.SimpleNamespace(fsdp_plugin=plugin))
    net = model()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fsdp_utils, "fsdp2_prepare_auto_wrap_policy", lambda *_: lambda layer: isinstance(layer, Mlp))
        return fsdp_utils.fsdp2_apply_ac(accelerator, net)


@pytest.mark.parametrize("build", [_wrapped_one_by_one, _wrapped_by_fsdp, _wrapped_by_accelerate])
@pytest.mark.parametrize("layers", ["auto", Mlp, nn.Linear])
def test_checkpoint_wrapper(build: Callable[[], nn.Module], layers: Any) -> None:
    refused(build(), r"leave out apply_activation_checkpointing, and activation_checkpointing in the settings", layers)


def test_layer_around_a_checkpoint_wrapper() -> None:
    inner = nn.ModuleList([nn.Sequential(_wrapped_by_fsdp()) for _ in range(2)])
    refused(inner, r"checkpoint_wrapper is on for 0\.0\.layers\.0", "[01]")


def test_composable_checkpoint() -> None:
    from torch.distributed._composable import checkpoint

    net = model()
    checkpoint(net.layers[1])
    refused(net, r"composable checkpoint .* is on for it")


def test_a_flag_that_nothing_switches_off() -> None:
    net = model()
    net.layers[1].gradient_checkpointing = True
    refused(net, r"set gradient_checkpointing or grad_checkpointing to False")


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_switched_on_afterwards_it_is_exact(is_reentrant: bool) -> None:
    """Then the model's own checkpointing is what happens."""
    from tests.integrations.hf_models import MODELS
    from tests.integrations.test_transformers import step

    def decorated() -> nn.Module:
        net = _hf("bert").train()
        ckptdeco.decorate(net)
        net.activation_checkpointing_enable({"use_reentrant": is_reentrant})
        return net

    made = ckptdeco.policy(segment=2)
    assert_same(decorated, step, MODELS["bert"][1], lambda: made)


def test_wrapped_afterwards_it_is_exact() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

    def decorated() -> nn.Module:
        net = model()
        ckptdeco.decorate(net)
        apply_activation_checkpointing(net, check_fn=lambda module: isinstance(module, Mlp))
        return net

    made = ckptdeco.policy(segment=2)
    assert_same(decorated, forward_backward, lambda: (batch(),), lambda: made)
    assert torch.is_grad_enabled()
