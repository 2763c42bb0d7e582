"""Small random programs: Hypothesis draws a list of instructions, `RandomModel` runs them, plain or under a policy."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from tests.support.layers import (
    DIM,
    BatchNormLayer,
    Block,
    CrossLayer,
    DictLayer,
    InPlaceInsideLayer,
    InPlaceOnInputLayer,
    Layer,
    MaskedLayer,
    PairLayer,
    TanhLayer,
    batch,
)
from tests.support.subject import PolicySpec, checkpointable, spec


class OuterLayer(Layer):
    """A decorated layer made of decorated layers."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = Block(p=0.2), TanhLayer()

    @checkpointable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.two(self.one(x) * 0.9)


KINDS: dict[str, Callable[[], Layer]] = {
    "block": Block,
    "dropout": lambda: Block(p=0.3),
    "tanh": TanhLayer,
    "masked": MaskedLayer,
    "batchnorm": BatchNormLayer,
    "in_place": InPlaceInsideLayer,
    "in_place_on_input": InPlaceOnInputLayer,
    "pair": PairLayer,
    "dict": DictLayer,
    "cross": CrossLayer,
    "outer": OuterLayer,
}

GLUE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "scale": lambda x: x * 0.7,
    "shift": lambda x: x + 0.1,
    "dropout": lambda x: functional.dropout(x, 0.2),
    "view": lambda x: x.view_as(x),
    "reshape": lambda x: x.view(2, -1, DIM).view(-1, DIM),
    "detach": lambda x: x.detach(),
    "restart": lambda x: x.detach().requires_grad_(),
    "clone": lambda x: x.clone(),
    "halves": lambda x: torch.cat(x.chunk(2, -1)[::-1], -1),
    "clamp": lambda x: x.clamp(-3, 3),
}


@dataclasses.dataclass(frozen=True)
class Call:
    """chain = layer(chain, …)."""

    chain: int
    layer: int
    side: int = 0


@dataclasses.dataclass(frozen=True)
class Glue:
    """chain = some plain operation of it."""

    chain: int
    name: str


@dataclasses.dataclass(frozen=True)
class Skip:
    """chain = chain + an older value (any chain's)."""

    chain: int
    back: int


@dataclasses.dataclass(frozen=True)
class Jump:
    """chain = an older value, so that it has several consumers."""

    chain: int
    back: int


@dataclasses.dataclass(frozen=True)
class NoGrad:
    """chain = layer(chain) without grad."""

    chain: int
    layer: int


@dataclasses.dataclass(frozen=True)
class Hold:
    """The caller keeps the chain's tensor to the end; it takes part in the loss."""

    chain: int


Instruction = Call | Glue | Skip | Jump | NoGrad | Hold


@dataclasses.dataclass(frozen=True)
class RandomProgram:
    """Layers, instructions and the way backward is done."""

    kinds: tuple[str, ...]
    code: tuple[Instruction, ...]
    backward: str

    def build(self) -> nn.Module:
        """Returns the model."""
        return RandomModel(self)

    @staticmethod
    def make_inputs() -> Any:
        """Returns the inputs: two chains' starts and a mask."""
        return batch(), batch(requires_grad=False), torch.rand(4, DIM)


