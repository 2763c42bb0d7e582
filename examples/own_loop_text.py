"""A training loop of your own with PyTorch's Transformer: learns the bytes of a source file of Python."""

import argparse
from pathlib import Path

import torch
from torch import nn

import ckptdeco
from ckptdeco.planning.meter import measure_step

LENGTH, WIDTH, N_LAYERS, N_STEPS = 64, 64, 12, 10


class ByteModel(nn.Module):
    """Predicts each byte from those before it; knows nothing of checkpointing."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(256, WIDTH), nn.Parameter(torch.zeros(LENGTH, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.1, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, N_LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """The mean cross entropy of the next byte."""
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        hidden = self.encoder(self.embed(rows[:, :-1]) + self.place, mask=mask, is_causal=True)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), rows[:, 1:].flatten())


def text() -> torch.Tensor:
    """Rows of 65 bytes of the source of argparse."""
    data = torch.tensor(list(Path(argparse.__file__).read_bytes()))
    return data[: len(data) // (LENGTH + 1) * (LENGTH + 1)].view(-1, LENGTH + 1)


def train(policy: ckptdeco.Policy) -> tuple[list[float], int]:
    """The losses, and the most bytes of activations that a step holds."""
    torch.manual_seed(0)
    model = ByteModel()
    ckptdeco.decorate(model)  # finds the encoder's layers
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    with policy:
        for rows in text().split(8)[:N_STEPS]:
            optimizer.zero_grad()
            loss = model(rows)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        peak_bytes = measure_step(lambda: model(text()[:8]), model.parameters()).peak_bytes
    return losses, peak_bytes


if __name__ == "__main__":
    runs = {
        policy: train(policy)
        for policy in (ckptdeco.policy(None), ckptdeco.policy(segment=1), ckptdeco.policy(segment=4, levels=2))
    }
    for policy, (losses, peak_bytes) in runs.items():
        print(f"{policy!r:<30} losses {losses[0]:.4f} to {losses[-1]:.4f}, {peak_bytes / 2**20:.1f} MiB of activations")
    (plain_losses, plain_bytes), *others = runs.values()
    for losses, peak_bytes in others:
        assert losses == plain_losses
        assert peak_bytes < plain_bytes / 3
