"""Contract 17 and 18: what calls the function for its users. Swapped in, bits are those of the plain model."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.utils.checkpoint import checkpoint_sequential, create_selective_checkpoint_contexts

from ckptdeco import checkpoint
from tests.dropin.comparing import N_CALLS
from tests.support.oracle import assert_equal


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 4), nn.Dropout(0.3), nn.BatchNorm1d(4), nn.GELU(), nn.Linear(4, 4))


def step(model: nn.Module, call: Callable[..., Any], seed: int) -> tuple[Any, ...]:
    torch.manual_seed(seed)
    model.zero_grad()
    x = torch.randn(8, 4, requires_grad=True)
    out = call(x)
    out.square().sum().backward()
    return (
        out.detach(),
        x.grad,
        [p.grad for p in model.parameters()],
        [b.clone() for b in model.buffers()],
        torch.get_rng_state(),
    )


def flat(observed: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(v for item in observed for v in (item if isinstance(item, list) else [item]))


@pytest.mark.parametrize("n_segments", [1, 2, 3])
def test_checkpoint_sequential(n_segments: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.utils.checkpoint, "checkpoint", checkpoint)
    plain = nn.Sequential(Net(), Net(), Net())
    other = copy.deepcopy(plain)
    for seed in range(N_CALLS):
        expected = step(plain, plain, seed)
        call = functools.partial(checkpoint_sequential, other, n_segments, use_reentrant=False)
        assert_equal(flat(expected), flat(step(other, call, seed)), f"step {seed}")


OPTIONS = {
    "no options": {},
    "late": {"early_stop": False},
    "selective": {
        "context_fn": functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
    },
}


@pytest.mark.parametrize("name", OPTIONS)
def test_checkpoint_wrapper(name: str) -> None:
    plain = nn.Sequential(Net(), Net(), Net())
    other = copy.deepcopy(plain)
    wrap = functools.partial(checkpoint_wrapper, checkpoint_fn=checkpoint, **OPTIONS[name])
    apply_activation_checkpointing(other, checkpoint_wrapper_fn=wrap, check_fn=lambda module: isinstance(module, Net))
    assert list(plain.state_dict()) == list(other.state_dict())
    for seed in range(N_CALLS):
        assert_equal(flat(step(plain, plain, seed)), flat(step(other, other, seed)), f"step {seed}")


def test_checkpoint_wrapper_passes_keywords() -> None:
    class Keyworded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor, *, scale: Tensor, debug: bool = False) -> Tensor:
            return (self.linear(x) * scale).sin()

    plain = Keyworded()
    other = checkpoint_wrapper(copy.deepcopy(plain), checkpoint_fn=checkpoint)
    scale = torch.full((4,), 2.0)
    for seed in range(N_CALLS):
        one, two = (step(m, functools.partial(m, scale=scale), seed) for m in (plain, other))
        assert_equal(flat(one), flat(two), f"step {seed}")


def _tiny(kind: str) -> Any:
    transformers = pytest.importorskip("transformers", minversion="5.24")
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "vocab_size": 50}
    torch.manual_seed(0)
    if kind == "llama":
        config = transformers.LlamaConfig(
            intermediate_size=32, num_hidden_layers=3, num_key_value_heads=2, attention_dropout=0.2, **sizes
        )
        return transformers.LlamaForCausalLM(config).train()
    if kind == "gpt2":
        return transformers.GPT2LMHeadModel(
            transformers.GPT2Config(n_embd=16, n_layer=3, n_head=2, vocab_size=50, bos_token_id=0, eos_token_id=0)
        ).train()
    return transformers.BertForMaskedLM(
        transformers.BertConfig(intermediate_size=32, num_hidden_layers=3, **sizes)
    ).train()


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert"])
@pytest.mark.filterwarnings("ignore")
def test_transformers_gradient_checkpointing(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = _tiny(kind)
    other = copy.deepcopy(plain)
    used: list[str] = []

    def counted(function: Any, *args: Any, **kwargs: Any) -> Any:
        used.append("call")
        return checkpoint(function, *args, **kwargs)

    import transformers.modeling_utils

    monkeypatch.setattr(transformers.modeling_utils, "checkpoint", counted)
    other.gradient_checkpointing_enable()
    fired: list[str] = []
    blocks = [m for m in other.modules() if getattr(m, "gradient_checkpointing", False) and hasattr(m, "forward")]
    for block in blocks:
        block.register_forward_hook(lambda *args: fired.append("hook"))
    for seed in range(N_CALLS):
        seen = []
        for model in (plain, other):
            used.clear()
            fired.clear()
            torch.manual_seed(seed)
            model.zero_grad()
            ids = torch.randint(0, 50, (2, 7))
            loss = model(input_ids=ids, labels=ids).loss
            n_hooks = len(fired)
            loss.backward()
            assert len(fired) == n_hooks  # hooks on a layer stay outside of its recompute
            seen.append((loss.detach(), *[p.grad for p in model.parameters()], torch.get_rng_state()))
        assert len(used) == 3
        assert_equal(*seen, f"step {seed}")


def compiled(function: Any, **options: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(function, backend="aot_eager", **options)


@pytest.mark.filterwarnings("ignore")
def test_inside_torch_compile_it_is_torchs_own() -> None:
    """In one graph; the compiler decides how to recompute."""
    n_seen: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        n_seen.append(sum("checkpoint" in str(node.target) for node in graph.graph.nodes))
        return graph

    torch._dynamo.reset()
    call = torch.compile(lambda x: checkpoint(lambda y: y.sin().exp(), x).cos(), backend=backend, fullgraph=True)
    x = torch.randn(3, requires_grad=True)
    reference = x.detach().requires_grad_()
    call(x).sum().backward()
    reference.sin().exp().cos().sum().backward()
    assert_equal(reference.grad, x.grad, "grad")
    assert n_seen == [1]


@pytest.mark.filterwarnings("ignore")
def test_compiled_function_inside() -> None:
    function = compiled(lambda x: x.sin().exp().cos())
    for _ in range(N_CALLS):
        x = torch.randn(3, requires_grad=True)
        reference = x.detach().requires_grad_()
        checkpoint(function, x).sum().backward()
        function(reference).sum().backward()
        assert_equal(reference.grad, x.grad, "grad")
