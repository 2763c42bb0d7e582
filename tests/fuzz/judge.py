"""Compares the plain run of a program with the run under its policies."""

from __future__ import annotations

from torch.utils.checkpoint import CheckpointError as TorchCheckpointError

import ckptdeco
from ckptdeco.errors import InputModifiedError, ModifiedTensorError
from tests.fuzz.execute import execute
from tests.fuzz.program import Program
from tests.support.oracle import assert_same_observation


class Difference(AssertionError):
    """The run under the policies is neither the plain run nor an error that the documentation allows."""


def judge(program: Program) -> str:
    """Runs a program both ways.

    Returns:
        "equal"; "plain raises" where both ran into the same error; or "refused: Ingredient (ErrorClass)".

    Raises:
        Difference: with the program in its text.
    """
    plain, mine = execute(program, is_plain=True), execute(program, is_plain=False)
    for step, (one, other) in enumerate(zip(plain.seen, mine.seen, strict=False)):
        try:
            assert_same_observation(one, other, where=f"step {step}: ")
        except AssertionError as error:
            raise Difference(f"{error}\n{program!r}") from None
    error = mine.error
    goes_on = plain.error is not None and _is_more_than_promised(plain.error)
    if isinstance(error, ckptdeco.CheckpointError) and (goes_on or len(mine.seen) <= len(plain.seen)):
        reason = program.refusals().get(type(error).__name__)
        if reason is not None:
            return f"refused: {reason} ({type(error).__name__})"
    if goes_on and not isinstance(error, ckptdeco.CheckpointError) and len(mine.seen) >= len(plain.seen):
        return "plain raises"
    if (
        goes_on
        and isinstance(error, (InputModifiedError, ModifiedTensorError))
        and "modified by an inplace operation" in str(plain.error)
    ):
        return "plain raises"  # the same complaint, in a later step
    if plain.error is not None:
        if len(plain.seen) == len(mine.seen) and isinstance(error, type(plain.error)):
            return "plain raises"
        raise Difference(f"plain: {plain.error!r}\nunder the policy: {error!r}\n{program!r}") from error
    if error is not None:
        raise Difference(f"{type(error).__name__}: {error}\n{program!r}") from error
    return "equal"


def _is_more_than_promised(error: Exception) -> bool:
    """Whether a run under a policy may do without this error of the plain run.

    Torch's own checkpoint inside the program may complain of what our recompute puts right; and what the loop wrote to,
    which autograd had saved, is computed again.
    """
    return isinstance(error, TorchCheckpointError) or "modified by an inplace operation" in str(error)
