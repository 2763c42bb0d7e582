"""Small models of transformers with decorated layers, trained with and without a cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.flights import state_of
from tests.support.subject import checkpointable

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore")
SMALL = {"attn_implementation": "eager"}


def _llama() -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=17, hidden_size=16, intermediate_size=24, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=32, attention_dropout=0.2,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def _gpt2() -> nn.Module:
    config = transformers.GPT2Config(vocab_size=17, n_positions=32, n_embd=16, n_layer=4, n_head=2)
    return transformers.GPT2LMHeadModel(config)


def _bert() -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=17, hidden_size=16, num_hidden_layers=4, num_attention_heads=2, intermediate_size=24,
        max_position_embeddings=32,
    )  # fmt: skip
    return transformers.BertForMaskedLM(config)


def _t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=17, d_model=16, d_kv=8, d_ff=24, num_layers=3, num_heads=2, decoder_start_token_id=0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


def _mixtral() -> nn.Module:
    config = transformers.MixtralConfig(
        vocab_size=17, hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=4, max_position_embeddings=32, output_router_logits=True,
        router_jitter_noise=0.1,
    )  # fmt: skip
    return transformers.MixtralForCausalLM(config)


def _whisper() -> nn.Module:
    config = transformers.WhisperConfig(
        vocab_size=17, num_mel_bins=4, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=24, decoder_ffn_dim=24, d_model=16, max_source_positions=8,
        max_target_positions=16, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
        encoder_layerdrop=0.3, dropout=0.1, suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    return transformers.WhisperForConditionalGeneration(config)


MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "llama": (_llama, "LlamaDecoderLayer"),
    "gpt2": (_gpt2, "GPT2Block"),
    "bert": (_bert, "BertLayer"),
    "t5": (_t5, "T5Block"),
    "mixtral": (_mixtral, "MixtralDecoderLayer"),
    "whisper": (_whisper, "Whisper*Layer"),
}


def _decorate(model: nn.Module, pattern: str) -> None:
    start, _, end = pattern.partition("*")
    for cls in {type(module) for module in model.modules()}:
        if cls.__name__.startswith(start) and cls.__name__.endswith(end) and "forward" in vars(cls):
            _patch.setattr(cls, "forward", checkpointable(cls.forward))
            _decorated.append(cls.__name__)


_patch: pytest.MonkeyPatch
_decorated: list[str] = []


@pytest.fixture(autouse=True)
def _undo() -> Iterator[None]:
    global _patch
    _decorated.clear()
    with pytest.MonkeyPatch.context() as _patch:
        yield


def _inputs(model: nn.Module) -> dict[str, Any]:
    if type(model).__name__.startswith("Whisper"):
        return {"input_features": torch.randn(2, 4, 16), "labels": torch.randint(0, 17, (2, 6))}
    ids = torch.randint(0, 17, (2, 6))
    mask = torch.ones_like(ids)
    mask[0, -2:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids}


def _cache_of(model: nn.Module, cache: str) -> Any:
    is_pair = model.config.is_encoder_decoder
    dynamic = transformers.DynamicCache
    if cache == "static":

        def make() -> Any:
            return transformers.StaticCache(config=model.config, max_cache_len=12)
    else:

        def make() -> Any:
            return dynamic(config=model.config)

    return transformers.EncoderDecoderCache(make(), dynamic(config=model.config)) if is_pair else make()


def _train(model: nn.Module, cache: str, context: Any) -> Any:
    """A pass over one piece of a text, and one over the next with what the first left in the cache."""
    torch.manual_seed(1)
    inputs = _inputs(model)
    with context():
        if cache == "none":
            outputs = [model(**inputs, use_cache=False), model(**inputs, use_cache=False)]
        elif cache == "own":
            outputs = [model(**inputs, use_cache=True)]
        else:
            given = _cache_of(model, cache)
            outputs = [model(**inputs, past_key_values=given, use_cache=True)]
            if not model.config.is_encoder_decoder:
                more = {**inputs, "attention_mask": torch.ones(2, 12, dtype=torch.long)}
                outputs.append(model(**more, past_key_values=given, use_cache=True))
    sum(out.loss for out in outputs).backward()
    caches = [out.get("past_key_values") for out in outputs]
    tensors = [t for c in caches if c is not None for t in _tensors(c)]
    return [out.logits.detach() for out in outputs], [t.detach().clone() for t in tensors]


def _tensors(cache: Any) -> list[torch.Tensor]:
    if hasattr(cache, "self_attention_cache"):
        return _tensors(cache.self_attention_cache) + _tensors(cache.cross_attention_cache)
    return [t for layer in cache.layers for t in (layer.keys, layer.values) if t is not None]


def _step(model: nn.Module, inputs: Any, context: Any) -> Any:
    return _train(model, inputs[0], context), state_of(dict(model.named_buffers()))


CACHES = {
    "llama": ("none", "own", "dynamic", "static"),
    "gpt2": ("none", "own", "dynamic"),
    "bert": ("none",),
    "t5": ("none", "own", "dynamic", "static"),
    "mixtral": ("none", "own"),
    "whisper": ("none", "own", "dynamic"),
}


@pytest.mark.parametrize(("name", "cache"), [(name, cache) for name, caches in CACHES.items() for cache in caches])
def test_training_is_that_of_the_plain_model(name: str, cache: str, same: Any) -> None:
    make, pattern = MODELS[name]

    def build() -> nn.Module:
        model = make()
        _decorate(model, pattern)
        assert _decorated
        return model.train()

    same(build, _step, lambda: (cache,), steps=2)
