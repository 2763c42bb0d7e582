"""The demo's model: a character-level transformer whose loop knows nothing of checkpointing."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import ckptdeco
from ckptdeco.demo.text import VOCABULARY_SIZE


@dataclass(frozen=True)
class Size:
    """Sizes of model and batch, chosen so that activations outweigh everything else."""

    n_layers: int = 12
    width: int = 128
    n_heads: int = 4
    length: int = 256
    batch_size: int = 4

    @property
    def boundary_bytes(self) -> int:
        """Bytes of one layer's input, float32."""
        return self.batch_size * self.length * self.width * 4


class Block(nn.Module):
    """Pre-norm attention and MLP, both with dropout: a recompute has to draw the same random numbers again."""

    def __init__(self, width: int, n_heads: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width)
        self.mlp_out = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    @ckptdeco.checkpointable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One layer; x and the result have shape [batch, length, width]."""
        batch, length, width = x.shape
        heads = self.qkv(self.attention_norm(x)).view(batch, length, 3, self.n_heads, width // self.n_heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.dropout(self.attention_out(mixed.transpose(1, 2).reshape(batch, length, width)))
        result: torch.Tensor = x + self.dropout(self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x)))))
        return result


class TorchCheckpointedBlock(Block):
    """The same layer for the row "torch": without a policy, the way to recompute is to write it into the model."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One layer under torch's own checkpoint."""
        result: torch.Tensor = torch_checkpoint(super().forward, x, use_reentrant=False)
        return result


class CharacterTransformer(nn.Module):
    """Predicts the next character of a text."""

    def __init__(self, size: Size, block: type[Block] = Block) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY_SIZE, size.width)
        self.positions = nn.Parameter(torch.randn(size.length, size.width) * 0.02)
        self.layers = nn.ModuleList(block(size.width, size.n_heads) for _ in range(size.n_layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, VOCABULARY_SIZE)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The mean cross entropy of predicting ``targets``, both of shape [batch, length]."""
        x = self.tokens(tokens) + self.positions[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        loss: torch.Tensor = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return loss
