"""What runs on a thread is that thread's alone."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ckptdeco
from ckptdeco.engine.running import Frame, is_recomputing, running


def on_another_thread(action: Any) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(action()))
    thread.start()
    thread.join()
    return found[0]


def test_nothing_runs_at_first() -> None:
    assert running.frame is None
    assert not is_recomputing()


def test_frames_are_numbered_apart() -> None:
    assert Frame([], again=False).number != Frame([], again=False).number


@pytest.mark.parametrize("attribute", ["frame", "recomputing"])
def test_other_threads_do_not_see_it(monkeypatch: pytest.MonkeyPatch, attribute: str) -> None:
    monkeypatch.setattr(running, attribute, "mine")
    assert on_another_thread(lambda: getattr(running, attribute)) in (None, False)


class Asking(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 3)
        self.seen: list[bool] = []

    @ckptdeco.checkpointable
    def forward(self, x: Tensor) -> Tensor:
        seen.append(is_recomputing())
        return torch.tanh(super().forward(x))


seen: list[bool] = []


def test_is_true_in_the_recompute_only() -> None:
    seen.clear()
    layer = Asking()
    with ckptdeco.policy(segment=1):
        layer(torch.randn(2, 3)).sum().backward()
    assert seen == [False, True]
    assert not is_recomputing()


def test_is_true_in_a_recompute_on_another_thread() -> None:
    seen.clear()
    layer = Asking()
    with ckptdeco.policy(segment=1):
        loss = layer(torch.randn(2, 3)).sum()
    assert on_another_thread(lambda: (loss.backward(), is_recomputing()))[1] is False
    assert seen == [False, True]
    assert not is_recomputing()


def test_is_false_on_a_thread_beside_a_recompute() -> None:
    beside: list[bool] = []

    @ckptdeco.checkpointable
    def layer(x: Tensor) -> Tensor:
        beside.append(on_another_thread(is_recomputing))
        return x.exp().sin()

    with ckptdeco.policy(segment=1):
        layer(torch.randn(3, requires_grad=True)).sum().backward()
    assert beside == [False, False]


def test_is_false_again_after_a_recompute_that_failed() -> None:
    @ckptdeco.checkpointable
    def layer(x: Tensor) -> Tensor:
        if is_recomputing():
            raise KeyError("of the user")
        return x.exp().sin()

    with ckptdeco.policy(segment=1):
        loss = layer(torch.randn(3, requires_grad=True)).sum()
    with pytest.raises(KeyError):
        loss.backward()
    assert not is_recomputing()
    assert running.frame is None
