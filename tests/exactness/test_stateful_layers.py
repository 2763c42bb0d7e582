"""Layers that change state while they run, of torch and as others write them: once a call, read as forward read it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations, spectral_norm, weight_norm

from tests.support.flights import all_flights, state_of
from tests.support.layers import DIM, Layer, Stack, batch
from tests.support.oracle import assert_same, total
from tests.support.subject import checkpointable


class Wraps(Layer):
    """tanh of a linear layer, then whatever is given, over (batch, DIM) or (batch, DIM, 2)."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.linear, self.inner = nn.Linear(DIM, DIM), inner

    @checkpointable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(self.inner(torch.tanh(self.linear(x))))


class OverImages(nn.Module):
    """Gives a module of (batch, channels, length) its input."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x[:, :, None] * torch.ones(3)).mean(-1)


def _frozen() -> nn.Module:
    return nn.BatchNorm1d(DIM).eval()


def _frozen_affine() -> nn.Module:
    norm = nn.BatchNorm1d(DIM)
    norm.weight.requires_grad_(False)
    norm.bias.requires_grad_(False)
    return norm


def _sync_evaluating() -> nn.Module:
    return nn.SyncBatchNorm(DIM).eval()


def _old_spectral() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return spectral_norm(nn.Linear(DIM, DIM), n_power_iterations=2)


def _old_weight_norm() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return weight_norm(nn.Linear(DIM, DIM))


class PowerIteration(nn.Module):
    """Spectral normalisation by hand: the vector is replaced at each call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.register_buffer("u", functional.normalize(torch.randn(DIM), dim=0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        w = self.linear.weight
        with torch.no_grad():
            v = functional.normalize(w.t() @ self.u, dim=0)
            self.u = functional.normalize(w @ v, dim=0)
        return self.linear(x) / torch.dot(self.u, w @ v)


class Codebook(nn.Module):
    """A vector quantiser with moving averages, as VQ-VAE trains it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(5, DIM))
        self.register_buffer("sizes", torch.ones(5))
        self.register_buffer("sums", self.codes.clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        index = torch.cdist(x, self.codes).argmin(1)
        one_hot = functional.one_hot(index, 5).to(x.dtype)
        code = self.codes[index]
        if self.training:
            with torch.no_grad():
                self.sizes.mul_(0.9).add_(one_hot.sum(0), alpha=0.1)
                self.sums.mul_(0.9).add_(one_hot.t() @ x, alpha=0.1)
                self.codes.copy_(self.sums / self.sizes[:, None])
        self.commitment = functional.mse_loss(x, code)
        return x + (code - x).detach() + self.commitment


class RandomRestart(Codebook):
    """Fills its codes from the first batch, as many implementations do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("is_filled", torch.tensor(False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.is_filled:
            self.codes.data.copy_(x.detach()[torch.randint(0, len(x), (5,))])
            self.sums.data.copy_(self.codes)
            self.is_filled.fill_(True)
        return super().forward(x)


class Lif(nn.Module):
    """A leaky integrate-and-fire neuron with its potential on the module, cut off from the last call or not."""

    def __init__(self, is_cut: bool) -> None:
        super().__init__()
        self.is_cut = is_cut
        self.potential: torch.Tensor | float = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = self.potential
        if self.is_cut and isinstance(before, torch.Tensor):
            before = before.detach()
        v = before * 0.5 + x
        spike = torch.sigmoid(4 * (v - 0.5))
        self.potential = v - spike * 0.5
        return spike


class Recurrent(nn.Module):
    """Keeps its hidden state from call to call, detached, and counts."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(DIM, DIM)
        self.hidden: torch.Tensor | None = None
        self.n = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.cell(x, self.hidden)
        self.hidden = h.detach()
        self.n += 1
        return h * (1 + 0.01 * self.n)


class Rotary(nn.Module):
    """Grows its table when a longer sequence comes, and counts how often."""

    def __init__(self) -> None:
        super().__init__()
        self.length, self.n_grown = 0, 0
        self.register_buffer("cos", None, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) > self.length:
            self.length, self.n_grown = len(x), self.n_grown + 1
            self.cos = torch.cos(torch.arange(len(x))[:, None] * torch.ones(DIM) / self.length)
        return x * self.cos[: len(x)]


class DictOfTables(nn.Module):
    """The same in a dictionary that all lengths share."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: dict[int, torch.Tensor] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) not in self.tables:
            self.tables[len(x)] = torch.linspace(0, 1 + len(self.tables), len(x))[:, None]
        return x + self.tables[len(x)]


class Experts(nn.Module):
    """A mixture of experts: counts tokens, keeps a moving load and stores its auxiliary loss on itself."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(DIM, 3)
        self.experts = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(3))
        self.register_buffer("load", torch.zeros(3))
        self.register_buffer("bias", torch.zeros(3))
        self.n_tokens = 0
        self.seen: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        probability = self.gate(x).softmax(-1)
        choice = (probability + self.bias).argmax(-1)
        counts = torch.bincount(choice, minlength=3)
        self.load += counts
        with torch.no_grad():
            self.bias.add_(torch.sign(counts.float().mean() - counts), alpha=0.1)
        self.n_tokens += len(x)
        self.seen.append(int(choice[0]))
        self.aux_loss = (probability.mean(0) * (self.load / self.n_tokens)).sum()
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            rows = (choice == i).nonzero()[:, 0]
            out = out.index_add(0, rows, expert(x[rows]) * probability[rows, i, None])
        return out + self.aux_loss


class Captures(nn.Module):
    """Keeps what it computed, for somebody to look at."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.captured: dict[str, Any] = {}
        self.history: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.linear(x)
        self.captured["h"] = h
        self.history.append(h.detach().mean())
        return h.relu()


class Sequences(nn.Module):
    """Gives a recurrent module a sequence."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(torch.stack([x, 2 * x]))[0][-1]


class MaxNorm(nn.Module):
    """An embedding that renormalises its weight in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, DIM, max_norm=1.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.table((x[:, 0] > 0).long())


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: nn.BatchNorm1d(DIM),
    "batch norm, cumulative": lambda: nn.BatchNorm1d(DIM, momentum=None),
    "batch norm, untracked": lambda: nn.BatchNorm1d(DIM, track_running_stats=False),
    "batch norm, evaluating": _frozen,
    "batch norm, frozen weights": _frozen_affine,
    "batch norm, without weights": lambda: nn.BatchNorm1d(DIM, affine=False),
    "batch norm, sync, evaluating": _sync_evaluating,
    "batch norm, lazy": nn.LazyBatchNorm1d,
    "batch norm of images": lambda: OverImages(nn.BatchNorm1d(DIM)),
    "instance norm": lambda: OverImages(nn.InstanceNorm1d(DIM, affine=True, track_running_stats=True)),
    "group norm": lambda: nn.GroupNorm(2, DIM),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(DIM, DIM), n_power_iterations=2),
    "spectral norm by hooks": _old_spectral,
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(DIM, DIM)),
    "weight norm by hooks": _old_weight_norm,
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(DIM, DIM)),
    "power iteration": PowerIteration,
    "codebook": Codebook,
    "codebook filled at first": RandomRestart,
    "spiking": lambda: Lif(is_cut=True),
    "recurrent": Recurrent,
    "rotary": Rotary,
    "dict of tables": DictOfTables,
    "experts": Experts,
    "captures": Captures,
    "gru": lambda: Sequences(nn.GRU(DIM, DIM, num_layers=2, dropout=0.3)),
    "lstm": lambda: Sequences(nn.LSTM(DIM, DIM, num_layers=2, dropout=0.3)),
    "embedding with max_norm": MaxNorm,
}


