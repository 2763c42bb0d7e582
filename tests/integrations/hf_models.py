"""Small random models of transformers, one of each kind, with a batch for each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from torch import nn

VOCAB, LENGTH, WIDTH = 40, 12, 16


def _tokens(**more: Any) -> dict[str, Any]:
    ids = torch.randint(3, VOCAB, (2, LENGTH))
    return {"input_ids": ids, "labels": ids.clone(), **more}


def _padded() -> dict[str, Any]:
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[1, -4:] = 0
    return _tokens(attention_mask=mask)


def _pixels() -> dict[str, Any]:
    return {"pixel_values": torch.randn(2, 3, 16, 16), "labels": torch.tensor([0, 1])}


def _encoder(kind: str, **more: Any) -> dict[str, Any]:
    return {
        "vocab_size": VOCAB, "hidden_size": WIDTH, "num_hidden_layers": 3, "num_attention_heads": 2,
        "intermediate_size": 24, "max_position_embeddings": 64, **more,
    }  # fmt: skip


def _decoder(**more: Any) -> dict[str, Any]:
    return _encoder("decoder", num_key_value_heads=1, pad_token_id=0, bos_token_id=1, eos_token_id=2, **more)


def bert() -> nn.Module:
    return hf.BertForMaskedLM(hf.BertConfig(**_encoder("bert")))


def albert() -> nn.Module:
    return hf.AlbertForMaskedLM(
        hf.AlbertConfig(
            **_encoder("albert", embedding_size=8, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1)
        )
    )


def deberta() -> nn.Module:
    return hf.DebertaV2ForMaskedLM(
        hf.DebertaV2Config(**_encoder("deberta", relative_attention=True, pos_att_type=["p2c", "c2p"]))
    )


def longformer() -> nn.Module:
    return hf.LongformerForMaskedLM(hf.LongformerConfig(**_encoder("longformer", attention_window=4, pad_token_id=1)))


def gpt2() -> nn.Module:
    return hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=VOCAB, n_embd=WIDTH, n_layer=3, n_head=2, n_positions=64))


def llama() -> nn.Module:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**_decoder(attention_dropout=0.1)))


def mixtral() -> nn.Module:
    return hf.MixtralForCausalLM(
        hf.MixtralConfig(**_decoder(num_local_experts=3, output_router_logits=True, attention_dropout=0.1))
    )


def mamba() -> nn.Module:
    return hf.MambaForCausalLM(hf.MambaConfig(vocab_size=VOCAB, hidden_size=WIDTH, num_hidden_layers=3, state_size=4))


def t5() -> nn.Module:
    return hf.T5ForConditionalGeneration(
        hf.T5Config(
            vocab_size=VOCAB, d_model=WIDTH, d_kv=8, d_ff=24, num_layers=3, num_decoder_layers=3, num_heads=2,
            decoder_start_token_id=0,
        )
    )  # fmt: skip


def whisper() -> nn.Module:
    return hf.WhisperForConditionalGeneration(
        hf.WhisperConfig(
            vocab_size=VOCAB, d_model=WIDTH, encoder_layers=3, decoder_layers=3, encoder_attention_heads=2,
            decoder_attention_heads=2, encoder_ffn_dim=24, decoder_ffn_dim=24, num_mel_bins=8,
            max_source_positions=10, max_target_positions=32, dropout=0.1, encoder_layerdrop=0.2,
            pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
        )
    )  # fmt: skip


def vit() -> nn.Module:
    return hf.ViTForImageClassification(
        hf.ViTConfig(
            hidden_size=WIDTH, num_hidden_layers=3, num_attention_heads=2, intermediate_size=24, image_size=16,
            patch_size=8, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1,
        )
    )  # fmt: skip


def swin() -> nn.Module:
    return hf.SwinForImageClassification(
        hf.SwinConfig(
            image_size=16, patch_size=2, embed_dim=8, depths=[2, 2], num_heads=[2, 2], window_size=2, drop_path_rate=0.2
        )
    )


def clip() -> nn.Module:
    part = {"hidden_size": WIDTH, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 24}
    return hf.CLIPModel(
        hf.CLIPConfig(
            text_config={**part, "vocab_size": VOCAB, "max_position_embeddings": 32, "attention_dropout": 0.1},
            vision_config={**part, "image_size": 16, "patch_size": 8},
            projection_dim=8,
        )
    )


def _clip_batch() -> dict[str, Any]:
    return {
        "input_ids": torch.randint(3, VOCAB, (2, LENGTH)),
        "pixel_values": torch.randn(2, 3, 16, 16),
        "return_loss": True,
    }


def _mel() -> dict[str, Any]:
    return {"input_features": torch.randn(2, 8, 20), "labels": torch.randint(3, VOCAB, (2, 6))}


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, Any]]]] = {
    "bert": (bert, _padded),
    "albert": (albert, _padded),
    "deberta": (deberta, _padded),
    "longformer": (longformer, _padded),
    "gpt2": (gpt2, _padded),
    "llama": (llama, _padded),
    "mixtral": (mixtral, _padded),
    "mamba": (mamba, _tokens),
    "t5": (t5, _padded),
    "whisper": (whisper, _mel),
    "vit": (vit, _pixels),
    "swin": (swin, _pixels),
    "clip": (clip, _clip_batch),
}
