"""Code that is legal without a policy stays legal, and is not run more often than needed (R30–R35)."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from tests.support import meters
from tests.support.layers import DIM, Block, InPlaceOnInputLayer, Layer, Loop, Stack, Stem, TanhLayer, batch, stack
from tests.support.oracle import assert_same, forward_backward, total
from tests.support.subject import ENGINE, checkpointable, policy

ours = pytest.mark.skipif(ENGINE != "ckptdeco", reason="asks for what ckptdeco promises")
if ENGINE == "ckptdeco":
    import ckptdeco

# ---- R30: in place on its own input


class ReluFirst(Layer):
    def __init__(self, *, views: bool = False) -> None:
        super().__init__()
        self.linear, self.views = nn.Linear(DIM, DIM), views

    @checkpointable
    def forward(self, x: Tensor) -> Tensor:
        h = x.view(-1) if self.views else x
        h.relu_()
        return self.linear(x) * x + 1


def _skips_over(m: Loop, x: Tensor) -> Tensor:
    """What the layer changes is seen by another consumer, as in plain."""
    seen = []
    for layer in m.layers:
        y = layer(x)
        seen.append(x * 0.5)  # x as the layer left it
        x = y
    return x + sum(seen)


def _clones(m: Loop, x: Tensor) -> Tensor:
    for layer in m.layers:
        x = x + layer(x.clone())
    return x


def _views(m: Loop, x: Tensor) -> Tensor:
    for layer in m.layers:
        x = layer(x.view_as(x))
    return x


def _simply(m: Loop, x: Tensor) -> Tensor:
    for layer in m.layers:
        x = layer(x)
    return x


@pytest.mark.parametrize("make", [ReluFirst, lambda: ReluFirst(views=True), InPlaceOnInputLayer])
@pytest.mark.parametrize("loop", [_simply, _skips_over, _clones, _views])
def test_layer_that_works_in_place_on_its_input(loop: Any, make: Any, exact: Any) -> None:
    """R30: a leaf that requires grad would refuse the write."""
    exact(lambda: Stem(Loop([make() for _ in range(5)], loop)))


# ---- R31: read again


class ReadsFourTimes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x, x.exp())
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        held = ctx.saved_tensors if Reads.holds else ()
        parts = [ctx.saved_tensors[i % 2] for i in range(4)]
        assert torch.equal(parts[0], parts[2])
        del held
        return grad * parts[0].cos() + parts[3] * 0


class Reads(Layer):
    holds = True  # what it read first

    def __init__(self, label: str = "reads") -> None:
        super().__init__(label)
        self.linear = nn.Linear(DIM, DIM)

    @checkpointable
    def forward(self, x: Tensor) -> Tensor:
        meters.tick(self.label)
        return ReadsFourTimes.apply(self.linear(x))


def test_function_that_reads_its_saved_tensors_four_times(exact: Any) -> None:
    """R31."""
    exact(lambda: Stem(Stack([Reads() for _ in range(4)])))


@ours
@pytest.mark.parametrize(("n", "holds", "n_forwards"), [(1, True, 8), (4, True, 8), (1, False, 12), (4, False, 18)])
def test_reading_again_recomputes_nothing(n: int, holds: bool, n_forwards: int, monkeypatch: Any) -> None:
    """R31: 34 forwards for 4 layers in the example that found it. What nobody holds any more is made once more."""
    monkeypatch.setattr(Reads, "holds", holds)
    model = Stem(Stack([Reads() for _ in range(4)]))
    for _ in range(3):
        with meters.count_forwards() as counter:
            with policy(segment=n):
                loss = model(batch()).sum()
            loss.backward()
        assert counter["reads"] == n_forwards


# ---- R32: where hooks cannot work


def _forward_over_reverse(model: Any, x: Tensor) -> Any:
    with forward_ad.dual_level():
        out = model(forward_ad.make_dual(x, torch.ones_like(x)))
        (grad,) = torch.autograd.grad(total(out), x, create_graph=True)
        return forward_ad.unpack_dual(grad)


def _func_grad(model: Any, x: Tensor) -> Any:
    parameters = dict(model.named_parameters())
    return torch.func.grad(lambda p: total(torch.func.functional_call(model, p, (x,))))(parameters)


def _func_vjp_and_jvp(model: Any, x: Tensor) -> Any:
    _, vjp = torch.func.vjp(model, x)
    return vjp(torch.ones(4, DIM)), torch.func.jvp(model, (x,), (torch.ones_like(x),))


def _per_sample(model: Any, x: Tensor) -> Any:
    parameters = {k: p.detach() for k, p in model.named_parameters()}
    grad = torch.func.grad(lambda p, row: total(torch.func.functional_call(model, p, (row[None],))))
    return torch.func.vmap(grad, in_dims=(None, 0), randomness="different")(parameters, x)


def _hooks_disabled(model: Any, x: Tensor) -> Any:
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        out = model(x)
    total(out).backward()
    return out


def _traced(model: Any, x: Tensor) -> Any:
    traced = torch.jit.trace(model, x, check_trace=False)
    total(traced(x)).backward()
    return traced(x)


def _in_torch_checkpoint(model: Any, x: Tensor) -> Any:
    out = checkpoint(model, x, use_reentrant=False)
    total(out).backward()
    return out


def _double_backward(model: Any, x: Tensor) -> Any:
    out = model(x)
    (grad,) = torch.autograd.grad(total(out), x, create_graph=True)
    total(grad).backward()
    return out, grad


PLACES = [
    _forward_over_reverse, _func_grad, _func_vjp_and_jvp, _per_sample, _hooks_disabled, _traced, _in_torch_checkpoint,
    _double_backward,
]  # fmt: skip


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("place", PLACES, ids=lambda f: f.__name__.strip("_"))
def test_where_saved_tensor_hooks_do_not_work_calls_are_plain(place: Any, exact: Any) -> None:
    """R32: a TypeError from within torch, or NotImplementedError, in the example that found it."""

    def program(model: Any, inputs: Any, context: Any) -> Any:
        with context():
            return place(model, *inputs)

    exact(lambda: Stem(stack(4, TanhLayer)), program, steps=2)


@ours
def test_policy_works_again_behind_such_a_place() -> None:
    """R32: it is the place, not the layer, that is plain."""
    model, x = stack(4, TanhLayer), batch()
    with policy(segment=2):
        _func_grad(model, x)
        with meters.count_forwards() as counter:
            total(model(x)).backward()
    assert set(counter.values()) == {2}


# ---- R33: x += layer(x)


class Adds(Layer):
    """Its first operation does not save its input."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(DIM))

    @checkpointable
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x + self.bias)


