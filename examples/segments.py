"""Four ways to group the same layers, and what each leaves alive between forward and backward."""

import torch
from torch import nn

import ckptdeco
from ckptdeco.planning.meter import measure_step

N_LAYERS, WIDTH = 16, 64


class Layer(nn.Module):
    """Saves several tensors of its input's size for backward."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH), nn.Tanh())

    @ckptdeco.checkpointable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The MLP of x."""
        return self.mlp(x)


def kept_and_peak(policy: ckptdeco.Policy) -> tuple[int, int]:
    """Activation bytes after forward and at the peak of one step."""

    def forward() -> torch.Tensor:
        y = x
        for layer in layers:
            y = layer(y)
        return y.mean()

    with policy:
        trace = measure_step(forward, layers.parameters())
    return trace.marks["backward"].live_bytes, trace.peak_bytes


if __name__ == "__main__":
    torch.manual_seed(0)
    layers, x = nn.ModuleList(Layer() for _ in range(N_LAYERS)), torch.randn(256, WIDTH)
    policies = {
        "store everything": ckptdeco.policy(None),
        "store every other layer": ckptdeco.policy(every=2),
        "recompute one layer at a time": ckptdeco.policy(segment=1),
        "recompute four layers at a time": ckptdeco.policy(segment=4),
        "rebuild four inputs, then one layer at a time": ckptdeco.policy(segment=4, levels=2),
    }
    kept, peak = {}, {}
    for name, policy in policies.items():
        kept[name], peak[name] = kept_and_peak(policy)
        print(f"{name:<46} {kept[name] / 1024:>6.0f} KiB after forward, {peak[name] / 1024:>6.0f} KiB at the peak")

    everything, every_other, one, four, two_levels = policies
    assert kept[everything] > kept[every_other] > kept[one] > kept[four] == kept[two_levels]
    # A whole segment is alive while it is recomputed, so the least kept is not always the lowest peak.
    assert peak[two_levels] < peak[one] < peak[everything]
