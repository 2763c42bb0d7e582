"""`measure(step)`: exact bytes, predictions that hold, nothing disturbed, nothing left."""

from __future__ import annotations

import copy
import gc
import random
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import ckptdeco
from benchmarks.memory import measure_layer
from benchmarks.models import Block as GptBlock
from benchmarks.models import Bottleneck, ConvNet, Gpt
from benchmarks.overhead import decorated
from ckptdeco.engine import observe
from ckptdeco.planning.meter import measure_step
from tests.support.layers import Block, Stem, TanhLayer, stack
from tests.support.subject import ENGINE, checkpointable

pytestmark = pytest.mark.skipif(ENGINE != "ckptdeco", reason="measures ckptdeco")
SIZES = ("input_bytes", "saved_bytes", "output_bytes", "forward_temp_bytes", "backward_temp_bytes")
ROWS, WIDE = 16, 8
BOUNDARY = ROWS * WIDE * 4
LOSS = 4  # bytes of a loss


def small_gpt(n_layers: int = 4) -> tuple[Gpt, Any]:
    torch.manual_seed(0)
    model = Gpt(decorated(GptBlock), n_layers=n_layers, width=32, vocabulary=64, max_length=32)
    ids, targets = torch.randint(0, 64, (2, 2, 32))
    return model, lambda: model(ids, targets)


def small_conv_net(is_normed: bool) -> tuple[ConvNet, Any]:
    torch.manual_seed(0)
    model = ConvNet(decorated(Bottleneck), widths=(8, 16), n_blocks=3, is_normed=is_normed)
    pictures, classes = torch.randn(4, 3, 16, 16), torch.tensor([0, 1, 2, 3])
    return model, lambda: model(pictures, classes)


def sizes(cost: Any) -> list[int]:
    return [getattr(cost, name) for name in SIZES]


