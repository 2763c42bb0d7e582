"""accelerate's loop with a residual conv net, BatchNorm and all: learns scikit-learn's handwritten digits."""

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ckptdeco
from ckptdeco.planning.meter import measure_step

WIDTH, N_STEPS = 16, 15


class Block(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(WIDTH, WIDTH, 3, padding=1), nn.BatchNorm2d(WIDTH), nn.ReLU(),
            nn.Conv2d(WIDTH, WIDTH, 3, padding=1), nn.BatchNorm2d(WIDTH),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The input plus what the convolutions make of it."""
        return (x + self.body(x)).relu()


def train(policy: ckptdeco.Policy) -> tuple[list[float], list[torch.Tensor], int]:
    """The losses, the running means of BatchNorm, and the most bytes of activations that a step holds."""
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    blocks = [Block() for _ in range(12)]
    model = nn.Sequential(nn.Conv2d(1, WIDTH, 3, padding=1), *blocks, nn.Flatten(), nn.Linear(64 * WIDTH, 10))
    images, digits = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images / 16).float().view(-1, 1, 8, 8), torch.tensor(digits))
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.AdamW(model.parameters(), lr=1e-3), DataLoader(data, batch_size=32, shuffle=True)
    )
    ckptdeco.decorate(model)  # before prepare would do as well
    losses = []
    with policy:
        for _, (x, y) in zip(range(N_STEPS), loader, strict=False):
            loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        means = [buffer.clone() for name, buffer in model.named_buffers() if name.endswith("running_mean")]
        x, y = data[:32]
        trace = measure_step(lambda: nn.functional.cross_entropy(model(x), y), model.parameters())
    return losses, means, trace.peak_bytes


if __name__ == "__main__":
    runs = {
        policy: train(policy)
        for policy in (ckptdeco.policy(None), ckptdeco.policy(segment=1), ckptdeco.policy(segment=4, levels=2))
    }
    for policy, (losses, _, peak_bytes) in runs.items():
        print(f"{policy!r:<30} losses {losses[0]:.4f} to {losses[-1]:.4f}, {peak_bytes / 2**20:.1f} MiB of activations")
    (plain_losses, plain_means, plain_bytes), *others = runs.values()
    for losses, means, peak_bytes in others:
        assert losses == plain_losses
        assert all(map(torch.equal, means, plain_means))
        assert peak_bytes < plain_bytes / 2
