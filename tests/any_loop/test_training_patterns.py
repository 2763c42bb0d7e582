"""GAN with detach, greedy layer-local training, siamese towers, Transformer-XL memories."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.support.layers import DIM, Block, Layer, Loop, batch, stack
from tests.support.oracle import assert_same, total, update
from tests.support.subject import checkpointable


class Gan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.maker, self.critic = stack(4, p=0.1), stack(4, p=0.1)


def make_gan() -> nn.Module:
    return Gan()


def test_gan_critic_step_then_maker_step(under: Any) -> None:
    def program(model: Any, inputs: Any, context: Any) -> Any:
        noise, real = inputs
        with context():
            fake = model.maker(noise)
            loss = total(model.critic(real)) - total(model.critic(fake.detach()))
            loss.backward()
            update(model.critic)
            total(model.critic(fake)).backward()
        update(model.maker)
        return fake

    assert_same(make_gan, program, lambda: (batch(), batch()), under)


def test_gan_maker_step_first(under: Any) -> None:
    """The critic's walk must not go into the maker, whose weights have changed since."""

    def program(model: Any, inputs: Any, context: Any) -> Any:
        noise, real = inputs
        with context():
            fake = model.maker(noise)
            total(model.critic(fake)).backward()
            update(model.maker)
            model.critic.zero_grad()
            loss = total(model.critic(real)) - total(model.critic(fake.detach()))
            loss.backward()
        return fake

    assert_same(make_gan, program, lambda: (batch(), batch()), under)


def test_detached_branch_survives_an_update_of_its_producer(under: Any) -> None:
    """Both graphs exist before the first backward."""

    def program(model: Any, inputs: Any, context: Any) -> Any:
        with context():
            fake = model.maker(inputs[0])
            one = total(fake)
            two = total(model.critic(fake.detach()))
        one.backward()
        update(model.maker)
        two.backward()
        return fake

    assert_same(make_gan, program, lambda: (batch(),), under)


def test_greedy_layer_local_training(under: Any) -> None:
    def program(model: Any, inputs: Any, context: Any) -> Any:
        x = inputs[0]
        with context():
            for layer in model.layers:
                y = layer(x)
                total(y).backward()
                update(layer)
                x = y.detach()
        return x

    assert_same(lambda: stack(5, p=0.1), program, lambda: (batch(),), under)


def test_greedy_training_with_the_backwards_afterwards(under: Any) -> None:
    def program(model: Any, inputs: Any, context: Any) -> Any:
        x, losses = inputs[0], []
        with context():
            for layer in model.layers:
                y = layer(x)
                losses.append(total(y))
                x = y.detach()
        for layer, loss in zip(model.layers, losses, strict=True):
            loss.backward()
            update(layer)
        return x

    assert_same(lambda: stack(5, p=0.1), program, lambda: (batch(),), under)


def test_siamese_towers(under: Any) -> None:
    def program(model: Any, inputs: Any, context: Any) -> Any:
        with context():
            a, b = (model(x) for x in inputs)
            loss = (a - b).square().sum() + (a * b.detach()).sum()
        loss.backward()
        return a, b

    assert_same(lambda: stack(6, p=0.2), program, lambda: (batch(), batch()), under)


def test_siamese_with_stop_gradient_and_moving_average(under: Any) -> None:
    def program(model: Any, inputs: Any, context: Any) -> Any:
        with context():
            with torch.no_grad():
                for slow, fast in zip(model.maker.parameters(), model.critic.parameters(), strict=True):
                    slow.mul_(0.9).add_(fast, alpha=0.1)
                target = model.maker(inputs[0])
            loss = (model.critic(inputs[1]) - target).square().sum()
            loss.backward()
        return target

    assert_same(make_gan, program, lambda: (batch(), batch()), under)


class MemoryLayer(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.value = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    @checkpointable
    def forward(self, x: torch.Tensor, memory: torch.Tensor | None) -> torch.Tensor:
        context = x if memory is None else torch.cat([memory, x])
        return x + torch.softmax(self.query(x) @ context.t(), -1) @ self.value(context)


def test_transformer_xl_memories(under: Any) -> None:
    """Hidden states of the piece before, detached, are a side input of each layer, across updates."""

    def program(model: Any, inputs: Any, context: Any) -> Any:
        memories: list[torch.Tensor | None] = [None] * len(model.layers)
        with context():
            for x in inputs:
                new = []
                for layer, memory in zip(model.layers, memories, strict=True):
                    new.append(x.detach())
                    x = layer(x, memory)
                memories = new
                total(x).backward()
                update(model)
        return memories

    assert_same(
        lambda: Loop([MemoryLayer() for _ in range(5)], lambda m: None),
        program,
        lambda: [batch() for _ in range(4)],
        under,
    )


def test_truncated_backpropagation_through_time(under: Any) -> None:
    def program(model: Any, inputs: Any, context: Any) -> Any:
        state = torch.zeros_like(inputs[0])
        with context():
            for x in inputs:
                for layer in model.layers:
                    state = layer(state + x)
                total(state).backward()
                update(model)
                state = state.detach()
        return state

    assert_same(
        lambda: Loop([Block(p=0.1) for _ in range(4)], lambda m: None),
        program,
        lambda: [batch() for _ in range(4)],
        under,
    )


def test_distillation_from_a_frozen_teacher(under: Any) -> None:
    def build() -> nn.Module:
        model = Gan()
        model.maker.requires_grad_(False).eval()
        return model

    def program(model: Any, inputs: Any, context: Any) -> Any:
        with context():
            loss = (model.critic(*inputs) - model.maker(*inputs)).square().sum()
        loss.backward()

    assert_same(build, program, lambda: (batch(requires_grad=False),), under)
