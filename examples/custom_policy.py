"""A rule of your own: store the cheap layers, recompute those that would store much."""

import torch
from torch import nn

import ckptdeco
from ckptdeco import Action, Policy, Site


class WideOnly(Policy):
    """Recomputes a layer if its hidden width is 256 or more, and stores the others.

    An action is the answer for one layer call: SAVE stores its saved tensors, DROP_KEEP drops them and keeps the
    input to recompute from, DROP drops both (the call is then recomputed from an earlier one).
    """

    def at_forward(self, site: Site) -> Action:
        """What to do with the layer call at this place."""
        return Action.DROP_KEEP if site.layer.hidden >= 256 else Action.SAVE


class Layer(nn.Module):
    """A residual MLP that counts how often it runs, recomputes included."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.hidden = hidden
        self.expand, self.contract = nn.Linear(width, hidden), nn.Linear(hidden, width)

    @ckptdeco.checkpointable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The input plus what the MLP makes of it."""
        if ckptdeco.is_recomputing():
            recomputed.append(self.hidden)
        return x + self.contract(self.expand(x).tanh())


recomputed: list[int] = []

if __name__ == "__main__":
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer(32, hidden) for hidden in (64, 512, 64, 256, 64)))
    x = torch.randn(16, 32)

    model(x).sum().backward()
    plain = [parameter.grad.clone() for parameter in model.parameters()]

    model.zero_grad()
    with WideOnly():
        model(x).sum().backward()

    print(f"recomputed, last first: {recomputed}")
    assert recomputed == [256, 512]
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), plain, strict=True))
