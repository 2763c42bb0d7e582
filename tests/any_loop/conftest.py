"""Every program of this folder runs under every policy of `support.subject.POLICIES`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.support.subject import POLICIES, PolicySpec


@pytest.fixture(params=POLICIES, ids=str)
def under(request: pytest.FixtureRequest) -> Callable[[], Any]:
    """The folder's policies, one after the other."""
    spec: PolicySpec = request.param
    return spec.under()
