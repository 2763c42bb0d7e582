"""An exception at any one point of a step: state, streams and switches are those of plain torch, and a retry is exact.

By default a few points of each case; `CKPTDECO_FAULTS=all` (`nox -s faults`) raises at every point.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ckptdeco import policy
from ckptdeco.engine import call, rng
from ckptdeco.engine.torch_private import has_saved_tensor_hooks
from tests.support.fragile import CASES, Case
from tests.support.subject import PolicySpec, spec
from tests.support.sweep import KINDS, Reference, Setting, complaints, count

IS_FULL = os.environ.get("CKPTDECO_FAULTS") == "all"
POLICIES = (
    spec(segment=2),
    spec(segment=1),
    spec(segment=3, early_stop=False),
    spec(segment=4, levels=2),
    spec(levels="log"),
    spec(every=2),
    spec(segment=2, nested=True),
    spec(segment=2, debug=True),
    spec(segment=2, determinism_check="values"),
)
SETTINGS = [
    pytest.param(case, policy, warm, id=f"{case}-{policy}-after_{warm}")
    for i, case in enumerate(CASES)
    for j, policy in enumerate(POLICIES)
    for warm in (0, 2)
    if IS_FULL or (i % len(POLICIES) == j and warm == 2 * (i % 2 == 0))
]
N_POINTS = {"user": 6, "operator": 5, "line": 5, "call": 3}


@pytest.fixture(scope="module", autouse=True)
def _no_collector() -> Iterator[None]:
    """What is freed here is freed by counting references."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize(("case", "made", "warm"), SETTINGS)
def test_a_fault_leaves_what_plain_torch_leaves_and_a_retry_is_exact(case: Case, made: PolicySpec, warm: int) -> None:
    setting = Setting(case, made.make(), warm)
    reference = Reference(setting)
    found = []
    for kind in KINDS:
        places = count(setting, kind)
        step = 1 if IS_FULL else max(1, len(places) // N_POINTS[kind])
        for at in range(len(places) // 3 % step, len(places), step):
            found += [f"{kind} {at}, {places[at]}: {text}" for text in complaints(setting, reference, kind, at)]
    gc.collect()
    assert not found, f"{setting}\n" + "\n".join(found[:20])


def test_the_sweep_sees_a_stream_that_is_not_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    case = next(case for case in CASES if case.name == "draws")
    setting = Setting(case, policy(segment=2), 0)
    reference = Reference(setting)
    monkeypatch.setattr(rng, "restore", lambda states: None)
    last = len(count(setting, "user")) - 1
    assert any("torch stream" in text for text in complaints(setting, reference, "user", last))


def test_the_sweep_sees_what_an_interrupted_finally_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """If what leaves the hooks stopped working, there would be a complaint."""
    case = CASES[0]
    setting = Setting(case, policy(segment=2), 0)
    reference = Reference(setting)
    monkeypatch.setattr(call, "pop_hooks", lambda pack: None)
    try:
        assert any("saved-tensor hooks" in text for text in complaints(setting, reference, "user", 1))
    finally:
        while has_saved_tensor_hooks():
            torch._C._autograd._pop_saved_tensors_default_hooks()


def test_points_are_counted_where_they_are_passed() -> None:
    setting = Setting(CASES[0], policy(segment=1), 0)
    places: dict[str, Any] = {kind: count(setting, kind) for kind in KINDS}
    assert [place.split()[-1] for place in places["user"]].count("recompute") == 3
    assert any("engine/rerun.py" in place for place in places["line"])
    assert any("c_return" in place for place in places["call"])
    assert any("addmm" in place for place in places["operator"])