def measured_chain(n_layers: int = 4, make: Any = Block, **options: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model, x = Stem(stack(n_layers, make, WIDE, **options), WIDE), torch.randn(ROWS, WIDE)
    return model, lambda: model(x).square().sum().backward()


# ---------------------------------------------------------------------------------------------------------- bytes


def test_bytes_are_those_of_one_layer_measured_alone() -> None:
    model, forward = small_gpt()
    measured = ckptdeco.measure(lambda: forward().backward(), model=model)
    single = GptBlock(32, 4)
    alone = measure_layer(single, single.parameters(), torch.randn(2, 32, 32))
    expected = sizes(alone)
    expected[-1] += LOSS  # the loss itself
    assert [sizes(layer) for layer in measured.layers] == [expected] * 4
    assert [layer.position for layer in measured.layers] == [0, 1, 2, 3]
    assert [layer.name for layer in measured.layers] == [f"chain.layers.{i}" for i in range(4)]
    assert all(layer.input_saved for layer in measured.layers)


def test_base_of_a_step() -> None:
    model, forward = small_gpt()
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        forward().backward()
        optimizer.step()

    base = ckptdeco.measure(step, model=model).base
    n_bytes = sum(parameter.nbytes for parameter in model.parameters())
    assert (base.parameter_bytes, base.gradient_bytes, base.buffer_bytes) == (n_bytes, n_bytes, 0)
    assert base.optimizer_bytes == 2 * n_bytes + 4 * len(list(model.parameters()))  # two moments, and the counts
    assert (base.head_input_bytes, base.head_input_saved) == (2 * 32 * 32 * 4, True)


def test_parameters_and_gradients_are_found_without_a_model() -> None:
    model, forward = small_gpt()
    model.tokens.weight.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step() -> None:
        forward().backward()
        optimizer.step()
        optimizer.zero_grad()  # so no gradient is there at the end

    measured, other = ckptdeco.measure(step), ckptdeco.measure(lambda: forward().backward(), model=model)
    n_bytes = sum(parameter.nbytes for parameter in model.parameters())
    assert measured.base.parameter_bytes == n_bytes
    assert measured.base.gradient_bytes == n_bytes - model.tokens.weight.nbytes
    assert [sizes(layer) for layer in measured.layers] == [sizes(layer) for layer in other.layers]


POLICIES: list[dict[str, Any]] = [
    {"segment": 1},
    {"segment": 2},
    {"segment": 4},
    {"every": 2},
    {"segment": 3, "levels": 2},
    {"levels": "log"},
]


@pytest.mark.parametrize("kind", ["gpt", "conv", "conv with BatchNorm"])
def test_predicted_peaks_hold(kind: str) -> None:
    model, forward = small_gpt(6) if kind == "gpt" else small_conv_net(kind != "conv")
    measured = ckptdeco.measure(lambda: forward().backward(), model=model)
    for options in [None, *POLICIES]:
        policy = ckptdeco.policy(None) if options is None else ckptdeco.policy(**options)
        with policy:
            for _ in range(2):
                trace = measure_step(forward, model.parameters())
        predicted = measured.predict(policy).peak_bytes
        assert abs(trace.peak_bytes - predicted) <= 0.02 * predicted, (options, trace.peak_bytes, predicted)


def test_a_layer_that_saves_its_output_has_nothing_to_skip() -> None:
    model, step = measured_chain(3, TanhLayer)
    assert [layer.skipped_s for layer in ckptdeco.measure(step, model=model).layers] == [0.0] * 3
    model, step = measured_chain(3)
    assert all(0 < layer.skipped_s < layer.forward_s for layer in ckptdeco.measure(step, model=model).layers)


# --------------------------------------------------------------------------------------------------------- chains


class Towers(nn.Module):
    """Two towers; or an encoder, whose result each layer of the decoder reads."""

    def __init__(self, is_joined: bool) -> None:
        super().__init__()
        self.is_joined = is_joined
        self.stems = nn.ModuleList([nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE)])
        self.left = nn.ModuleList([Block(WIDE) for _ in range(3)])
        self.right = nn.ModuleList([Reader(WIDE) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = self.stems[0](x), self.stems[1](x)
        for layer in self.left:
            a = layer(a)
        for layer in self.right:
            b = layer(b, a if self.is_joined else None)
        return a.sum() + b.sum()


class Reader(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(dim), nn.Linear(dim, dim)

    @checkpointable
    def forward(self, x: torch.Tensor, other: torch.Tensor | None) -> torch.Tensor:
        y = functional.gelu(self.norm(x))
        return x + self.up(y if other is None else y * other)


def test_two_towers_are_two_chains() -> None:
    model = Towers(is_joined=False)
    measured = ckptdeco.measure(lambda: model(torch.ones(ROWS, WIDE)).backward(), model=model)
    assert [(layer.name, layer.chain, layer.position) for layer in measured.layers] == [
        ("left.0", 0, 0),
        ("left.1", 0, 1),
        ("left.2", 0, 2),
        ("right.0", 1, 0),
        ("right.1", 1, 1),
    ]
    assert [len(chain) for chain in measured.chains] == [3, 2]
    assert all(layer.input_bytes == BOUNDARY for layer in measured.layers)
    assert measured.predict(ckptdeco.policy(segment=2)).peak_bytes > 0


def test_what_all_layers_of_a_decoder_read_counts_once() -> None:
    model = Towers(is_joined=True)
    measured = ckptdeco.measure(lambda: model(torch.ones(ROWS, WIDE)).backward(), model=model)
    assert [layer.input_bytes for layer in measured.layers if layer.name.startswith("right")] == [
        2 * BOUNDARY,
        BOUNDARY,
    ]


def test_several_passes_in_a_step() -> None:
    model, step = measured_chain(3)
    measured = ckptdeco.measure(lambda: (step(), step()), model=model)
    assert (measured.n_passes, len(measured.layers)) == (2, 3)


class WritesItsWeight(Block):
    """Cannot be recomputed, so its calls are stored."""

    @checkpointable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.down.bias.add_(0.0)
        return x + self.down(functional.gelu(self.up(x)))


def test_a_call_that_cannot_be_recomputed_is_measured_as_it_is() -> None:
    model, step = measured_chain(3)
    model.body.layers[1] = WritesItsWeight(WIDE)
    measured = ckptdeco.measure(step, model=model)
    assert [layer.position for layer in measured.layers] == [0, 1, 2]
    assert all(layer.backward_s > 0 and layer.saved_bytes > layer.input_bytes for layer in measured.layers)


# ---------------------------------------------------------------------------------------------- nothing disturbed


class Noisy(nn.Module):
    """Draws from every stream, and writes its buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(WIDE), nn.Linear(WIDE, WIDE)
        self.generator = torch.Generator().manual_seed(3)

    @checkpointable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * (1 + random.random() + np.random.rand()) + torch.rand(WIDE, generator=self.generator)
        return functional.dropout(self.linear(self.norm(x)), 0.5).relu()


def world(model: nn.Module, optimizer: Any) -> list[Any]:
    states = [value for state in optimizer.state.values() for value in state.values()]
    tensors = [*model.parameters(), *model.buffers(), *[p.grad for p in model.parameters()], *states]
    generators = [module.generator.get_state() for module in model.modules() if isinstance(module, Noisy)]
    bits = [None if t is None else t.detach().numpy().tobytes() for t in (*tensors, *generators, torch.get_rng_state())]
    return [bits, random.getstate(), repr(np.random.get_state()), [module.training for module in model.modules()]]


@pytest.mark.parametrize("has_gradients", [True, False])
def test_all_is_put_back_with_a_model(has_gradients: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDE, WIDE), Noisy(), Noisy(), nn.BatchNorm1d(WIDE))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    x = torch.randn(ROWS, WIDE)

    def step() -> None:
        model.train(not model.training)
        model.train()
        model[3].eval()
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.param_groups[0]["lr"] *= 0.5

    if has_gradients:
        step()
        model(x).sum().backward()
    model.train()
    gradients = [parameter.grad for parameter in model.parameters()]
    before = world(model, optimizer)
    rate = optimizer.param_groups[0]["lr"]
    measured = ckptdeco.measure(step, model=model)
    assert len(measured.layers) == 2
    assert world(model, optimizer) == before
    assert optimizer.param_groups[0]["lr"] == rate
    assert all(p.grad is grad for p, grad in zip(model.parameters(), gradients, strict=True))
    step()
    assert world(model, optimizer) != before, "the comparison sees what a step does"


def test_measured_steps_of_a_training_are_plain_steps() -> None:
    def train(n_measured: int) -> list[Any]:
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        model = nn.Sequential(nn.Linear(WIDE, WIDE), Noisy(), Noisy())
        optimizer = torch.optim.AdamW(model.parameters())

        def step() -> None:
            optimizer.zero_grad()
            model(torch.randn(ROWS, WIDE)).square().sum().backward()
            optimizer.step()

        if n_measured:
            ckptdeco.measure(step, n_steps=n_measured)
        for _ in range(6 - n_measured):
            step()
        return world(model, optimizer)

    assert train(4) == train(0)


def test_nothing_is_kept_alive() -> None:
    kept: list[torch.Tensor] = []

    def prepare() -> tuple[nn.Module, Any]:
        model, x = measured_chain(2)[0], torch.randn(ROWS, WIDE)

        def step() -> None:
            kept[:] = [model(x).sum()]
            kept[0].backward(retain_graph=True)

        return model, step

    model, step = prepare()
    measured = ckptdeco.measure(step, model=model)
    gone = [weakref.ref(model), weakref.ref(model.body.layers[0]), weakref.ref(step)]
    gc.collect()
    gc.disable()
    try:
        kept.clear()
        del model, step
        assert [reference() for reference in gone] == [None] * 3
    finally:
        gc.enable()
    assert len(measured.layers) == 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")
def test_an_accelerator_is_timed_by_its_own_events() -> None:
    device = torch.accelerator.current_accelerator()
    model, x = measured_chain(3)[0].to(device), torch.randn(ROWS, WIDE, device=device)
    measured = ckptdeco.measure(lambda: model(x).square().sum().backward(), model=model)
    assert measured.device.startswith(device.type)
    assert all(layer.forward_s > 0 and layer.backward_s > 0 for layer in measured.layers)
    assert all(layer.input_bytes == BOUNDARY for layer in measured.layers)


# --------------------------------------------------------------------------------------------------------- errors


def test_step_that_raises() -> None:
    model, _ = measured_chain()
    before = copy.deepcopy(model.state_dict())

    def step() -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        raise KeyError("batch")

    with pytest.raises(ckptdeco.PolicyError, match=r"raised KeyError: 'batch'(?s:.)*Fix: call it by itself") as caught:
        ckptdeco.measure(step, model=model)
    assert isinstance(caught.value.__cause__, KeyError)
    assert observe.observer is None
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_interrupt_passes_and_leaves_no_observer() -> None:
    def step() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ckptdeco.measure(step)
    assert observe.observer is None


def undecorated() -> None:
    nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()


def forward_only() -> None:
    Block()(torch.ones(2, 8))


def with_its_own_policy() -> None:
    with ckptdeco.policy(segment=2):
        Block()(torch.ones(2, 8)).sum().backward()


def measured_within() -> None:
    ckptdeco.measure(forward_only)


@pytest.mark.parametrize(
    ("step", "options", "says"),
    [
        (undecorated, {}, "no decorated layer call"),
        (forward_only, {}, "no backward came"),
        (with_its_own_policy, {}, "a policy of its own"),
        (measured_within, {}, "another measurement is under way"),
        ("step", {}, "run without arguments"),
        (undecorated, {"n_steps": 2}, "give 3 or more"),
        (undecorated, {"model": 3}, "not a module"),
    ],
)
def test_errors_name_a_fix(step: Any, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ckptdeco.PolicyError, match=says) as caught:
        ckptdeco.measure(step, **options)
    assert "Fix: " in str(caught.value)
    assert observe.observer is None


def test_layers_that_differ_from_run_to_run() -> None:
    layers = [Block() for _ in range(9)]
    n_runs = [0]

    def step() -> None:
        n_runs[0] += 1
        x = torch.ones(2, 8)
        for layer in layers[: n_runs[0]]:
            x = layer(x)
        x.sum().backward()

    with pytest.raises(ckptdeco.PolicyError, match="differ from run to run"):
        ckptdeco.measure(step)
