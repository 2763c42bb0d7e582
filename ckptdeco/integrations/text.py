"""Policies as text, for settings files, command lines and trainers' arguments: `"segment=2, levels=2"`."""

from __future__ import annotations

import ast

from ckptdeco.errors import PolicyError
from ckptdeco.policy import Policy, policy

__all__ = ["as_policy", "policy_from_text"]


def policy_from_text(text: str) -> Policy:
    """The policy that `text` describes: the arguments of `policy()`, or ``"off"`` for `policy(None)`.

    Args:
        text: ``"segment=2, levels=2"``, ``"every=2"``, ``"segment=sqrt"``; also as the call reads,
            ``"policy(segment=2)"``. Quotes around words may be left out.

    Raises:
        PolicyError: the text is not that.

    Example:
        >>> policy_from_text("segment=sqrt, keep_last=1")
        policy(segment='sqrt', keep_last=1)
    """
    inner = text.strip().removeprefix("ckptdeco.")
    if inner.startswith("policy(") and inner.endswith(")"):
        inner = inner[len("policy(") : -1]
    if inner in ("off", "None"):
        return policy(None)
    options: dict[str, object] = {}
    for part in filter(None, (part.strip() for part in inner.split(","))):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not name.isidentifier() or not value or name in options:
            raise PolicyError(
                "policy", text, f"{part!r} is not an option and its value", "write it like 'segment=2, levels=2'"
            )
        options[name] = _value(value)
    return policy(**options)  # type: ignore[arg-type]


def as_policy(policy: Policy | str) -> Policy:
    """The policy itself, or the one that a text describes."""
    return policy_from_text(policy) if isinstance(policy, str) else policy


def _value(text: str) -> object:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):  # a bare word
        return text