class KeepsStatistics(Layer):
    """Running statistics that are plain tensors: a kernel writes them, and counts no version."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.mean, self.var = torch.zeros(DIM), torch.ones(DIM)

    @checkpointable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.linear(x))
        return x + nn.functional.batch_norm(h, self.mean, self.var, training=self.training, momentum=0.3)


def test_statistics_written_after_a_call_that_only_read_them(under: Any) -> None:
    """Autograd saved the tensors themselves, and backward reads what is in them by then."""

    def step(model: Any, inputs: Any, context: Any) -> Any:
        with context():
            out = model.eval()(model.train()(model.eval()(*inputs)))
        total(out).backward()
        return out

    assert_same(lambda: Stack([KeepsStatistics()]), step, lambda: (batch(),), under, steps=4)


@pytest.mark.parametrize("name", LAYERS)
def test_state_is_as_after_the_plain_run(name: str, same: Any) -> None:
    is_copied = name not in ("weight norm by hooks", "batch norm, lazy")  # which torch cannot copy
    same(lambda: Stack([Wraps(LAYERS[name]()) for _ in range(5)]), all_flights, steps=2, is_copied=is_copied)


@pytest.mark.parametrize("is_cut", [True, False])
def test_neurons_over_several_time_steps_and_one_backward(is_cut: bool, same: Any) -> None:
    def step(model: Stack, inputs: Any, context: Any) -> Any:
        for layer in model.layers:
            layer.inner.potential = 0.0
        with context():
            outs = [model(*inputs) for _ in range(3)]
            total(outs).backward()
        return outs, state_of(model)

    same(lambda: Stack([Wraps(Lif(is_cut)) for _ in range(5)]), step, is_copied=False)


@pytest.mark.parametrize("make", [Rotary, DictOfTables])
def test_table_that_grows_while_a_shorter_sequence_waits_for_its_backward(make: Any, same: Any) -> None:
    lengths = [3, 5, 4, 7, 2, 8]

    def step(model: Stack, inputs: Any, context: Any) -> Any:
        with context():
            outs = [model(inputs[0][:n]) for n in lengths]
        for out in outs:
            total(out).backward()
        return outs, state_of(model)

    same(lambda: Stack([Wraps(make()) for _ in range(5)]), step, lambda: (batch(8),))


def _toggled(model: Stack, inputs: Any, context: Any) -> Any:
    """Training and evaluation alternate, forwards wait for their backwards across the change."""
    outs = []
    with context():
        for mode in (True, False, False, True):
            model.train(mode)
            outs.append(model(*inputs))
    for out in outs[1:]:
        total(out).backward()
    model.train()
    total(outs[0]).backward()
    return outs, state_of(model)


@pytest.mark.parametrize("name", ["batch norm", "spectral norm", "codebook", "power iteration"])
def test_mode_changed_between_passes_that_wait(name: str, same: Any) -> None:
    same(lambda: Stack([Wraps(LAYERS[name]()) for _ in range(5)]), _toggled)


def _quantised() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.ao import quantization

        linear = nn.Linear(DIM, DIM)
        linear.qconfig = quantization.get_default_qat_qconfig("fbgemm")
        qat = torch.ao.nn.qat.Linear.from_float(linear)
        return nn.Sequential(qat, linear.qconfig.activation())


def _observed(model: Stack, inputs: Any, context: Any) -> Any:
    """Observers are off, then on, then fake quantisation, then observers are off again."""
    from torch.ao import quantization as q

    outs = []
    changes = (
        (q.disable_observer, q.disable_fake_quant),
        (q.enable_observer,),
        (q.enable_fake_quant,),
        (q.disable_observer,),
    )
    with context():
        for functions in changes:
            for function in functions:
                model.apply(function)
            outs += [model(*inputs), model(*inputs)]
    for out in outs:
        total(out).backward()
    return outs, state_of(model)


@pytest.mark.filterwarnings("ignore")
def test_observers_and_fake_quantisation_switched_between_passes(same: Any) -> None:
    same(lambda: Stack([Wraps(_quantised()) for _ in range(5)]), _observed)


@pytest.mark.filterwarnings("ignore")
def test_observers_and_fake_quantisation(same: Any) -> None:
    same(lambda: Stack([Wraps(_quantised()) for _ in range(5)]), all_flights, steps=2)


class Scales(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.register_buffer("scale", torch.ones(DIM))

    @checkpointable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x)) * self.scale


def test_buffer_that_backward_needs_and_others_write_is_an_error_that_names_the_layer(scheduled: Any) -> None:
    model = Stack([Scales() for _ in range(5)])
    for _ in range(3):
        with scheduled():
            loss = total(model(batch()))
        model.layers[0].scale.mul_(2)
        with pytest.raises(RuntimeError, match=r"modified by an inplace operation.*(layers\.0|\[torch)"):
            loss.backward()
