"""Programs, legal in plain PyTorch, that get other gradients if a recompute reads the world as it is (R11–R18).

Those of R19–R22 are in `test_silently_wrong_inside.py`. Where a test asks for an error, exactness cannot be had.
"""

from __future__ import annotations

import gc
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from torch.utils.checkpoint import CheckpointError

from tests.support import meters
from tests.support.layers import DIM, BatchNormLayer, Block, Layer, Loop, Stack, Stem, TanhLayer, batch, stack
from tests.support.oracle import assert_same, forward_backward, total, update
from tests.support.subject import ENGINE, checkpointable, policy, spec

ours = pytest.mark.skipif(ENGINE != "ckptdeco", reason="asks for what ckptdeco promises")
if ENGINE == "ckptdeco":
    from ckptdeco.errors import ParameterModifiedError, ValueMismatch
else:
    ParameterModifiedError = ValueMismatch = Exception


def changed_before_backward(change: Any) -> Any:
    """A program that calls `change(model)` between forward and backward."""

    def program(model: Any, inputs: Any, context: Any) -> Any:
        with context():
            out = model(*inputs)
        change(model)
        total(out).backward()
        return out

    return program


def changed_between_forwards(change: Any) -> Any:
    """A program that calls `change(model, k)` before the k-th of two forwards, which have one backward."""

    def program(model: Any, inputs: Any, context: Any) -> Any:
        outs = []
        with context():
            for k in range(2):
                change(model, k)
                outs.append(model(*inputs))
        (total(outs[0]) - 2 * total(outs[1])).backward()
        return outs

    return program


# ---- R11: the module's state at forward is that of the recompute, or the change is an error


@torch.no_grad()
def add_to_biases(model: Any, k: int = 1) -> None:
    for layer in model.layers:
        layer.linear.bias.add_(k)


@pytest.mark.parametrize("when", [changed_before_backward, changed_between_forwards])
def test_bias_changed_under_no_grad_is_named(when: Any, loud: Any) -> None:
    """R11: autograd never saves a bias, so no version check of its own sees it."""
    loud(ParameterModifiedError, "linear.bias", lambda: stack(5, TanhLayer), when(add_to_biases))


def halve(model: Any, k: int = 1) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data * (0.5 if k else 1.0)


@pytest.mark.parametrize("when", [changed_before_backward, changed_between_forwards])
def test_parameter_data_replaced_is_named(when: Any, loud: Any) -> None:
    """R11: an exponential average, offloading or a cast; it bumps no version."""
    loud(ParameterModifiedError, "linear.", lambda: stack(5, TanhLayer), when(halve))


