"""How reports write bytes and seconds."""

from __future__ import annotations

__all__ = ["size_text", "time_text"]


def size_text(n_bytes: int) -> str:
    """``96.0 KiB``."""
    if n_bytes < 1 << 10:
        return f"{n_bytes} B"
    if n_bytes < 1 << 20:
        return f"{n_bytes / (1 << 10):.1f} KiB"
    return f"{n_bytes / (1 << 20):.1f} MiB"


def time_text(seconds: float) -> str:
    """``12.50 ms``."""
    return f"{seconds * 1e3:.2f} ms" if seconds < 1 else f"{seconds:.2f} s"
