"""What the demo trains on: the source code of Python's own standard library, one token per character."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch

VOCABULARY_SIZE = 128  # ASCII; other characters become "?"


def read_source(max_characters: int) -> str:
    """The top-level modules of the standard library, in the order of their names, up to a length."""
    folder = Path(sysconfig.get_path("stdlib"))
    parts: list[str] = []
    length = 0
    for path in sorted(folder.glob("*.py")):
        parts.append(path.read_text(encoding="utf-8", errors="replace"))
        length += len(parts[-1])
        if length >= max_characters:
            break
    if not parts:
        raise FileNotFoundError(f"no Python source in {folder}, where the standard library should be")
    return "".join(parts)[:max_characters]


def encode(text: str) -> torch.Tensor:
    """One token id in 0..127 per character, as an int64 tensor of shape [characters]."""
    return torch.frombuffer(bytearray(text.encode("ascii", "replace")), dtype=torch.uint8).long()


def make_batches(
    tokens: torch.Tensor, n_batches: int, batch_size: int, length: int, seed: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Random windows of the text, each with the same window one character later as target.

    Returns:
        ``n_batches`` pairs of int64 tensors of shape [batch_size, length]; the same ones for the same seed.
    """
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(n_batches):
        starts = torch.randint(len(tokens) - length - 1, (batch_size,), generator=generator)
        window = tokens[starts[:, None] + torch.arange(length + 1)]
        batches.append((window[:, :-1].contiguous(), window[:, 1:].contiguous()))
    return batches
