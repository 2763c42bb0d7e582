"""A model with its own loop: one decorator on the layer, one `with` around the step, and the loop stays as it is."""

import torch
from torch import nn

import ckptdeco


class Layer(nn.Module):
    """A residual MLP with dropout: recomputing it has to draw the same random numbers again."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1)
        )

    @ckptdeco.checkpointable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The input plus what the MLP makes of it."""
        return x + self.mlp(x)


class Model(nn.Module):
    """Knows nothing of checkpointing."""

    def __init__(self, n_layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for _ in range(n_layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The plain loop."""
        for layer in self.layers:
            x = layer(x)
        return x


def gradients(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    torch.manual_seed(1)  # the same dropout in both runs
    model.zero_grad()
    model(x).square().mean().backward()
    return [parameter.grad for parameter in model.parameters()]


if __name__ == "__main__":
    torch.manual_seed(0)
    model, x = Model(n_layers=8, width=64), torch.randn(32, 64)
    stored = gradients(model, x)
    with ckptdeco.policy(segment=1):  # keep each layer's input, recompute the rest in backward
        recomputed = gradients(model, x)
    assert all(torch.equal(a, b) for a, b in zip(stored, recomputed, strict=True))
    print("the same gradients, bit for bit")
