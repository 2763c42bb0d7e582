"""What the tests of the drop-in share: each is run at a layer's checked and unchecked calls (1st to 5th)."""

from __future__ import annotations

import pytest

from tests.support.subject import ENGINE

collect_ignore_glob = [] if ENGINE == "ckptdeco" else ["test_*.py"]


@pytest.fixture(params=[True, False], ids=["early_stop", "no_early_stop"])
def early_stop(request: pytest.FixtureRequest) -> bool:
    """Both settings of early stop."""
    value: bool = request.param
    return value
