"""`decorate`: which layers it takes, that the model is otherwise as it was, and that `undecorate` leaves no trace."""

from __future__ import annotations

import copy
import functools
import inspect
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import ckptdeco
from tests.support.layers import DIM, Stack, TanhLayer, batch
from tests.support.oracle import assert_same, forward_backward
from tests.support.subject import POLICIES, PolicySpec


class Mlp(nn.Module):
    """A layer that nobody decorated."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(DIM, 2 * DIM), nn.Dropout(0.2), nn.Linear(2 * DIM, DIM)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return x + scale * self.down(self.drop(torch.tanh(self.up(x))))


class Other(Mlp):
    pass


def model(*kinds: type[nn.Module]) -> Stack:
    return Stack([kind() for kind in kinds or (Mlp,) * 4])


def trace_of(module: nn.Module) -> Any:
    """All that is found on a model: attributes of its modules by identity, keys, types."""
    return [
        (name, type(m), {key: id(value) for key, value in vars(m).items()}) for name, m in module.named_modules()
    ], list(module.state_dict())


@pytest.mark.parametrize("spec", POLICIES, ids=str)
def test_decorated_model_is_exact(spec: PolicySpec) -> None:
    made = spec.make()

    def build() -> Stack:
        plain = model()
        ckptdeco.decorate(plain)
        return plain

    assert_same(build, forward_backward, lambda: (batch(),), lambda: made, steps=4)
    if made.segment is not None or made.levels != 1:
        assert any(call.dropped_bytes for call in ckptdeco.explain().calls)


def test_nothing_else_on_the_model_changes_and_undecorate_leaves_no_trace() -> None:
    plain = model()
    before = trace_of(plain)
    layers = ckptdeco.decorate(plain)
    assert list(layers) == [f"layers.{i}" for i in range(4)]
    after = trace_of(plain)
    assert after[1] == before[1]
    for (name, kind, attributes), (_, kind_then, attributes_then) in zip(after[0], before[0], strict=True):
        assert kind is kind_then
        assert {**attributes, "forward": 0} == {**attributes_then, "forward": 0}
        assert ("forward" in attributes) == (name in layers)
    ckptdeco.undecorate(plain)
    assert trace_of(plain) == before


def test_forward_looks_like_the_method_that_it_was() -> None:
    plain = model()
    ckptdeco.decorate(plain)
    layer = plain.layers[0]
    assert inspect.ismethod(layer.forward)
    assert layer.forward.__self__ is layer
    assert layer.forward.__func__ is Mlp.forward
    assert str(inspect.signature(layer.forward)) == "(x: 'torch.Tensor', scale: 'float' = 1.0) -> 'torch.Tensor'"
    assert inspect.getsource(layer.forward) == inspect.getsource(Mlp.forward)
    assert Mlp().forward.__func__ is Mlp.forward  # of other instances nothing changed


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        (Mlp, ["layers.0", "layers.1", "layers.2"]),  # Other is one, too
        (Other, ["layers.1"]),
        ([Other, "*.2"], ["layers.1", "layers.2"]),
        ("layers.[02]", ["layers.0", "layers.2"]),
        (lambda m: isinstance(m, nn.Linear) and m.in_features == DIM, ["layers.0.up", "layers.1.up", "layers.2.up"]),
        (nn.Module, ["layers"]),  # the outermost
        ("auto", ["layers.0", "layers.2"]),
    ],
)
def test_selection(layers: Any, expected: list[str]) -> None:
    assert list(ckptdeco.decorate(model(Mlp, Other, Mlp), layers)) == expected


def _resnet() -> nn.Module:
    """Stages of blocks, as in torchvision."""
    return nn.Sequential(nn.Conv2d(1, 1, 1), *[nn.Sequential(*[Mlp() for _ in range(n)]) for n in (2, 3)], nn.Flatten())


def _swin() -> nn.Module:
    """Stages that are modules of their own class, with a list of blocks each."""

    class Stage(nn.Module):
        def __init__(self, n: int) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Mlp() for _ in range(n)])

    return nn.ModuleDict({"down": Stage(2), "norm": nn.LayerNorm(DIM), "up": Stage(1)})


class Holder(nn.Module):
    """Modules as attributes."""

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)


class Normed(nn.BatchNorm1d):
    """A norm that holds its activation."""

    def __init__(self) -> None:
        super().__init__(4)
        self.act = nn.ReLU()


def _experts() -> nn.Module:
    """Blocks with an attention and a list of experts."""

    def block() -> nn.Module:
        return Holder(attention=Other(), experts=nn.ModuleList([Mlp() for _ in range(4)]))

    return Holder(layers=nn.ModuleList([block() for _ in range(2)]), head=nn.Linear(DIM, 2))


def _u_net() -> nn.Module:
    """Blocks that hold only lists, some of one layer."""

    class Down(Holder):
        pass

    def block(kind: type[Holder], n: int) -> nn.Module:
        return kind(resnets=nn.ModuleList([Mlp() for _ in range(n)]), down=nn.ModuleList([nn.Linear(DIM, DIM)]))

    return Holder(
        down=nn.ModuleList([block(Down, 1), block(Down, 1)]),
        middle=block(Holder, 2),
        up=nn.ModuleList([block(Holder, 2), block(Holder, 2)]),
    )


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (
            lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 8, batch_first=True), 2),
            ["layers.0", "layers.1"],
        ),
        (_resnet, ["1.0", "1.1", "2.0", "2.1", "2.2"]),
        (_swin, ["down.blocks.0", "down.blocks.1", "up.blocks.0"]),
        (lambda: nn.Sequential(Mlp(), nn.ReLU(), Mlp()), ["0", "2"]),
        (lambda: nn.Sequential(Mlp(), nn.ModuleList([Other()])), ["1.0"]),
        (lambda: nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)]), ["0", "1", "2"]),
        (
            lambda: nn.ModuleDict({"encoder": model(), "head": nn.Linear(DIM, 2)}),
            [f"encoder.layers.{i}" for i in range(4)],
        ),
        (_experts, ["layers.0", "layers.1"]),
        (
            _u_net,
            [
                *("down.0.resnets.0", "down.1.resnets.0", "middle.resnets.0", "middle.resnets.1"),
                *("up.0.resnets.0", "up.0.resnets.1", "up.1.resnets.0", "up.1.resnets.1"),
            ],
        ),
        (  # towers of one class
            lambda: Holder(image=model(), text=model(), scale=nn.Linear(2, 2)),
            [f"{tower}.layers.{i}" for tower in ("image", "text") for i in range(4)],
        ),
        (  # a list of pairs
            lambda: nn.ModuleList([nn.ModuleList([Mlp(), Other()]) for _ in range(2)]),
            ["0.0", "0.1", "1.0", "1.1"],
        ),
        (  # a norm that holds its activation is no block
            lambda: nn.Sequential(*[nn.Sequential(Holder(norm=Normed(), linear=nn.Linear(4, 4))) for _ in range(2)]),
            ["0.0", "1.0"],
        ),
        (  # without any list
            lambda: Holder(first=Mlp(), second=Mlp(), head=nn.Linear(DIM, 2)),
            ["first", "second"],
        ),
    ],
)
def test_auto_takes_the_repeated_blocks(build: Callable[[], nn.Module], expected: list[str]) -> None:
    assert list(ckptdeco.decorate(build())) == expected


def test_shared_layer_is_decorated_once() -> None:
    layer = Mlp()
    assert list(ckptdeco.decorate(nn.ModuleList([layer, Mlp(), layer]))) == ["0", "1"]


@pytest.mark.parametrize("layers", ["nope.*", nn.Conv2d, lambda m: False, [], 3, [3]])
def test_no_match_is_an_error_that_says_what_there_is(layers: Any) -> None:
    plain = model()
    before = trace_of(plain)
    with pytest.raises(ckptdeco.CheckpointError, match="Fix:"):
        ckptdeco.decorate(plain, layers)
    assert trace_of(plain) == before


def test_auto_without_blocks_is_an_error() -> None:
    with pytest.raises(ckptdeco.CheckpointError, match="no repeated blocks"):
        ckptdeco.decorate(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)))
    with pytest.raises(ckptdeco.CheckpointError, match="Mlp"):
        ckptdeco.decorate(nn.Sequential(Mlp(), nn.ReLU()))


def test_not_a_module_is_an_error() -> None:
    with pytest.raises(ckptdeco.CheckpointError, match="model="):
        ckptdeco.decorate(lambda x: x)  # type: ignore[arg-type]


def test_twice_is_once() -> None:
    plain = model()
    ckptdeco.decorate(plain)
    first = [layer.forward for layer in plain.layers]
    assert list(ckptdeco.decorate(plain, "*")) == ["layers"]  # another module: the list itself
    ckptdeco.undecorate(plain)
    ckptdeco.decorate(plain)
    again = ckptdeco.decorate(plain)
    assert len(again) == 4
    assert not isinstance(plain.layers[0].forward.__wrapped__, type(first[0]))


def test_layers_decorated_in_their_class_stay_as_they_are() -> None:
    plain = model(TanhLayer, TanhLayer)
    before = trace_of(plain)
    assert list(ckptdeco.decorate(plain)) == ["layers.0", "layers.1"]
    assert trace_of(plain) == before


def test_as_a_context_manager_it_takes_back_only_what_it_did() -> None:
    plain = model()
    ckptdeco.decorate(plain, "layers.0")
    before = trace_of(plain)
    with ckptdeco.decorate(plain, Mlp) as layers:
        assert len(layers) == 4
        assert layers["layers.1"] is plain.layers[1]
        assert trace_of(plain) != before
    assert trace_of(plain) == before


def _saved(plain: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(plain, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


COPIES: tuple[Callable[[Any], Any], ...] = (copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), _saved)


@pytest.mark.parametrize("copied", COPIES)
@pytest.mark.parametrize("is_trained", [False, True])
def test_copies_are_decorated_and_call_their_own_layers(copied: Any, is_trained: bool) -> None:
    plain = model()
    ckptdeco.decorate(plain)
    if is_trained:
        with ckptdeco.policy(segment=2):
            plain(batch()).sum().backward()
    other = copied(plain)
    assert all(layer.forward.__self__ is layer for layer in other.layers)
    for parameter in plain.parameters():
        parameter.grad = None
    with ckptdeco.policy(segment=2):
        other(batch()).sum().backward()
    assert sum(call.n_recomputed for call in ckptdeco.explain().calls) == 4
    assert all(parameter.grad is None for parameter in plain.parameters())
    ckptdeco.undecorate(other)
    assert not any("forward" in vars(layer) for layer in other.layers)
    assert all("forward" in vars(layer) for layer in plain.layers)


def test_copy_of_one_layer_and_of_one_forward() -> None:
    plain = model()
    ckptdeco.decorate(plain)
    layer = copy.deepcopy(plain.layers[0])
    assert layer.forward.__self__ is layer
    forward = copy.deepcopy(plain.layers[0].forward)
    assert forward.__self__ is not plain.layers[0]
    assert forward.__self__.forward is forward


@pytest.mark.parametrize("order", ["before", "after"])
def test_another_library_replaces_the_forward_of_the_instance(order: str) -> None:
    """As accelerate does with its hooks: a function on the instance that calls the forward it found."""
    plain = model()

    def replace() -> None:
        for layer in plain.layers:
            own = layer.forward
            layer.forward = functools.update_wrapper(functools.partial(lambda f, x: f(x) * 0.5, own), own)

    if order == "before":
        replace()
    ckptdeco.decorate(plain)
    if order == "after":
        replace()
    reference = model()
    reference.load_state_dict(plain.state_dict())
    for layer in reference.layers:
        layer.forward = functools.partial(lambda f, x: f(x) * 0.5, layer.forward)
    x = batch()
    grads = []
    for one, under in ((reference, ckptdeco.policy(None)), (plain, ckptdeco.policy(segment=2))):
        torch.manual_seed(0)
        with under:
            one(x).square().sum().backward()
        grads.append([parameter.grad for parameter in one.parameters()])
    assert all(map(torch.equal, *grads))
    assert len(ckptdeco.explain().calls) == 4
    if order == "after":
        with pytest.raises(ckptdeco.CheckpointError, match="replaced by"):
            ckptdeco.undecorate(plain)
    else:
        ckptdeco.undecorate(plain)
        assert all(isinstance(layer.forward, functools.partial) for layer in plain.layers)


def test_model_is_not_kept_alive() -> None:
    import gc
    import weakref

    plain = model()
    layers = ckptdeco.decorate(plain)
    alive = weakref.ref(plain)
    del plain
    gc.collect()
    assert alive() is None
    with pytest.raises(KeyError):
        layers["layers.0"]


def test_layers_that_a_loop_calls_have_their_names_in_the_model() -> None:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 3)
    ckptdeco.decorate(encoder)
    for model in (encoder, copy.deepcopy(encoder)):
        x = torch.ones(2, 5, 8)
        with ckptdeco.policy(segment=1, only="layers.[01]"):
            for layer in model.layers:
                x = layer(x)
        x.sum().backward()
        assert [call.name for call in ckptdeco.explain().calls if call.n_recomputed] == ["layers.0", "layers.1"]