class AsksTraining(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    @checkpointable
    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        return torch.tanh(h) if self.training else torch.sin(h)


LAYERS_OF_TWO_MODES = {
    "asks": AsksTraining,
    "dropout": lambda: Block(p=0.4),
    "batchnorm": BatchNormLayer,
}


@pytest.mark.parametrize("kind", LAYERS_OF_TWO_MODES)
def test_eval_before_backward(kind: str, exact: Any) -> None:
    """R11: with BatchNorm the kernel would be given statistics of size 0."""

    def program(model: Any, inputs: Any, context: Any) -> Any:
        out = changed_before_backward(lambda m: m.eval())(model, inputs, context)
        assert not model.layers[0].training
        model.train()
        return out

    exact(lambda: Stack([LAYERS_OF_TWO_MODES[kind]() for _ in range(5)]), program)


@pytest.mark.parametrize("kind", LAYERS_OF_TWO_MODES)
def test_train_and_eval_forwards_before_one_backward(kind: str, exact: Any) -> None:
    """R11."""
    build = lambda: Stack([LAYERS_OF_TWO_MODES[kind]() for _ in range(5)])  # noqa: E731
    exact(build, changed_between_forwards(lambda m, k: m.train(k == 0)))


def test_functional_call_with_other_weights(exact: Any) -> None:
    """R11: the recompute must not read the module's own weights."""

    class WithSecond(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.second = stack(5, TanhLayer), stack(5, TanhLayer)

    def program(m: Any, inputs: Any, context: Any) -> Any:
        with context():
            own = m.model(*inputs)
            out = functional_call(m.model, dict(m.second.named_parameters()), inputs)
            made = functional_call(m.model, {k: p * 0.5 for k, p in m.second.named_parameters()}, inputs)
        (total(out) + total(own) + total(made)).backward()
        return out, own, made

    exact(WithSecond, program)


class NormedByHook(nn.Linear):
    """`nn.utils.spectral_norm` sets `self.weight`, a plain attribute, in a hook outside the decorated forward."""

    @checkpointable
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(super().forward(x))


def hook_normed() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.utils.spectral_norm(NormedByHook(DIM, DIM))


def test_spectral_norm_by_hooks_of_real_minus_fake(exact: Any) -> None:
    """R11: the second forward replaces the weight that the first one read."""

    def program(model: Any, inputs: Any, context: Any) -> Any:
        real, fake = inputs
        with context():
            loss = total(model(real)) - total(model(fake))
        loss.backward()
        return loss

    exact(lambda: Stack([hook_normed() for _ in range(5)]), program, lambda: (batch(), batch()))


class Scaled(Layer):
    """Reads a plain attribute, and which of two adapters is on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.adapters = nn.ModuleDict({"policy": nn.Linear(DIM, DIM), "reference": nn.Linear(DIM, DIM)})
        self.scale, self.active = 1.0, "policy"

    @checkpointable
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x) + self.scale * self.adapters[self.active](x))


def set_scale(model: Any, k: int = 1) -> None:
    for layer in model.layers:
        layer.scale = 0.5 if k else 1.5


def switch_adapter(model: Any, k: int) -> None:
    for layer in model.layers:
        layer.active = ("policy", "reference")[k]


def test_attribute_set_before_backward(exact: Any) -> None:
    """R11."""

    def program(model: Any, inputs: Any, context: Any) -> Any:
        out = changed_before_backward(set_scale)(model, inputs, context)
        assert all(layer.scale == 0.5 for layer in model.layers)
        set_scale(model, 0)
        return out

    exact(lambda: Stack([Scaled() for _ in range(5)]), program)


@pytest.mark.parametrize("change", [set_scale, switch_adapter])
def test_attribute_set_between_two_forwards(change: Any, exact: Any) -> None:
    """R11: an adapter is switched between two forwards, as for a preference loss."""
    exact(lambda: Stack([Scaled() for _ in range(5)]), changed_between_forwards(change))


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_requires_grad_switched_off_before_backward(name: str, exact: Any) -> None:
    """R11: saved tensors would no longer line up."""

    def switch(model: Any, to: bool) -> None:
        for layer in model.layers:
            getattr(layer.linear, name).requires_grad_(to)

    def program(model: Any, inputs: Any, context: Any) -> Any:
        out = changed_before_backward(lambda m: switch(m, False))(model, inputs, context)
        assert not getattr(model.layers[0].linear, name).requires_grad
        switch(model, True)
        return out

    exact(lambda: stack(5, TanhLayer), program)


def test_parameter_replaced_by_another_before_backward(exact: Any) -> None:
    """R11: the one of forward is back for the recompute, and gets the gradient."""

    def program(model: Any, inputs: Any, context: Any) -> Any:
        before = [layer.linear.bias for layer in model.layers]

        def replace(m: Any) -> None:
            for layer in m.layers:
                layer.linear.bias = nn.Parameter(torch.zeros(DIM))

        out = changed_before_backward(replace)(model, inputs, context)
        return out, [bias.grad for bias in before]

    exact(lambda: stack(5, TanhLayer), program)


# ---- R12: what the engine does not know of is found by value, in the first recompute


class Indexed(Layer):
    """Reads something that is neither a tensor nor the module's."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    @checkpointable
    def forward(self, x: Tensor, what: Any) -> Tensor:
        i = what.i if isinstance(what, Opaque) else what()
        return torch.tanh(self.linear(x) * (1 + i))


class Opaque:
    """A context object whose counter the loop moves."""

    def __init__(self) -> None:
        self.i = 0


def _with_context_object(m: Loop, x: Tensor) -> Tensor:
    c = Opaque()
    for c.i, layer in enumerate(m.layers):
        x = layer(x, c)
    return x


def _with_late_binding(m: Loop, x: Tensor) -> Tensor:
    for i, layer in enumerate(m.layers):
        x = layer(x, lambda: i)  # noqa: B023
    return x


_counter = {"i": 0}


def _with_global(m: Loop, x: Tensor) -> Tensor:
    for i, layer in enumerate(m.layers):
        _counter["i"] = i
        x = layer(x, lambda: _counter["i"])
    return x


@pytest.mark.parametrize("loop", [_with_context_object, _with_late_binding, _with_global])
def test_hidden_input_is_found_in_the_first_recompute(loop: Any, loud_by_value: Any) -> None:
    """R12: nothing but a comparison of values can see these."""
    build = lambda: Loop([Indexed() for _ in range(5)], loop)  # noqa: E731
    loud_by_value(ValueMismatch, "layers.", build, changed_before_backward(lambda m: None))


_size = {"n": 5}


class ShapeByGlobal(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    @checkpointable
    def forward(self, x: Tensor) -> Tensor:
        h = functional.interpolate(torch.tanh(self.linear(x))[None], size=_size["n"])
        return torch.sin(h)[0].sum(-1, keepdim=True) * x


def test_shapes_are_compared_under_every_policy(loud: Any, monkeypatch: Any) -> None:
    """R12: also with determinism_check="none", before a kernel is given a tensor of the wrong size."""

    def program(model: Any, inputs: Any, context: Any) -> Any:
        monkeypatch.setitem(_size, "n", 5)
        return changed_before_backward(lambda m: monkeypatch.setitem(_size, "n", 3))(model, inputs, context)

    loud(CheckpointError, "saved a different tensor", lambda: Stack([ShapeByGlobal() for _ in range(3)]), program)


# ---- R13: weights that hooks around forward fill and free


class Sharded(nn.Linear):
    """Its weight is there only around its own forward and backward, by hooks, as a sharding library does it."""

    def __init__(self, how: str) -> None:
        super().__init__(DIM, DIM)
        self.how = how  # what is done to a weight that is not needed: overwritten in place, or its memory given back
        self.shard = self.weight.detach().clone()
        self.register_forward_pre_hook(self._before)
        self.register_forward_hook(self._after)

    def fill(self) -> None:
        if self.how == "given back":
            self.weight.untyped_storage().resize_(self.shard.nbytes)
        self.weight.data.copy_(self.shard)

    def free(self) -> None:
        if self.how == "given back":
            self.weight.untyped_storage().resize_(0)
        else:
            self.weight.data.fill_(7.0)

    @staticmethod
    def _before(module: Any, args: Any) -> None:
        module.fill()
        args[0].register_hook(lambda grad: module.free())

    @staticmethod
    def _after(module: Any, args: Any, out: Tensor) -> None:
        module.free()
        out.register_hook(lambda grad: module.fill())

    @checkpointable
    def forward(self, x: Tensor) -> Tensor:
        meters.tick("sharded")
        return torch.tanh(super().forward(x))


def sharded_step(model: Any, inputs: Any, context: Any) -> Any:
    for layer in model.layers:
        layer.shard.copy_(layer.weight.detach())
        layer.free()
    try:
        with context():
            out = model(*inputs)
        total(out).backward()
    finally:
        for layer in model.layers:
            layer.fill()
    return out


def assert_sharded_is_exact(how: str, n: int) -> None:
    made = policy(segment=n)
    assert_same(
        lambda: Stem(Stack([Sharded(how) for _ in range(6)])),
        lambda model, inputs, context: sharded_step(model.body, (model.stem(*inputs),), context),
        lambda: (batch(),),
        lambda: made,
        steps=5,
    )


MOVES = "the weight lies at another address, and only FSDP's own layers are known to do that"


@pytest.mark.parametrize(
    "how", ["overwritten", pytest.param("given back", marks=pytest.mark.xfail(ENGINE == "ckptdeco", reason=MOVES))]
)
def test_weights_filled_and_freed_by_hooks_are_exact_in_segments_of_one(how: str) -> None:
    """R13."""
    assert_sharded_is_exact(how, 1)


@pytest.mark.parametrize("how", ["overwritten", "given back"])
def test_weights_filled_and_freed_by_hooks_are_exact_or_an_error_in_longer_segments(how: str) -> None:
    """R13: other calls of a walk would see freed weights."""
    try:
        assert_sharded_is_exact(how, 4)
    except CheckpointError as error:
        assert "layers." in str(error)  # noqa: PT017


# ---- R14, R15: `detach()` and the end of a backward are where a chain ends


class Two(nn.Module):
    """Generator and discriminator, or two halves of a network."""

    def __init__(self, make: Any = lambda: Block(p=0.1)) -> None:
        super().__init__()
        self.first, self.second = Stack([make() for _ in range(4)]), Stack([make() for _ in range(4)])
        self.head = nn.Linear(DIM, DIM)


def test_detached_branch_beside_one_that_goes_on(exact: Any) -> None:
    """R14: the second half's walk must not go into the first, whose weights were stepped since."""

    def program(m: Any, inputs: Any, context: Any) -> Any:
        with context():
            x = m.first(*inputs)
            y, z = m.head(x), x.detach()
            z = m.second(z)
        total(y).backward()
        update(m.first)
        total(z).backward()
        return y, z

    exact(Two, program)


def test_discriminator_on_detached_fake_after_the_generators_step(exact: Any) -> None:
    """R14, R15."""

    def program(m: Any, inputs: Any, context: Any) -> Any:
        with context():
            fake = m.first(*inputs)
            total(m.second(fake)).backward()
            update(m.first)
            m.second.zero_grad()
            total(m.second(fake.detach())).backward()
        return fake

    exact(Two, program)


def test_local_loss_and_step_between_layers(exact: Any) -> None:
    """R14: greedy training."""

    def program(m: Any, inputs: Any, context: Any) -> Any:
        (x,) = inputs
        losses = []
        with context():
            for layer in m.layers:
                x = layer(x.detach())
                losses.append(total(m.head(x)))
            for layer, loss in zip(m.layers, losses, strict=True):
                loss.backward()
                update(layer)
        return x

    exact(lambda: Loop([Block(p=0.1) for _ in range(5)], None, head=nn.Linear(DIM, DIM)), program)


class Attends(Layer):
    """Looks at its input and at a memory of the step before."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.value = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    @checkpointable
    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        meters.tick("attends")
        both = torch.cat([memory, x])
        return x + torch.softmax(self.query(x) @ both.T, -1) @ self.value(both)


def with_memories(m: Any, inputs: Any, context: Any) -> Any:
    memories = list(inputs[0])
    outs = []
    with context():
        for x in inputs[1]:
            for i, layer in enumerate(m.layers):
                memory, memories[i] = memories[i], x.detach()
                x = layer(x, memory)
            total(x).backward()
            update(m)
            outs.append(x)
    return outs


def test_memories_of_earlier_steps(exact: Any) -> None:
    """R14, R15: Transformer-XL; a walk into the earlier step would read weights that were stepped."""
    make_inputs = lambda: ([batch(requires_grad=False) for _ in range(5)], [batch() for _ in range(3)])  # noqa: E731
    exact(lambda: Loop([Attends() for _ in range(5)], None), with_memories, make_inputs, steps=3)


@ours
@pytest.mark.parametrize("n", [1, 4])
def test_memories_of_earlier_steps_are_not_recomputed(n: int) -> None:
    """R15: 30 forwards instead of 12 in the example that found it."""
    model = Loop([Attends() for _ in range(4)], None)
    with meters.count_forwards() as counter:
        inputs = [batch(requires_grad=False) for _ in range(4)], [batch() for _ in range(5)]
        with_memories(model, inputs, lambda: policy(segment=n))
    assert counter["attends"] == 2 * 4 * 5


@ours
@pytest.mark.parametrize("n", [1, 4])
def test_table_that_every_layer_returns_keeps_no_call_of_an_earlier_step_alive(n: int) -> None:
    """R15: else 3, 6, 9, … calls are alive after steps 1, 2, 3, …"""
    from ckptdeco.engine.call import Call

    class WithTable(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(DIM, DIM)

        @checkpointable
        def forward(self, x: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
            return torch.tanh(self.linear(x) * table), table

    model, table, alive = Stack([WithTable() for _ in range(3)]), nn.Parameter(torch.rand(DIM)), []
    kept = table * 2  # a graph that all steps share
    gc.collect()
    n_before = sum(isinstance(o, Call) for o in gc.get_objects())
    for _ in range(4):
        x, rope = batch(), kept
        with policy(segment=n):
            for layer in model.layers:
                x, rope = layer(x, rope)
        x.sum().backward(retain_graph=True)
        del x, rope
        alive.append(sum(isinstance(o, Call) for o in gc.get_objects()) - n_before)
    assert alive == [0, 0, 0, 0]


# ---- R16: writes between layers that bump no version (and those that do)


def _data_mul(x: Tensor) -> Tensor:
    x.data.mul_(2)
    return x


def _numpy_alias(x: Tensor) -> Tensor:
    alias = x.detach().numpy()
    alias *= 2
    return x


def _dlpack(x: Tensor) -> Tensor:
    torch.from_dlpack(x.detach()).mul_(2)
    return x


def _storage(x: Tensor) -> Tensor:
    x.untyped_storage().copy_((x.detach() * 2).untyped_storage())
    return x


def _data_replaced(x: Tensor) -> Tensor:
    x.data = x.data * 2
    return x


def _mul(x: Tensor) -> Tensor:
    return x.mul_(3)


def _detached_mul(x: Tensor) -> Tensor:
    x.detach().mul_(2)
    return x


@torch.no_grad()
def _out(x: Tensor) -> Tensor:
    torch.mul(x.detach(), 2, out=x.detach())
    return x


class Sine(Layer):
    """Saves no value of its output, so that plain PyTorch allows the write."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    @checkpointable
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(torch.sin(x)) + x


def _writes(write: Any) -> Any:
    def loop(m: Loop, x: Tensor) -> Tensor:
        for layer in m.layers:
            x = write(layer(x))
        return x

    return lambda: Stem(Loop([Sine() for _ in range(5)], loop))


@pytest.mark.parametrize("write", [_data_mul, _numpy_alias, _dlpack, _storage], ids=lambda f: f.__name__.strip("_"))
def test_write_between_layers_that_leaves_no_trace(write: Any, exact_with_values: Any) -> None:
    """R16: only a comparison of values sees it."""
    exact_with_values(_writes(write))


@pytest.mark.parametrize("write", [_data_replaced, _mul, _detached_mul, _out], ids=lambda f: f.__name__.strip("_"))
def test_write_between_layers_that_can_be_seen(write: Any, exact: Any) -> None:
    """R16, R2: a new version or another address: no longer what the last layer returned."""
    exact(_writes(write))


# ---- R17: what looks like the same tensor and is none


class Complex(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(DIM, DIM, dtype=torch.cfloat) / 4)

    @checkpointable
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight)


def complex_loop(m: Loop, x: Tensor) -> Tensor:
    x = x.cfloat()
    for layer in m.layers:
        x = layer(x).conj()
    return x


def negative_loop(m: Loop, x: Tensor) -> Tensor:
    for layer in m.layers:
        x = torch._neg_view(layer(x))
    return x


class Twice(Tensor):
    """A subclass over the same storage for which `+` means something else."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_function__(func, types, args, kwargs or {})
        return out * 2 if func is Tensor.sin else out


def subclass_loop(m: Loop, x: Tensor) -> Tensor:
    for i, layer in enumerate(m.layers):
        h = layer(x)
        x = h.as_subclass(Twice) if i % 2 else h.as_subclass(Tensor)
    return x.as_subclass(Tensor)


def sparse_loop(m: Loop, x: Tensor) -> Tensor:
    for layer in m.layers:
        x = layer(x.to_sparse())
    return x


class SparseIn(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(DIM, DIM))

    @checkpointable
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(torch.sparse.mm(x, self.weight))


class SparseOut(Layer):
    """Returns a sparse tensor, which has no storage of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(DIM, DIM))

    @checkpointable
    def forward(self, x: Tensor) -> Tensor:
        dense = x.to_dense() if x.is_sparse else x
        return torch.tanh(dense @ self.weight).to_sparse()


def sparse_out_loop(m: Loop, x: Tensor) -> Tensor:
    for layer in m.layers:
        x = layer(x)
    return x.to_dense()


LOOKALIKES = {
    "conj": (Complex, complex_loop),
    "neg": (TanhLayer, negative_loop),
    "subclass": (Sine, subclass_loop),
    "sparse in": (SparseIn, sparse_loop),
    "sparse out": (SparseOut, sparse_out_loop),
}


@pytest.mark.parametrize("kind", LOOKALIKES)
def test_tensor_that_shares_storage_geometry_and_version(kind: str, exact: Any) -> None:
    """R17, R2."""
    make, loop = LOOKALIKES[kind]
    exact(lambda: Stem(Loop([make() for _ in range(5)], loop)))


def test_inference_tensors_among_the_arguments(exact: Any) -> None:
    """R17: asking for their version raises, and so does saving them; `x + bias` is legal in plain."""

    class AddsTwo(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(DIM, DIM)

        @checkpointable
        def forward(self, x: Tensor, *, bias: Tensor) -> Tensor:
            return torch.tanh(self.linear(x + bias))

    def loop(m: Loop, x: Tensor) -> Tensor:
        with torch.inference_mode():
            bias = torch.arange(DIM).float() / DIM
        for layer in m.layers:
            x = layer(x, bias=bias)
        return x

    exact(lambda: Stem(Loop([AddsTwo() for _ in range(5)], loop)))


# ---- R18: calls that are run again only for their outputs are run as in forward


class Encoder(nn.TransformerEncoderLayer):
    @checkpointable
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class SelfAttention(nn.MultiheadAttention):
    @checkpointable
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x, x, x, need_weights=False)[0]


class Recurrent(nn.LSTM):
    @checkpointable
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)[0]


