"""Packages that ckptdeco can work with but does not need."""

from __future__ import annotations

__all__ = ["MissingExtraError"]


class MissingExtraError(ImportError):
    """A package of an optional extra is not installed."""

    def __init__(self, packages: list[str], extra: str) -> None:
        super().__init__(packages, extra)
        self.packages = packages
        self.extra = extra

    def __str__(self) -> str:
        return f"this needs {' and '.join(self.packages)}. Fix: pip install 'ckptdeco[{self.extra}]'"
