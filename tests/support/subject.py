"""What is tested: `checkpointable` and `policy` of ckptdeco or of a stand-in, and the policies of every program."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable
from typing import Any

ENGINE = os.environ.get("CKPTDECO_TEST_ENGINE", "ckptdeco")

if ENGINE == "ckptdeco":
    from ckptdeco import checkpointable, policy
elif ENGINE == "torch":
    from tests.support.standins import policy
    from tests.support.standins import torch_checkpointable as checkpointable
elif ENGINE == "none":
    from tests.support.standins import plain_checkpointable as checkpointable
    from tests.support.standins import policy
else:
    raise ValueError(f"CKPTDECO_TEST_ENGINE={ENGINE!r}: expected ckptdeco, torch or none")

__all__ = ["ENGINE", "POLICIES", "PolicySpec", "active_policy", "checkpointable", "policy"]


def active_policy() -> object | None:
    """The policy entry that is active in this context, None when there is none."""
    context = sys.modules.get("ckptdeco.context")
    return None if context is None else context.active()


@dataclasses.dataclass(frozen=True)
class PolicySpec:
    """The arguments of a policy, made only when a test asks for it."""

    options: tuple[tuple[str, Any], ...]

    def make(self) -> Any:
        """Returns the policy."""
        return policy(**dict(self.options))

    def under(self) -> Callable[[], Any]:
        """Returns the same policy each time, so that what it learns in the first step is used in the next."""
        made = self.make()
        return lambda: made

    def __str__(self) -> str:
        return ",".join(f"{key}={value}" for key, value in self.options)


def spec(**options: Any) -> PolicySpec:
    """Returns the spec of `policy(**options)`."""
    return PolicySpec(tuple(options.items()))


POLICIES: tuple[PolicySpec, ...] = (
    spec(segment=1),
    spec(segment=2),
    spec(segment=3),
    spec(segment=5),
    spec(segment="sqrt"),
    spec(segment="auto"),
    spec(every=2),
    spec(segment=4, levels=2),
    spec(segment=4, levels="log"),
    spec(levels="log"),
    spec(segment=2, keep_last=2),
    spec(segment=2, nested=True),
)
if ENGINE != "ckptdeco":
    POLICIES = POLICIES[:1]  # a stand-in does not read the options