class AsksGrad(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    @checkpointable
    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        return torch.tanh(h) if torch.is_grad_enabled() and x.requires_grad and h.requires_grad else torch.sin(h)


MODE_DEPENDENT = {
    "encoder": lambda: Encoder(DIM, 2, 16, dropout=0.1, batch_first=True),
    "attention": lambda: SelfAttention(DIM, 2, dropout=0.1, batch_first=True),
    "lstm": lambda: Recurrent(DIM, DIM, batch_first=True),
    "asks": AsksGrad,
}
LEVELS = (spec(segment=5, levels=2), spec(segment=5, levels="log"), spec(segment=5, determinism_check="none"))


@pytest.mark.parametrize("is_training", [False, True])
@pytest.mark.parametrize("kind", MODE_DEPENDENT)
@pytest.mark.parametrize("levels", LEVELS, ids=str)
def test_layers_that_choose_another_kernel_without_grad(levels: Any, kind: str, is_training: bool) -> None:
    """R18: under no_grad these give other bits (fast paths), so the input of the next layer would be another."""
    made = levels.make()
    assert_same(
        lambda: Stack([MODE_DEPENDENT[kind]() for _ in range(5)]).train(is_training),
        forward_backward,
        lambda: (torch.randn(2, 4, DIM).requires_grad_(),),
        lambda: made,
    )
