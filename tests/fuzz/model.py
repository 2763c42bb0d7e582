"""The model of a program: it runs the moves of the program over two chains."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.fuzz.catalogue import ROWS, WIDTH, Move
from tests.fuzz.layer import TAKES, FuzzLayer, hidden_of, others_of
from tests.fuzz.parts_arguments import Cache
from tests.fuzz.program import M, Program


class Batch:
    """The inputs of one pass: two chains' starts, a mask that is a constant, a gate that gets a gradient."""

    def __init__(self) -> None:
        self.x = torch.randn(ROWS, WIDTH, requires_grad=True)
        self.y = torch.randn(ROWS, WIDTH)
        self.mask = torch.rand(ROWS, WIDTH)
        self.gate = torch.randn(WIDTH, requires_grad=True)

    def leaves(self) -> list[Tensor]:
        """The tensors whose gradients are compared."""
        return [tensor for tensor in (self.x, self.gate) if tensor.is_leaf]


class Pass:
    """One forward pass, and what moves may ask of it."""

    def __init__(self, model: Model, batch: Batch, effects: collections.Counter[str], group: int | None) -> None:
        self.model = model
        self.effects = effects
        self.group = group
        self.x, self.mask, self.gate = batch.x, batch.mask, batch.gate
        self.chains = [model.stems[0](batch.x), model.stems[1](batch.y)]
        # Only kept for the moves that need it: what is alive is a boundary, and no walk would be longer than one call.
        self.looks_back = any(move.name in ("skip", "jump") for move in model.program.code)
        self.older = list(self.chains) if self.looks_back else []
        self.held: list[Tensor] = []
        self.extras: list[Tensor] = []
        self.retained: list[Tensor] = []
        self.chain = 0
        self.cache = {"object": Cache(), "list": [], "dict": {}, "static": torch.zeros(ROWS, WIDTH)}

    def count(self, name: str) -> None:
        """Notes a side effect."""
        self.effects[name] += 1

    def other(self) -> Tensor:
        """The present tensor of the other chain."""
        return self.chains[1 - self.chain]

    def layer(self, index: int) -> FuzzLayer:
        """A layer of the group that this pass uses."""
        layers: Any = self.model.layers
        mine = list(layers)[self.group :: 2] if self.group is not None else layers
        return (mine or layers)[index % len(mine or layers)]

    def call(self, index: int, h: Tensor) -> Tensor:
        """A layer call; all that it gives takes part in the loss, and is not kept alive by the loop."""
        layer = self.layer(index)
        out = layer(TAKES[layer.takes](h), **self._arguments(layer))
        self.extras += map(loss_of, others_of(out))
        return hidden_of(out)

    def bound(self, index: int) -> Callable[[Tensor], Tensor]:
        """A function that makes a layer call with the side inputs of now, and gives the hidden state only."""
        layer = self.layer(index)
        arguments = self._arguments(layer)
        return lambda h: hidden_of(layer(TAKES[layer.takes](h), **arguments))

    def _arguments(self, layer: FuzzLayer) -> dict[str, Any]:
        chain = self.chain
        given = {
            "mask": self.mask,
            "gate": self.gate,
            "cache": self.cache,
            "generator": self.model.streams[0],
            "info": {
                "activation": lambda v: v * 0.5 + chain,
                "scale": 0.5,
                "rows": slice(0, 2),
                "nested": [{"weight": self.mask[0, 0]}, None, "text", 1j],
            },
        }
        return {name: given[name] for name in layer.wants}

    def run(self, code: tuple[M, ...]) -> None:
        """Runs the moves."""
        for move in code:
            self.chain = move.chain
            h = Move.catalogue[move.name].run(self.chains[move.chain], self, move.layer, move.k)
            self.chains[move.chain] = h
            if self.looks_back:
                self.older.append(h)
            del h
        self.older.clear()

    def outputs(self) -> list[Tensor]:
        """All that the loss is made of."""
        aux = [part.aux_loss for layer in self.model.layers for part in layer.parts if hasattr(part, "aux_loss")]
        return [*self.chains, *self.held, *self.extras, *(value for value in aux if value is not None)]


def loss_of(out: Tensor) -> Tensor:
    """A scalar for one output."""
    value = out.double()
    return (value * value.sigmoid()).sum()


class Model(nn.Module):
    """Stems and layers; the random number streams that its caller owns."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.stems = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.layers = nn.ModuleList(FuzzLayer(spec, i) for i, spec in enumerate(program.layers))
        if program.tied:
            for layer in self.layers:
                layer.linear.weight = self.layers[0].linear.weight
        self.streams = [torch.Generator().manual_seed(program.seed)]
        self.program = program

    def forward(self, batch: Batch, effects: collections.Counter[str], group: int | None = None) -> Pass:
        env = Pass(self, batch, effects, group)
        env.run(self.program.code)
        return env

    def begin(self, step: int) -> None:
        """Tells all layers which step it is; what belongs to the last one is forgotten."""
        for layer in self.layers:
            layer.step = step
            for part in layer.parts:
                part.reset()


_BASE = frozenset(nn.Module().__dict__) - {"training"}


def memory(model: Model) -> dict[str, Any]:
    """What modules hold beside parameters and buffers, and the owners' streams, in a form that can be compared."""
    found: dict[str, Any] = {"stream": model.streams[0].get_state()}
    for name, module in model.layers.named_modules():
        for key, value in vars(module).items():
            if key not in _BASE:
                found[f"{name}.{key}"] = shown(value)
    return found


def shown(value: Any, depth: int = 0) -> Any:
    """A value as tuples, dictionaries and copies of tensors."""
    if isinstance(value, Tensor):
        grad = value.grad if value.is_leaf else None
        return value.requires_grad, value.detach().clone(), None if grad is None else grad.clone()
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, (bool, int, float, str, type(None))):
        return value
    if isinstance(value, (list, tuple, collections.deque)):
        return (type(value).__name__, *(shown(item, depth + 1) for item in value))
    if isinstance(value, (set, frozenset)):
        return tuple(sorted(value))
    if isinstance(value, dict):
        return {repr(key): shown(item, depth + 1) for key, item in value.items()}
    with contextlib.suppress(TypeError):
        if depth < 3 and type(value).__module__.startswith("tests."):
            return shown(vars(value), depth + 1)
    return type(value).__name__
