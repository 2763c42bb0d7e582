"""In place of `torch.utils.checkpoint.checkpoint`, for code that already calls it: change the import, nothing else."""

import torch
from torch import nn

from ckptdeco import checkpoint  # was: from torch.utils.checkpoint import checkpoint


class Model(nn.Module):
    """Its loop calls checkpoint by hand, as most model code does today."""

    def __init__(self, n_layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Dropout(0.1)) for _ in range(n_layers)
        )
        self.is_checkpointed = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """All layers, checkpointed or not."""
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.is_checkpointed else layer(x)
        return x


def step(model: Model, x: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The gradients, and a random number drawn afterwards: the stream must not have moved."""
    torch.manual_seed(1)
    model.zero_grad()
    model(x).sum().backward()
    return [parameter.grad for parameter in model.parameters()], torch.rand(1)


if __name__ == "__main__":
    torch.manual_seed(0)
    model, x = Model(n_layers=6, width=48), torch.randn(8, 48)
    plain, plain_drawn = step(model, x)
    model.is_checkpointed = True
    checkpointed, drawn = step(model, x)
    assert all(torch.equal(a, b) for a, b in zip(plain, checkpointed, strict=True))
    assert torch.equal(drawn, plain_drawn)
    print("the same gradients and the same random stream")
