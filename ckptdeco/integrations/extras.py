"""Packages that ckptdeco can work with but does not need."""

from __future__ import annotations

__all__ = ["missing"]


def missing(extra: str, what: str) -> ImportError:
    """The error where `what` needs packages that are not installed."""
    return ImportError(f"{what} needs the package {extra}\n  Fix: pip install 'ckptdeco[{extra}]'", name=extra)
