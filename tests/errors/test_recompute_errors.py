"""What a recompute that differs says: the layer, where it is, which tensor, forward and recompute, one fix."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

from tests.support.layers import DIM, Layer, Loop, Stack, Stem, batch
from tests.support.subject import ENGINE, checkpointable, policy

pytestmark = pytest.mark.skipif(ENGINE != "ckptdeco", reason="golden texts of ckptdeco")


class Flaky(Layer):
    """Depends on a global, which tests change between forward and backward."""

    mode = "plain"

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    @checkpointable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.linear(x)
        if Flaky.mode == "shape":
            return torch.tanh(torch.cat([h, h])).sum(0)
        if Flaky.mode == "count":
            return torch.sum(h, 0, keepdim=True).expand_as(h)
        if Flaky.mode == "dtype":
            return torch.tanh(h.double()).float()
        if Flaky.mode == "values":
            return torch.tanh(h * 1.0 + 1.0)
        if Flaky.mode == "random":
            return torch.tanh(h + torch.rand_like(h))
        return torch.tanh(h + 0.0)


@pytest.fixture(autouse=True)
def _plain_mode() -> Any:
    Flaky.mode = "plain"
    yield
    Flaky.mode = "plain"


def line_of(layer: type[Layer]) -> int:
    """First line of the layer's forward, the decorator's or that of `def`."""
    return inspect.getsourcelines(inspect.unwrap(layer.forward))[1]


def error_of(mode: str, n_layers: int = 3, **options: Any) -> BaseException:
    model = Stem(Stack([Flaky() for _ in range(n_layers)]))
    with policy(segment=1, **options):
        loss = model(batch()).square().sum()
    Flaky.mode = mode
    with pytest.raises(torch.utils.checkpoint.CheckpointError) as caught:
        loss.backward()
    return caught.value


def assert_names_the_layer(text: str) -> None:
    match = re.search(r"body\.layers\.2 \(Flaky\.forward, test_recompute_errors\.py:(\d+)\)", text)
    assert match, text
    assert int(match[1]) - line_of(Flaky) in (0, 1), text
    assert len(re.findall("Fix:", text)) == 1, text


def test_another_shape() -> None:
    from ckptdeco.errors import SavedTensorMismatch, TensorMeta

    error = error_of("shape")
    assert isinstance(error, SavedTensorMismatch)
    text = str(error)
    assert_names_the_layer(text)
    lines = text.splitlines()
    assert re.fullmatch(r"recomputing .*\) saved a different tensor \d+ than forward did", lines[0]), text
    assert lines[1] == "  forward:   float32[4, 8] on cpu"
    assert lines[2] == "  recompute: float32[8, 8] on cpu"
    assert "  Fix: make the layer depend only on its arguments" in text
    assert error.forward == TensorMeta((4, 8), torch.float32, torch.device("cpu"))
    assert error.recompute == TensorMeta((8, 8), torch.float32, torch.device("cpu"))
    assert "body.layers.2" in error.layer


def test_another_dtype() -> None:
    text = str(error_of("dtype"))
    assert_names_the_layer(text)
    assert "forward:   float32[4, 8] on cpu" in text
    assert "recompute: float64[4, 8] on cpu" in text


def test_another_number_of_tensors() -> None:
    from ckptdeco.errors import SavedTensorMismatch

    error = error_of("count")
    assert isinstance(error, SavedTensorMismatch)
    text = str(error)
    assert_names_the_layer(text)
    assert re.search(r"forward:   (\d+ tensors|float32.*)", text), text
    assert re.search(r"recompute: (\d+ tensors|nothing)", text), text


def test_more_tensors_are_an_error_without_early_stop() -> None:
    model = Stem(Stack([Flaky() for _ in range(3)]))
    Flaky.mode = "count"
    with policy(segment=1, early_stop=False):
        loss = model(batch()).square().sum()
    Flaky.mode = "plain"
    with pytest.raises(torch.utils.checkpoint.CheckpointError, match=r"another number of tensors|different tensor"):
        loss.backward()


def test_other_values_in_the_first_recompute() -> None:
    from ckptdeco.errors import ValueMismatch

    error = error_of("values")
    assert isinstance(error, ValueMismatch)
    assert_names_the_layer(str(error))
    assert re.search(r"gave other values than forward did: saved tensor \d+ \(float32\[4, 8\] on cpu\)", str(error))


def test_random_numbers_only_in_the_recompute() -> None:
    error = error_of("random", determinism_check="none")
    assert_names_the_layer(str(error))
    assert "random numbers" in str(error)


def test_shape_is_checked_even_with_none() -> None:
    """R12: "none" may drop the message, not the check."""
    error_of("shape", determinism_check="none")


def test_values_check_finds_a_later_difference() -> None:
    model, x = Stem(Stack([Flaky() for _ in range(3)])), batch()
    made = policy(segment=1, determinism_check="values")
    for _ in range(4):
        with made:
            model(x).sum().backward()
    with made:
        loss = model(x).sum()
    Flaky.mode = "values"
    with pytest.raises(torch.utils.checkpoint.CheckpointError, match="other values"):
        loss.backward()


def test_segment_of_several_names_the_layer_that_differs() -> None:
    """The second of three layers differs: not the first and not the one that asked."""

    class Steady(Flaky):
        @checkpointable
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.linear(x))

    class OneFlaky(Flaky):
        @checkpointable
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.linear(x)
            if Flaky.mode == "shape":
                return torch.tanh(h.sum(0, keepdim=True)).expand_as(h)
            return torch.tanh(h)

    model = Stem(Stack([Steady(), OneFlaky(), Steady()]))
    with policy(segment=3):
        loss = model(batch()).sum()
    Flaky.mode = "shape"
    with pytest.raises(torch.utils.checkpoint.CheckpointError, match=r"recomputing body\.layers\.1 "):
        loss.backward()


class Adds(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(DIM))

    @checkpointable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x + self.bias)


@pytest.mark.filterwarnings("ignore")
def test_kept_input_changed_in_place() -> None:
    from ckptdeco.errors import InputModifiedError

    model = Stack([Adds(), Adds(), Adds()])
    x = batch(requires_grad=False) * 1
    with policy(segment=3):
        loss = model(x).sum()
    x.add_(1)
    with pytest.raises(InputModifiedError) as caught:
        loss.backward()
    text = str(caught.value)
    assert "modified by an inplace operation" in text
    assert re.search(r"input x of layers\.0 \(Adds\.forward, test_recompute_errors\.py:\d+\)", text), text
    assert text.count("Fix:") == 1
    assert isinstance(caught.value, RuntimeError)


def test_keyword_input_changed_in_place_is_named() -> None:
    from ckptdeco.errors import InputModifiedError

    @checkpointable
    def layer(x: torch.Tensor, *, mask: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x + mask)

    x, mask = batch(), batch(requires_grad=False)
    with policy(segment=1):
        loss = layer(x, mask=mask).sum()
    mask.zero_()
    with pytest.raises(InputModifiedError, match="mask"):
        loss.backward()


def test_saved_tensor_changed_in_place_inside_the_layer() -> None:
    """R21: plain torch refuses; the recompute must not turn that into a number."""

    class Bad(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(DIM, DIM)

        @checkpointable
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.tanh(self.linear(x))
            y.mul_(2)
            return y.sin()

    model = Stack([Bad(), Bad()])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model(batch()).sum().backward()
    for options in ({"segment": 1}, {"segment": 2}, {"segment": 2, "levels": 2}, {"every": 2}):
        for _ in range(2):
            with pytest.raises(RuntimeError, match="modified by an inplace operation") as caught:  # noqa: SIM117
                with policy(**options):
                    model(batch()).sum().backward()
            if "every" not in options:
                assert "Bad.forward" in str(caught.value), str(caught.value)


def test_parameter_changed_before_backward_is_named() -> None:
    from ckptdeco.errors import ParameterModifiedError

    model = Stem(Stack([Adds(), Adds()]))
    with policy(segment=2):
        loss = model(batch()).sum()
    with torch.no_grad():
        model.body.layers[0].bias.add_(1)
    with pytest.raises(ParameterModifiedError, match=r"bias.* of body\.layers\.0 \(Adds\.forward"):
        loss.backward()


def test_parameter_data_replaced_before_backward_is_named() -> None:
    from ckptdeco.errors import ParameterModifiedError

    model = Stem(Stack([Flaky(), Flaky()]))
    with policy(segment=2):
        loss = model(batch()).sum()
    weight = model.body.layers[0].linear.weight
    weight.data = weight.data * 0.5
    with pytest.raises(ParameterModifiedError, match=r"linear\.weight.* of body\.layers\.0"):
        loss.backward()


def test_layer_in_no_model_is_named_by_class_and_line() -> None:
    layer = Flaky()
    with policy(segment=1):
        loss = layer(batch()).sum()
    Flaky.mode = "shape"
    with pytest.raises(torch.utils.checkpoint.CheckpointError, match=r"Flaky\.forward, test_recompute_errors\.py:\d+"):
        loss.backward()


def test_debug_shows_the_first_operation_that_differs() -> None:
    text = str(error_of("shape", debug=True))
    assert "cat" in text, text


def test_error_in_recompute_leaves_the_next_step_right() -> None:
    model, x = Stem(Stack([Flaky() for _ in range(3)])), batch()
    expected = torch.autograd.grad(model(x).sum(), x)[0]
    made = policy(segment=2)
    with made:
        loss = model(x).sum()
    Flaky.mode = "shape"
    with pytest.raises(torch.utils.checkpoint.CheckpointError):
        loss.backward()
    Flaky.mode = "plain"
    with made:
        loss = model(x).sum()
    assert torch.equal(torch.autograd.grad(loss, x)[0], expected)


def test_loop_class_used_by_the_tests_names_its_layers() -> None:
    model = Loop([Flaky()], lambda m, x: m.layers[0](x))
    with policy(segment=1):
        loss = model(batch()).sum()
    Flaky.mode = "shape"
    with pytest.raises(torch.utils.checkpoint.CheckpointError, match=r"layers\.0 \(Flaky"):
        loss.backward()


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacrev])
def test_transform_that_wants_no_hooks_is_refused_at_the_first_forward(transform: Any) -> None:
    from ckptdeco.errors import UncheckpointableError

    class Force(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(DIM, DIM)

        @checkpointable
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) + transform(lambda y: self.linear(y).tanh().sum())(x).sum()

    model = Stack([Force(), Force()])
    with policy(segment=1), pytest.raises(UncheckpointableError) as caught:
        model(batch())
    text = str(caught.value)
    assert re.match(
        r"layers\.0 \(.*Force\.forward, test_recompute_errors\.py:\d+\) switches saved-tensor hooks off", text
    ), text
    assert "skip=" in text
    with policy(segment=1, skip=Force):
        assert Stack([Force(), Adds()])(batch()).requires_grad
