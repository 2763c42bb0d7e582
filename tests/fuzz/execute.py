"""Runs a program, plain or under its policies, and tells all that may be seen after each step."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import warnings
from typing import Any

import torch

import ckptdeco
from tests.fuzz.catalogue import Around, Backward, Between, Loop, mode
from tests.fuzz.model import Batch, Model, Pass, loss_of, memory
from tests.fuzz.parts_operations import Interrupted
from tests.fuzz.program import Program
from tests.support.oracle import Observation, observe, seed_everything, update


@dataclasses.dataclass
class Result:
    """What a run left behind after each step that it finished, and the error that ended it."""

    seen: list[Observation]
    error: Exception | None = None


def execute(program: Program, *, is_plain: bool) -> Result:
    """Runs all steps."""
    result = Result([])
    mode.is_plain = is_plain
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _run_steps(program, is_plain, result)
    except Exception as error:
        result.error = error.with_traceback(None)
    finally:
        mode.is_plain = False
    return result


def _run_steps(program: Program, is_plain: bool, result: Result) -> None:
    seed_everything(program.seed)
    run = Run(Model(program), program, is_plain)
    with run.policy_at("all"):
        for step in range(program.steps):
            seed_everything(program.seed + 1 + step)
            result.seen.append(run.step(step))


#: What `save=` may be, by what a program calls it.
SAVES: dict[str, Any] = {
    "matmuls": "matmuls",
    "any": "*",  # every layer inside a layer
    "functions": [torch.tanh, torch.sigmoid, torch.mul, torch.nn.functional.dropout, torch.nn.functional.linear],
    "operators": [torch.ops.aten.addmm, torch.ops.aten.mm],
}


def make_policy(options: dict[str, Any]) -> Any:
    """The policy; `only` and `skip` are given as the indices of layers, `save` by name."""
    made = dict(options)
    if "save" in made:
        made["save"] = SAVES[made["save"]]
    for name in ("only", "skip"):
        if name in made:
            made[name] = _Selects(made[name])
    return ckptdeco.policy(**made)


class _Selects:
    """A predicate; decorated layers inside layers are left out by `only` and let through by `skip`."""

    def __init__(self, indices: tuple[int, ...]) -> None:
        self.indices = indices

    def __call__(self, layer: Any) -> bool:
        return getattr(layer, "index", None) in self.indices


class Run:
    """What loops ask for a pass, its backward and a step of the optimizer."""

    def __init__(self, model: Model, program: Program, is_plain: bool) -> None:
        self.model = model
        self.program = program
        self.policies = [] if is_plain else [make_policy(options) for options in program.policies]
        self.policy: Any = self.policies[0] if self.policies else None
        self.effects: collections.Counter[str] = collections.Counter()
        self.generators: list[Any] = []
        self.adam: Any = None

    def policy_at(self, place: str) -> Any:
        """The context of the policy, if this is where the program enters it."""
        here = self.policy is not None and self.program.place == place
        return self.policy if here else contextlib.nullcontext()

    def step(self, number: int) -> Observation:
        """Runs one step and looks at what it left."""
        if self.policies and self.program.place != "all":
            self.policy = self.policies[number % len(self.policies)]
        loop = Loop.catalogue[self.program.loop]
        batches = [Batch() for _ in range(loop.n_batches)]
        leaves = [leaf for batch in batches for leaf in batch.leaves()]
        self.model.begin(number)
        step = loop.step
        if self.policy is not None and self.program.place == "decorator":
            step = self.policy(step)
        with self.policy_at("step"):
            got = step(self, batches)
        for generator in self.generators:
            generator.close()
        self.generators.clear()
        outputs = got, memory(self.model), dict(self.effects)
        seen = observe(self.model, leaves, outputs)
        self.optimize(self.model)
        return seen

    def forward(self, batch: Batch, group: int | None = None) -> Pass:
        """One pass; layers that raise are tried again."""
        while True:
            try:
                if self.policy is not None and self.program.place == "generator":
                    generator = self.policy(self._passes)(batch, group)
                    self.generators.append(generator)
                    return next(generator)
                with self.policy_at("forward"):
                    return self._forward(batch, group)
            except Interrupted:
                self.effects["tried again"] += 1

    def _passes(self, batch: Batch, group: int | None) -> Any:
        yield self._forward(batch, group)

    def _forward(self, batch: Batch, group: int | None) -> Pass:
        with contextlib.ExitStack() as stack:
            for name in self.program.around:
                stack.enter_context(Around.catalogue[name].enter())
            return self.model(batch, self.effects, group)

    def backward(self, *passed: Pass) -> Any:
        """What the program does between forward and backward, backward, and what there is to compare."""
        losses = [loss_of(out) for one in passed for out in one.outputs() if out.requires_grad]
        undo = [Between.catalogue[change.name].apply(self.model, change.k) for change in self.program.between]
        got = None
        if losses:
            inputs = [one.x for one in passed if one.x.requires_grad]
            got = Backward.catalogue[self.program.backward].run(losses, self.model, inputs)
        for action in reversed(undo):
            if action is not None:
                action()
        return got, [self.report(one) for one in passed]

    def report(self, one: Pass) -> Any:
        """Outputs, gradients that were asked for, and the cache."""
        return (
            [out.detach().clone() for out in one.outputs()],
            [out.grad for out in one.retained],
            [len(one.cache["list"]), len(one.cache["dict"]), one.cache["object"].n_seen, one.cache["static"].clone()],
            [value.detach().clone() for value in [*one.cache["list"], *one.cache["dict"].values()]],
        )

    def optimize(self, model: Any) -> None:
        """A step of the optimizer."""
        if self.program.optimizer == "sgd":
            update(model)
        elif self.program.optimizer == "adam":
            if self.adam is None:
                self.adam = torch.optim.Adam(self.model.parameters(), lr=0.01)
            self.adam.step()
            self.adam.zero_grad()
