"""The Trainer of Lightning with one callback: a small vision transformer learns scikit-learn's handwritten digits."""

import logging
import warnings

import torch
from lightning.pytorch import LightningModule, Trainer
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ckptdeco.integrations import attach
from ckptdeco.integrations.lightning import CheckpointPolicyCallback
from ckptdeco.planning.meter import measure_step

WIDTH = 64


class Digits(LightningModule):
    """Reads an image of 8 by 8 as 16 patches of 2 by 2."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Linear(4, WIDTH), nn.Parameter(torch.zeros(16, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.1, batch_first=True, norm_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 12, enable_nested_tensor=False), nn.Linear(WIDTH, 10)
        self.losses: list[float] = []

    def forward(self, images: torch.Tensor, digits: torch.Tensor) -> torch.Tensor:
        """The mean cross entropy."""
        patches = nn.functional.unfold(images.unsqueeze(1), 2, stride=2).transpose(1, 2)
        return nn.functional.cross_entropy(self.head(self.encoder(self.embed(patches) + self.place).mean(1)), digits)

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        """Keeps the loss for the comparison."""
        loss = self(*batch)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def train(policy: str) -> tuple[list[float], int]:
    """The losses, and the most bytes of activations that a step holds."""
    torch.manual_seed(0)
    images, digits = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images / 16).float().view(-1, 8, 8), torch.tensor(digits))
    model = Digits()
    trainer = Trainer(
        max_steps=15, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[CheckpointPolicyCallback(policy)],
    )  # fmt: skip
    trainer.fit(model, DataLoader(data, batch_size=32, shuffle=True))
    with attach(model, policy):
        trace = measure_step(lambda: model(*data[:32]), model.parameters())
    return model.losses, trace.peak_bytes


if __name__ == "__main__":
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")  # Lightning's advice on workers and accelerators
    runs = {policy: train(policy) for policy in ("off", "segment=1", "segment=4, levels=2")}
    for policy, (losses, peak_bytes) in runs.items():
        print(f"{policy:<30} losses {losses[0]:.4f} to {losses[-1]:.4f}, {peak_bytes / 2**20:.1f} MiB of activations")
    (plain_losses, plain_bytes), *others = runs.values()
    for losses, peak_bytes in others:
        assert losses == plain_losses
        assert peak_bytes < plain_bytes / 3
