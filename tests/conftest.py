"""Settings of all tests: one thread, seeded, collected, and no policy may outlive its test."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import gc
import random

import hypothesis
import numpy
import pytest
import torch
import torch._dynamo


def active_policy() -> Any:
    """The policy entry that is active in this context, None when there is none."""
    context = sys.modules.get("ckptdeco.context")
    return None if context is None else context.active()


torch.set_num_threads(1)

_QUIET = [hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.function_scoped_fixture]
hypothesis.settings.register_profile(
    "ci", max_examples=60, derandomize=True, deadline=None, suppress_health_check=_QUIET, print_blob=False
)
hypothesis.settings.register_profile("long", max_examples=3000, deadline=None, suppress_health_check=_QUIET)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.fixture(scope="session", autouse=True)
def _frozen_garbage() -> Iterator[None]:
    gc.collect()
    gc.freeze()  # torch's own objects: so that the collection after each test is cheap
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _hygiene() -> Iterator[None]:
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)
    was_enabled, dtype, grad = gc.isenabled(), torch.get_default_dtype(), torch.is_grad_enabled()
    yield
    assert torch.is_grad_enabled() == grad, "the test left grad mode changed"
    assert torch.get_default_dtype() == dtype, "the test left the default dtype changed"
    if was_enabled:
        gc.enable()
    gc.collect()


@pytest.fixture(autouse=True)
def _no_policy_left() -> Iterator[None]:
    assert active_policy() is None, "a policy was active before the test"
    yield
    left = active_policy()
    if left is not None:
        while (entry := active_policy()) is not None:  # so that the next tests do not fail as well
            sys.modules["ckptdeco.context"].pop(entry.policy)
        pytest.fail(f"the test left a policy active: {left!r}")