class RandomModel(nn.Module):
    """Runs the instructions of a program."""

    def __init__(self, program: RandomProgram) -> None:
        super().__init__()
        self.stems = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(2))
        self.layers = nn.ModuleList(KINDS[kind]() for kind in program.kinds)
        self.program = program

    def call(self, index: int, x: torch.Tensor, other: torch.Tensor, mask: torch.Tensor, side: int) -> torch.Tensor:
        """One layer call with the arguments of its kind."""
        layer = self.layers[index]
        if isinstance(layer, MaskedLayer):
            choices: list[dict[str, Any]] = [
                {},
                {"mask": mask},
                {"mask": mask * 2, "flip": True},
                {"mask": other, "scale": 0.3},
            ]
            out: torch.Tensor = layer(x, **choices[side % 4])
        elif isinstance(layer, PairLayer):
            out = layer(x, [mask, other, x, x * 2][side % 4])[side % 2]
        elif isinstance(layer, DictLayer):
            made = layer({"h": x, "gate": [mask, other][side % 2], "seen": [], "n": 0})
            out = made["h"] + made["seen"][0]
        elif isinstance(layer, CrossLayer):
            out = layer(x, context=[other, mask][side % 2])
        elif isinstance(layer, InPlaceOnInputLayer) and (x.is_leaf or side % 2):
            out = layer(x.clone())
        else:
            out = layer(x)
        return out

    def forward(self, x: torch.Tensor, y: torch.Tensor, mask: torch.Tensor) -> list[torch.Tensor]:
        chains = [self.stems[0](x), self.stems[1](y)]
        older, held = list(chains), []
        may_change = any(isinstance(layer, InPlaceOnInputLayer) for layer in self.layers)
        for step in self.program.code:
            h = chains[step.chain]
            match step:
                case Call(chain, layer, side):
                    h = self.call(layer, h, chains[1 - chain], mask, side)
                case Glue(_, name):
                    h = GLUE[name](h)
                case Skip(_, back):
                    h = h + older[-1 - back % len(older)]
                case Jump(_, back):
                    h = older[-1 - back % len(older)]
                case NoGrad(chain, layer):
                    with torch.no_grad():
                        h = self.call(layer, h.clone() if may_change else h, chains[1 - chain], mask, 1)
                case Hold():
                    held.append(h)
            chains[step.chain] = h
            older.append(h)
        return [*chains, *held]

    def run(self, inputs: Any, under: Any) -> Any:
        """Forward under the policy, and the backward of the program."""
        how = self.program.backward
        with under():
            outputs = self(*inputs)
            losses = [(out * out.sigmoid()).sum() for out in outputs if out.requires_grad]
            if how == "inside" and losses:
                sum(losses).backward()
        if not losses or how == "inside":
            return [out.detach() for out in outputs]
        parameters = list(self.parameters())
        got: Any = None
        if how == "after":
            sum(losses).backward()
        elif how == "twice":
            sum(losses).backward(retain_graph=True)
            sum(losses).backward()
        elif how == "one by one":
            for loss in losses[:-1]:
                loss.backward(retain_graph=True)
            losses[-1].backward()
        elif how == "in reverse":
            for loss in losses[:0:-1]:
                loss.backward(retain_graph=True)
            losses[0].backward()
        elif how == "partial":
            half = parameters[: len(parameters) // 2]
            got = torch.autograd.grad(sum(losses), half, retain_graph=True, allow_unused=True)
            sum(losses).backward()
        elif how == "double":
            got = torch.autograd.grad(sum(losses), parameters, create_graph=True, allow_unused=True)
            penalty = [g.square().sum() for g in got if g is not None and g.requires_grad]
            (sum(losses) + sum(penalty)).backward()
            got = [None if g is None else g.detach() for g in got]
        return [out.detach() for out in outputs], got


def run(model: nn.Module, inputs: Any, under: Any) -> Any:
    """The program as the oracle calls it."""
    assert isinstance(model, RandomModel)
    return model.run(inputs, under)


@st.composite
def programs(draw: st.DrawFn, *, max_calls: int = 14) -> RandomProgram:
    """Draws a program."""
    kinds = tuple(draw(st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=5)))
    chain, layer = st.sampled_from([0, 0, 1]), st.integers(0, len(kinds) - 1)
    call = st.builds(Call, chain, layer, st.integers(0, 3))
    rare = st.one_of(
        st.builds(Glue, chain, st.sampled_from(sorted(GLUE))),
        st.builds(Skip, chain, st.integers(0, 12)),
        st.builds(Jump, chain, st.integers(0, 12)),
        st.builds(NoGrad, chain, layer),
        st.builds(Hold, chain),
    )
    code = draw(st.lists(st.one_of(call, call, call, rare), min_size=2, max_size=max_calls))
    how = draw(st.sampled_from(["after", "after", "inside", "twice", "one by one", "in reverse", "partial", "double"]))
    return RandomProgram(kinds, tuple(code), how)


@st.composite
def policies(draw: st.DrawFn, *, nested: bool = False) -> PolicySpec:
    """Draws the arguments of a policy."""
    segment = st.one_of(st.integers(1, 6), st.sampled_from(["sqrt", "auto"]))
    kind = draw(st.sampled_from(["segment", "segment", "every", "levels", "log"]))
    options: dict[str, Any] = {}
    if kind == "every":
        options["every"] = draw(st.integers(1, 5))
    elif kind == "log":
        options["levels"] = "log"
    else:
        options["segment"] = draw(segment)
        if kind == "levels":
            options["levels"] = draw(st.sampled_from([2, "log"]))
    if draw(st.booleans()):
        options["keep_last"] = draw(st.integers(1, 3))
    if draw(st.integers(0, 3)) == 0:
        options["early_stop"] = False
    if draw(st.integers(0, 3)) == 0:
        options["determinism_check"] = draw(st.sampled_from(["values", "none"]))
    if nested:
        options["nested"] = True
    return spec(**options)
