"""One `with` around a whole training loop, with several backward passes for each optimizer step."""

import torch
from torch import nn

import ckptdeco

N_MICROBATCHES = 4


class Layer(nn.Module):
    """Linear, ReLU and dropout."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    @ckptdeco.checkpointable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Draws new random numbers at each call."""
        return nn.functional.dropout(self.linear(x).relu(), 0.1)


def train(policy: ckptdeco.Policy) -> tuple[list[float], list[torch.Tensor]]:
    """Three optimizer steps; returns the losses and the weights."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer(32) for _ in range(6)), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    with policy:  # once, around everything: each forward pass is a new chain
        for _ in range(3):
            optimizer.zero_grad()
            for x in torch.randn(N_MICROBATCHES, 16, 32):
                loss = model(x).square().mean() / N_MICROBATCHES
                loss.backward()  # adds to the gradients; this microbatch's memory is free again
                losses.append(loss.item())
            optimizer.step()  # after the backward passes, never between a forward and its backward
    return losses, list(model.parameters())


if __name__ == "__main__":
    plain_losses, plain_weights = train(ckptdeco.policy(None))
    losses, weights = train(ckptdeco.policy(segment=3))
    assert losses == plain_losses
    assert all(torch.equal(a, b) for a, b in zip(weights, plain_weights, strict=True))
    print(f"{len(losses)} microbatches, equal bit for bit; last loss {losses[-1]:.4f}")
