"""The operators that a layer call runs, for `debug=True`: shows the first one that differs in a recompute."""

from __future__ import annotations

from typing import Any

import torch

from ckptdeco.engine.torch_private import TorchDispatchMode

__all__ = ["Draws", "Trace", "first_difference"]


class Trace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lists every operator with the types and shapes of its results."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operators: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.detach.default:  # the hooks' own; it computes nothing
            return out
        shapes = [
            str(list(t.shape)) for t in (out if isinstance(out, (list, tuple)) else (out,)) if hasattr(t, "shape")
        ]
        self.operators.append(f"{func} -> {', '.join(shapes)}")
        return out


class Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes whether an operator draws random numbers."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_seen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.is_seen = True
        return func(*args, **(kwargs or {}))


def first_difference(forward: list[str] | None, recompute: list[str] | None) -> str:
    """A few lines around the first operator that differs, or "" without traces."""
    if forward is None or recompute is None:
        return ""
    n = next(
        (i for i, (a, b) in enumerate(zip(forward, recompute, strict=False)) if a != b),
        min(len(forward), len(recompute)),
    )
    lines = [f"  operators up to the first that differs (number {n}):"]
    lines += [f"    both:      {operator}" for operator in forward[max(0, n - 3) : n]]
    lines.append(f"    forward:   {forward[n] if n < len(forward) else '(ended)'}")
    lines.append(f"    recompute: {recompute[n] if n < len(recompute) else '(ended)'}")
    return "\n".join(lines)
