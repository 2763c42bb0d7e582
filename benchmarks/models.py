"""Models the benchmarks share: a chain of tiny layers (all overhead) and a GPT-like one (all memory)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

Call = Callable[..., torch.Tensor]


def torch_per_layer(layer: nn.Module, x: torch.Tensor, **options: Any) -> torch.Tensor:
    """One layer under torch's own non-reentrant checkpoint."""
    result: torch.Tensor = torch_checkpoint(layer, x, use_reentrant=False, **options)
    return result


def plain_call(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """One layer as it stands."""
    result: torch.Tensor = layer(x)
    return result


class TinyLayer(nn.Module):
    """LayerNorm, Linear, GELU, Linear: so little work that what is measured is the wrapping."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.expand = nn.Linear(width, width)
        self.contract = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One layer; x has shape [batch, width]."""
        return self.contract(F.gelu(self.expand(self.norm(x))))


class Block(nn.Module):
    """A pre-norm transformer block: causal self-attention, then a four times wider MLP."""

    def __init__(self, width: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width)
        self.mlp_out = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One layer; x has shape [batch, length, width]."""
        batch, length, width = x.shape
        heads = self.qkv(self.attention_norm(x)).view(batch, length, 3, self.n_heads, width // self.n_heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x))))


class Chain(nn.Module):
    """Layers in the plain loop every model has; ``call`` lets a benchmark wrap each layer call by hand."""

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor, call: Call = plain_call) -> torch.Tensor:
        """All layers, one after the other."""
        for layer in self.layers:
            x = call(layer, x)
        return x


class Gpt(nn.Module):
    """A GPT-like language model over token ids, about 20 million parameters at the default size."""

    def __init__(
        self,
        block: type[Block] = Block,
        *,
        n_layers: int = 24,
        width: int = 256,
        n_heads: int = 4,
        vocabulary: int = 1024,
        max_length: int = 256,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.randn(max_length, width) * 0.02)
        self.chain = Chain(block(width, n_heads) for _ in range(n_layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, token_ids: torch.Tensor, targets: torch.Tensor, call: Call = plain_call) -> torch.Tensor:
        """The mean cross entropy; both arguments have shape [batch, length]."""
        x = self.tokens(token_ids) + self.positions[: token_ids.shape[1]]
        return self.loss(self.chain(x, call), targets)

    def loss(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Head and loss on what the last layer returned."""
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Bottleneck(nn.Module):
    """Three convolutions around a skip connection; halves height and width with ``stride=2``."""

    def __init__(self, n_in: int, width: int, stride: int = 1, *, is_normed: bool = True) -> None:
        super().__init__()
        n_out = 4 * width

        def convolution(n_from: int, n_to: int, kernel: int = 1, stride: int = 1) -> nn.Sequential:
            norm = nn.BatchNorm2d(n_to) if is_normed else nn.Identity()
            return nn.Sequential(nn.Conv2d(n_from, n_to, kernel, stride, kernel // 2, bias=not is_normed), norm)

        self.reduce = convolution(n_in, width)
        self.middle = convolution(width, width, 3, stride)
        self.expand = convolution(width, n_out)
        self.skip = convolution(n_in, n_out, 1, stride) if stride > 1 or n_in != n_out else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One layer; x has shape [batch, channels, height, width]."""
        y = F.relu(self.middle(F.relu(self.reduce(x))))
        return F.relu(self.expand(y) + self.skip(x))


class ConvNet(nn.Module):
    """A residual net over small pictures: unequal layers, large at the front."""

    def __init__(
        self,
        block: type[Bottleneck] = Bottleneck,
        *,
        widths: tuple[int, ...] = (32, 64, 128),
        n_blocks: int = 4,
        is_normed: bool = True,
    ) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 3, padding=1)
        layers: list[nn.Module] = []
        n_in = 32
        for width in widths:
            for i in range(n_blocks):
                layers.append(block(n_in, width, 2 if layers and i == 0 else 1, is_normed=is_normed))
                n_in = 4 * width
        self.chain = Chain(layers)
        self.head = nn.Linear(n_in, 10)

    def forward(self, pictures: torch.Tensor, classes: torch.Tensor, call: Call = plain_call) -> torch.Tensor:
        """The mean cross entropy; pictures have shape [batch, 3, height, width]."""
        x = self.chain(self.stem(pictures), call)
        return F.cross_entropy(self.head(x.mean((2, 3))), classes)