def _adds_in_place(m: Loop, x: Tensor) -> Tensor:
    for layer in m.layers:
        x += layer(x)
    return x


def test_residual_in_place(exact: Any) -> None:
    """R33: legal in plain, and exact here, from the first step on."""
    exact(lambda: Stem(Loop([Adds() for _ in range(5)], _adds_in_place)))


@ours
@pytest.mark.parametrize("n", [1, 4])
def test_residual_in_place_is_told_by_explain(n: int) -> None:
    """R33: it costs a copy for each layer."""
    model, made = Stem(Loop([Adds() for _ in range(5)], _adds_in_place)), policy(segment=n)
    for _ in range(3):  # the first two calls are watched
        with made:
            loss = total(model(batch()))
        loss.backward()
    assert sum("is changed after the call: a copy is kept" in call.why for call in ckptdeco.explain().calls) == 5


@ours
@pytest.mark.parametrize("n", [1, 4])
def test_residual_in_place_that_begins_late_is_named_for_what_it_is(n: int) -> None:
    """R33: the error says what to write instead."""
    model, made = Stem(Loop([Adds() for _ in range(5)], _simply)), policy(segment=n)
    for step in range(3):
        model.body.loop = _simply if step < 2 else _adds_in_place
        with made:
            loss = total(model(batch()))
        if step < 2:
            loss.backward()
    with pytest.raises(ckptdeco.errors.InputModifiedError, match=r"input x of body.layers.\d") as caught:
        loss.backward()
    assert "x = x + layer(x)" in caught.value.fix


