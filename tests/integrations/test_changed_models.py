"""Models that other libraries changed before or after `decorate`: hooks, adapters, few bits, compiled, copied."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import ckptdeco
from tests.integrations.test_decorate import Mlp, model, trace_of
from tests.support.layers import DIM, Stack, batch
from tests.support.oracle import assert_same, forward_backward

pytestmark = pytest.mark.filterwarnings("ignore")

Change = Callable[[Any], Any]


def check(change: Change, order: str, n_layers: int = 4, is_copied: bool = False, **options: Any) -> nn.Module:
    """Asserts that a model that was changed trains as the plain one that was changed, and does recompute."""

    def build() -> Any:
        net = model()
        if order == "after":
            ckptdeco.decorate(net, **options)
        net = change(net)
        if order == "before":
            assert len(ckptdeco.decorate(net, **options)) == n_layers
        return net

    made = ckptdeco.policy(segment=2)
    _, net = assert_same(build, forward_backward, lambda: (batch(),), lambda: made, is_copied=is_copied)
    assert [call.n_recomputed for call in ckptdeco.explain().calls] == [1] * n_layers
    return net


# Hooks of accelerate, which replace the forward of instances


def _dispatched(net: nn.Module) -> nn.Module:
    accelerate = pytest.importorskip("accelerate")
    return accelerate.dispatch_model(net, {"": "cpu"}, force_hooks=True)


def _dispatched_by_layer(net: nn.Module) -> nn.Module:
    accelerate = pytest.importorskip("accelerate")
    devices = {name: "cpu" for name, child in net.named_modules() if isinstance(child, Mlp)}
    return accelerate.dispatch_model(net, devices, main_device="cpu", force_hooks=True)


def _hooked(net: nn.Module) -> nn.Module:
    hooks = pytest.importorskip("accelerate.hooks")

    class Halve(hooks.ModelHook):
        def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return (args[0] * 0.5, *args[1:]), kwargs

        def post_forward(self, module: nn.Module, output: Any) -> Any:
            return output + 1

    for layer in net.layers:
        hooks.add_hook_to_module(layer, Halve(), append=True)
    return net


@pytest.mark.parametrize("change", [_dispatched, _dispatched_by_layer, _hooked])
@pytest.mark.parametrize("order", ["before", "after"])
def test_hooks_of_accelerate(change: Change, order: str) -> None:
    check(change, order)


@pytest.mark.parametrize("change", [_dispatched_by_layer, _hooked])
def test_hooks_of_accelerate_and_decorator_come_off_in_reverse_order(change: Change) -> None:
    hooks = pytest.importorskip("accelerate.hooks")
    net = change(model())
    before = trace_of(net)
    ckptdeco.decorate(net)
    ckptdeco.undecorate(net)
    assert trace_of(net) == before
    other = model()
    ckptdeco.decorate(other)
    change(other)
    with pytest.raises(ckptdeco.CheckpointError, match="take that off first"):
        ckptdeco.undecorate(other)
    hooks.remove_hook_from_module(other, recurse=True)
    ckptdeco.undecorate(other)
    assert [m.forward.__func__ for m in other.layers] == [Mlp.forward] * 4


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("mixed_precision", ["no", "bf16"])
def test_prepare_of_accelerate(order: str, mixed_precision: str) -> None:
    accelerate = pytest.importorskip("accelerate")
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision=mixed_precision)
    try:
        net = check(accelerator.prepare, order)
        bare = accelerator.unwrap_model(net, keep_fp32_wrapper=False)
        ckptdeco.undecorate(bare)
        assert not any("forward" in vars(layer) for layer in bare.layers)
    finally:
        AcceleratorState._reset_state(True)


# Layers of few bits


class Int8Linear(nn.Module):
    """Frozen weights of 8 bits, as libraries for large models keep them; gradients reach the input only."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach()
        scale = weight.abs().amax(1, keepdim=True) / 127
        self.register_buffer("weight", (weight / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)
        self.bias = nn.Parameter(linear.bias.detach().clone(), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight * self.scale, self.bias)


def _int8(net: Any) -> Any:
    for layer in net.layers:
        layer.up = Int8Linear(layer.up)
    return net


class Gated(Mlp):
    """Its gate is a layer of 8 bits, through which no gradient comes."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = _quantised(nn.Linear(DIM, DIM))

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return super().forward(x, scale) * self.gate(x.detach()).sigmoid()


def _quantised(linear: nn.Linear) -> nn.Module:
    from torch.ao.quantization import quantize_dynamic

    return quantize_dynamic(nn.Sequential(linear), {nn.Linear}, dtype=torch.qint8)[0]


@pytest.mark.parametrize("order", ["before", "after"])
def test_frozen_layers_of_eight_bits(order: str) -> None:
    check(_int8, order, is_copied=True)


@pytest.mark.parametrize("is_copied", [False, True])
def test_dynamic_layers_of_eight_bits(is_copied: bool) -> None:
    def build() -> nn.Module:
        net = Stack([Gated() for _ in range(4)])
        ckptdeco.decorate(net)
        return net

    made = ckptdeco.policy(segment=2)
    assert_same(build, forward_backward, lambda: (batch(),), lambda: made, is_copied=is_copied)
    assert [call.n_recomputed for call in ckptdeco.explain().calls] == [1] * 4


# Compiled modules


def _each_in_place(backend: str) -> Change:
    def change(net: Any) -> Any:
        for layer in net.layers:
            layer.compile(backend=backend)
        return net

    return change


def _each_wrapped(backend: str) -> Change:
    def change(net: Any) -> Any:
        net.layers = nn.ModuleList([torch.compile(layer, backend=backend) for layer in net.layers])
        return net

    return change


def _inner(backend: str) -> Change:
    def change(net: Any) -> Any:
        for layer in net.layers:
            layer.up.compile(backend=backend)
        return net

    return change


def _whole(backend: str) -> Change:
    return lambda net: torch.compile(net, backend=backend)


@pytest.mark.parametrize("change", [_each_in_place, _each_wrapped, _inner, _whole])
@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_modules(change: Callable[[str], Change], order: str, backend: str) -> None:
    torch._dynamo.reset()
    check(change(backend), order)
    torch._dynamo.reset()


def test_model_that_was_compiled_without_a_policy_obeys_a_later_one() -> None:
    torch._dynamo.reset()
    net = model()
    ckptdeco.decorate(net)
    compiled = torch.compile(net, backend="eager")
    compiled(batch()).sum().backward()
    with ckptdeco.policy(segment=2):
        compiled(batch()).sum().backward()
    assert [call.n_recomputed for call in ckptdeco.explain().calls] == [1] * 4
    compiled(batch()).sum().backward()
    torch._dynamo.reset()


# Adapters, copies, files


def _bert() -> Any:
    pytest.importorskip("transformers")
    from tests.integrations.hf_models import MODELS

    return MODELS["bert"][0]().train()


def _adapted(net: Any) -> Any:
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(net, peft.LoraConfig(r=2, target_modules=["query", "value"], lora_dropout=0.1))


@pytest.mark.parametrize("order", ["before", "after"])
def test_adapters_train_without_gradients_for_the_embeddings(order: str) -> None:
    from tests.integrations.hf_models import MODELS
    from tests.integrations.test_transformers import step

    def build() -> Any:
        net = _bert()
        if order == "after":
            ckptdeco.decorate(net)
        net = _adapted(net)
        if order == "before":
            assert len(ckptdeco.decorate(net)) == 3
        return net

    made = ckptdeco.policy(segment=2)
    _, net = assert_same(build, step, MODELS["bert"][1], lambda: made)
    assert [call.n_recomputed for call in ckptdeco.explain().calls] == [1] * 3
    ckptdeco.undecorate(net)
    assert not any("forward" in vars(module) for module in net.modules())


def test_adapters_are_merged_and_unloaded_from_a_decorated_model() -> None:
    torch.manual_seed(0)
    net = _adapted(_bert()).eval()
    reference = copy.deepcopy(net).merge_and_unload()
    ckptdeco.decorate(net)
    merged = net.merge_and_unload()
    ids = torch.randint(3, 40, (2, 6))
    with ckptdeco.policy(segment=2):
        assert torch.equal(merged(input_ids=ids).logits, reference(input_ids=ids).logits)
    assert list(merged.state_dict()) == list(reference.state_dict())


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))])
def test_copies_of_a_decorated_model_of_transformers(copied: Change) -> None:
    net = _bert()
    ckptdeco.decorate(net)
    other = copied(net)
    own = {id(module) for module in other.modules()}
    assert all(id(layer.forward.__self__) in own for layer in other.bert.encoder.layer)
    ckptdeco.undecorate(other)
    assert not any("forward" in vars(module) for module in other.modules())
    assert all("forward" in vars(layer) for layer in net.bert.encoder.layer)


@pytest.mark.parametrize("name", ["diffusers_unet", "timm_vit"])
def test_saved_models_of_diffusers_and_timm(name: str, tmp_path: Any) -> None:
    from tests.integrations.vision_models import MODELS

    net: Any = MODELS[name].build()
    before, keys = trace_of(net), list(net.state_dict())
    with ckptdeco.decorate(net):
        assert list(net.state_dict()) == keys
        if hasattr(net, "save_pretrained"):
            net.save_pretrained(tmp_path)
            loaded = type(net).from_pretrained(tmp_path)
        else:
            torch.save(net.state_dict(), tmp_path / "weights.pt")
            loaded = MODELS[name].build()
            loaded.load_state_dict(torch.load(tmp_path / "weights.pt"))
    assert all(map(torch.equal, net.state_dict().values(), loaded.state_dict().values()))
    assert not any("forward" in vars(module) for module in loaded.modules())
    assert trace_of(net) == before
