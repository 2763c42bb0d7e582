"""Small random models of timm and diffusers, ResNets as torchvision writes them, and PyTorch's own Transformer.

Each with a batch, and the names of its repeated blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from tests.integrations.without_torchvision import import_timm

timm = import_timm()
diffusers = pytest.importorskip("diffusers")


@dataclass(frozen=True)
class Case:
    """How to make a model, its batch, and what `layers="auto"` should take."""

    build: Callable[[], nn.Module]
    make_batch: Callable[[], dict[str, Any]]
    blocks: tuple[str, ...]


class BasicBlock(nn.Module):
    """Two convolutions and a shortcut; ReLU in place."""

    expansion = 1

    def __init__(self, n_in: int, n_out: int, stride: int, downsample: nn.Module | None) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(n_in, n_out, 3, stride, 1, bias=False), nn.BatchNorm2d(n_out)
        self.conv2, self.bn2 = nn.Conv2d(n_out, n_out, 3, 1, 1, bias=False), nn.BatchNorm2d(n_out)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = downsample

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)


class Bottleneck(nn.Module):
    """Narrow in the middle, as in ResNet-50."""

    expansion = 4

    def __init__(self, n_in: int, n_out: int, stride: int, downsample: nn.Module | None) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(n_in, n_out, 1, bias=False), nn.BatchNorm2d(n_out)
        self.conv2, self.bn2 = nn.Conv2d(n_out, n_out, 3, stride, 1, bias=False), nn.BatchNorm2d(n_out)
        self.conv3, self.bn3 = nn.Conv2d(n_out, 4 * n_out, 1, bias=False), nn.BatchNorm2d(4 * n_out)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = downsample

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn3(self.conv3(self.relu(self.bn2(self.conv2(out)))))
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)


class ResNet(nn.Module):
    """Four stages, each an nn.Sequential, between stem and head."""

    def __init__(self, kind: type[BasicBlock] | type[Bottleneck], depths: tuple[int, ...]) -> None:
        super().__init__()
        self.conv1, self.bn1, self.relu = nn.Conv2d(3, 4, 3, 1, 1, bias=False), nn.BatchNorm2d(4), nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        self.width = 4
        self.layer1, self.layer2, self.layer3, self.layer4 = (
            self._stage(kind, 4 * 2**i, depth, 1 if i == 0 else 2) for i, depth in enumerate(depths)
        )
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(self.width, 3)

    def _stage(self, kind: Any, n_out: int, depth: int, stride: int) -> nn.Sequential:
        blocks = []
        for i in range(depth):
            step = stride if i == 0 else 1
            shortcut: nn.Module | None = None
            if step != 1 or self.width != n_out * kind.expansion:
                conv = nn.Conv2d(self.width, n_out * kind.expansion, 1, step, bias=False)
                shortcut = nn.Sequential(conv, nn.BatchNorm2d(n_out * kind.expansion))
            blocks.append(kind(self.width, n_out, step, shortcut))
            self.width = n_out * kind.expansion
        return nn.Sequential(*blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(torch.flatten(self.avgpool(x), 1))


def _stages(prefix: str, depths: tuple[int, ...], first: int = 0) -> tuple[str, ...]:
    """Names of the blocks of stages with these depths."""
    return tuple(f"{prefix.format(i + first)}{j}" for i, depth in enumerate(depths) for j in range(depth))


def _images(size: int) -> dict[str, Any]:
    return {"x": torch.randn(2, 3, size, size)}


def _timm(name: str, size: int, blocks: tuple[str, ...], **options: Any) -> Case:
    return Case(partial(timm.create_model, name, num_classes=3, **options), partial(_images, size), blocks)


def _unet_batch(**more: Callable[[], torch.Tensor]) -> dict[str, Any]:
    rest = {key: make() for key, make in more.items()}
    return {"sample": torch.randn(2, 2, 8, 8), "timestep": torch.tensor([3, 7]), "return_dict": False, **rest}


def _unet_blocks(attention: tuple[int, int, int], resnets: tuple[int, int, int]) -> tuple[str, ...]:
    """Names for two levels: how many attentions and resnets on the way down, in the middle and up, on each level."""
    names = []
    for part, n_attentions, n_resnets in zip(
        ("down_blocks", "mid_block", "up_blocks"), attention, resnets, strict=True
    ):
        for level in (0, 1) if part != "mid_block" else ("",):
            path = f"{part}.{level}".rstrip(".")
            has_attention = part == "mid_block" or (level == 1) == (part == "down_blocks")
            names += [f"{path}.attentions.{i}" for i in range(n_attentions if has_attention else 0)]
            names += [f"{path}.resnets.{i}" for i in range(n_resnets)]
    return tuple(names)


_UNET: dict[str, Any] = {
    "sample_size": 8, "in_channels": 2, "out_channels": 2, "layers_per_block": 1, "block_out_channels": (4, 8),
    "norm_num_groups": 2, "attention_head_dim": 4, "dropout": 0.1,
}  # fmt: skip


def _transformer() -> nn.Module:
    return nn.Transformer(8, 2, 2, 2, 12, dropout=0.1, batch_first=True)


def _encoder(**options: Any) -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.1, batch_first=True, **options)
    return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)


def _encoder_batch() -> dict[str, Any]:
    padding = torch.zeros(2, 6, dtype=torch.bool)
    padding[1, 4:] = True
    return {"src": torch.randn(2, 6, 8), "src_key_padding_mask": padding}


def _decoder_batch() -> dict[str, Any]:
    memory = torch.randn(2, 5, 8, requires_grad=True)
    causal = nn.Transformer.generate_square_subsequent_mask(6)
    return {"tgt": torch.randn(2, 6, 8), "memory": memory, "tgt_mask": causal, "tgt_is_causal": True}


MODELS: dict[str, Case] = {
    "timm_vit": _timm(
        "vit_tiny_patch16_224", 16, _stages("blocks.", (3,)), img_size=16, patch_size=8, embed_dim=16, depth=3,
        num_heads=2, proj_drop_rate=0.1, attn_drop_rate=0.1, drop_path_rate=0.3,
    ),
    "timm_convnext": _timm(
        "convnext_atto", 32, _stages("stages.{}.blocks.", (1, 2, 1, 1)), depths=(1, 2, 1, 1), dims=(4, 8, 8, 16),
        drop_path_rate=0.3,
    ),
    "timm_swin": _timm(
        "swin_tiny_patch4_window7_224", 16, _stages("layers.{}.blocks.", (2, 1)), img_size=16, patch_size=2,
        window_size=4, embed_dim=8, depths=(2, 1), num_heads=(2, 2), proj_drop_rate=0.1, drop_path_rate=0.3,
    ),
    "timm_resnet": _timm(
        "resnet50", 32, _stages("layer{}.", (1, 2, 1, 1), 1), layers=(1, 2, 1, 1), channels=(4, 4, 8, 8), stem_width=4,
        drop_path_rate=0.3,
    ),
    "timm_efficientnet": _timm(
        "test_efficientnet", 32, _stages("blocks.{}.", (1, 1, 1, 1, 1)), drop_rate=0.1, drop_path_rate=0.3
    ),
    "timm_densenet": _timm(
        "densenet121", 32, tuple(f"features.denseblock{i}.denselayer{j}" for i, j in ((1, 1), (1, 2), (2, 1))),
        growth_rate=4, block_config=(2, 1),
    ),
    "diffusers_unet": Case(
        lambda: diffusers.UNet2DModel(
            down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"), **_UNET
        ),
        _unet_batch,
        _unet_blocks((1, 1, 2), (1, 2, 2)),
    ),
    "diffusers_unet_condition": Case(
        lambda: diffusers.UNet2DConditionModel(
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), cross_attention_dim=8,
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"), **_UNET,
        ),
        partial(_unet_batch, encoder_hidden_states=lambda: torch.randn(2, 5, 8, requires_grad=True)),
        _unet_blocks((1, 1, 2), (1, 2, 2)),
    ),
    "diffusers_dit": Case(
        lambda: diffusers.DiTTransformer2DModel(
            num_attention_heads=2, attention_head_dim=8, in_channels=2, num_layers=3, sample_size=8, norm_num_groups=1,
            num_embeds_ada_norm=10, dropout=0.1,
        ),
        lambda: {
            "hidden_states": torch.randn(2, 2, 8, 8), "timestep": torch.tensor([3, 7]),
            "class_labels": torch.tensor([1, 4]), "return_dict": False,
        },
        _stages("transformer_blocks.", (3,)),
    ),
    "diffusers_transformer2d": Case(
        lambda: diffusers.Transformer2DModel(
            num_attention_heads=2, attention_head_dim=8, in_channels=8, num_layers=3, norm_num_groups=4, dropout=0.1,
            cross_attention_dim=8,
        ),
        lambda: {
            "hidden_states": torch.randn(2, 8, 4, 4), "encoder_hidden_states": torch.randn(2, 5, 8),
            "return_dict": False,
        },
        _stages("transformer_blocks.", (3,)),
    ),
    "resnet_basic": Case(
        partial(ResNet, BasicBlock, (2, 2, 1, 1)), partial(_images, 16), _stages("layer{}.", (2, 2, 1, 1), 1)
    ),
    "resnet_bottleneck": Case(
        partial(ResNet, Bottleneck, (1, 2, 1, 1)), partial(_images, 16), _stages("layer{}.", (1, 2, 1, 1), 1)
    ),
    "torch_encoder": Case(_encoder, _encoder_batch, _stages("layers.", (3,))),
    "torch_encoder_norm_first": Case(
        partial(_encoder, norm_first=True, activation="gelu"), _encoder_batch, _stages("layers.", (3,))
    ),
    "torch_decoder": Case(
        lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 12, dropout=0.1, batch_first=True), 3),
        _decoder_batch, _stages("layers.", (3,)),
    ),
    "torch_transformer": Case(
        _transformer, lambda: {"src": torch.randn(2, 5, 8), "tgt": torch.randn(2, 6, 8)},
        (*_stages("encoder.layers.", (2,)), *_stages("decoder.layers.", (2,))),
    ),
}  # fmt: skip