class TakesSide(Layer):
    """Adds a side input, of which autograd saves nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    @checkpointable
    def forward(self, x: Tensor, side: Tensor) -> Tensor:
        return torch.tanh(self.linear(x) + side)


@pytest.mark.parametrize("has_graph", [False, True])
def test_side_input_whose_data_is_replaced_between_layers(has_graph: bool, exact: Any) -> None:
    """R29, R16: the very same object, at the same version, with other values."""

    def loop(m: Loop, x: Tensor) -> Tensor:
        side = m.scale(x) if has_graph else torch.ones(4, DIM)
        for layer in m.layers:
            x = layer(x, side)
            side.data = side.data * 2 + 1  # the third may lie where the first did
        return x

    exact(lambda: Stem(Loop([TakesSide() for _ in range(5)], loop, scale=nn.Linear(DIM, DIM))))


def test_side_input_whose_data_is_replaced_by_other_data_at_the_same_address(exact: Any) -> None:
    """R29, R16: it is the storage, not where it lies, that tells whether a tensor is kept already."""

    def loop(m: Loop, x: Tensor) -> Tensor:
        side, memory = m.scale(x), numpy.ones((4, DIM), dtype=numpy.float32)
        for layer in m.layers:
            side.data = torch.from_numpy(memory)
            x = layer(x, side)
            memory *= 2
        return x

    exact(lambda: Stem(Loop([TakesSide() for _ in range(5)], loop, scale=nn.Linear(DIM, DIM))), steps=1)


# ---- R34: the policy follows the context


def counted(run: Callable[[], object]) -> int:
    """Forwards of one step of four layers: 4 plain, 8 under a policy."""
    with meters.count_forwards() as counter:
        run()
    return sum(counter.values())


def in_thread(run: Callable[[], Any]) -> Any:
    got: list[Any] = []
    thread = threading.Thread(target=lambda: got.append(run()))
    thread.start()
    thread.join()
    return got[0]


@ours
def test_thread_has_the_policy_only_by_inheritance() -> None:
    """R34: a copied context, or the policy as a decorator; without, the call is plain and right."""
    model, made = stack(4, TanhLayer), policy(segment=2)

    def step() -> None:
        total(model(batch())).backward()

    with made:
        assert counted(step) == 8
        assert counted(lambda: in_thread(step)) == 4
        assert counted(lambda: in_thread(lambda: contextvars.copy_context().run(step))) == 4  # that thread's own
        context = contextvars.copy_context()
        assert counted(lambda: in_thread(lambda: context.run(step))) == 8
    assert counted(lambda: in_thread(made(step))) == 8
    assert counted(step) == 4


@ours
def test_interleaved_generators_leave_no_policy_behind() -> None:
    """R34: leaving a block marks its entry dead, in whichever order they end."""
    model = stack(4, TanhLayer)

    def step() -> None:
        total(model(batch())).backward()

    def generator() -> Any:
        with policy(segment=2):
            yield
            yield

    one, two = generator(), generator()
    next(one), next(two), next(one), next(two)
    one.close()
    assert counted(step) == 8  # the other one's
    two.close()
    assert counted(step) == 4
    del one, two


# ---- R35: threads and inner backwards


def test_one_graph_from_several_threads(exact: Any) -> None:
    """R35: who finds no value recomputes for itself; no value is taken twice."""

    def program(model: Any, inputs: Any, context: Any) -> Any:
        with context():
            out = model(*inputs)
            loss = total(out)
        parameters, got, failures = list(model.parameters()), {}, []

        def gradients(i: int) -> None:
            try:
                got[i] = torch.autograd.grad(loss, parameters, retain_graph=True)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=gradients, args=(i,)) for i in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures, failures
        return out, [got[i] for i in range(3)]

    exact(lambda: Stem(stack(6, lambda *a, **k: Block(p=0.2))), program, steps=2)


class LearnsInside(Layer):
    """Its forward runs a whole step of a decorated model of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.inner = nn.Linear(DIM, DIM), stack(3, TanhLayer)

    @checkpointable
    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad(), policy(segment=2):
            seed = x.detach().requires_grad_()
            (inner,) = torch.autograd.grad(total(self.inner(seed)), seed)
        return torch.tanh(self.linear(x) + inner)


def test_recompute_inside_a_recompute(exact: Any) -> None:
    """R35: a lock that user code could meet again would be a deadlock."""
    exact(lambda: Stem(Stack([LearnsInside() for _ in range(3)])), steps=2)


_waited_for: dict[str, Callable[[], object]] = {}


class WaitsForThread(Layer):
    """Its recompute waits for another thread's backward, which recomputes, too."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    @checkpointable
    def forward(self, x: Tensor) -> Tensor:
        if ckptdeco.is_recomputing():
            _waited_for["thread"]()
        return torch.tanh(self.linear(x))


@ours
def test_recompute_that_waits_for_another_threads_recompute_is_an_error(monkeypatch: Any) -> None:
    """R35: recomputes of CPU tensors take turns; a turn that does not come is no deadlock."""
    from ckptdeco.engine import exclusive

    monkeypatch.setattr(exclusive, "_PATIENCE_S", 0.05)
    layer, errors = WaitsForThread(), []
    with policy(segment=1):
        loss, loss_of_other = total(layer(batch())), total(TanhLayer()(batch()))

    def backward_of_other() -> None:
        try:
            loss_of_other.backward(retain_graph=True)
        except ckptdeco.CheckpointError as error:
            errors.append(error)

    monkeypatch.setitem(_waited_for, "thread", lambda: in_thread(backward_of_other))
    loss.backward()
    assert len(errors) == 1
    assert "another thread" in str(errors[0])
    in_thread(backward_of_other)  # and now its turn comes
    assert len(errors) == 1


@ours
def test_recompute_on_a_device_takes_no_turn(monkeypatch: Any) -> None:
    """R35: autograd has a thread for each device, and one may wait for another inside a recompute."""
    from ckptdeco.engine import call, recompute

    held: list[str] = []
    original = recompute.one_at_a_time

    def listen(label: str, *args: Any) -> Any:
        held.append(label)
        return original(label, *args)

    monkeypatch.setattr(recompute, "one_at_a_time", listen)
    with policy(segment=1):
        loss = total(TanhLayer()(batch()))
    loss.backward()
    assert len(held) == 1

    class OnDevice(call.Call):
        """A call whose tensors are said to be on a device once its forward is over."""

        devices = property(  # type: ignore[assignment]
            lambda self: (torch.device("cpu"),) if is_backward else (), lambda self, value: None
        )

    is_backward = False
    monkeypatch.setattr(call, "Call", OnDevice)
    with policy(segment=1):
        loss = total(TanhLayer()(batch()))
    is_backward = True
    loss.backward()
    assert len(held) == 1


@ours
def test_plain_forward_backward_under_the_policies_of_this_folder(under: Any) -> None:
    """R34: a policy entered again for each step is the same policy."""
    assert_same(lambda: Stem(stack(5)), forward_backward, lambda: (batch(),), under)
