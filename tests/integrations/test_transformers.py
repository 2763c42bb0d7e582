"""Models of transformers train under a policy, after one line, bit for bit as they train plain."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import ckptdeco
from tests.support.oracle import assert_same
from tests.support.subject import PolicySpec, spec

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")

from tests.integrations.hf_models import MODELS  # noqa: E402

POLICIES = (spec(segment=1), spec(segment=2), spec(segment=3), spec(every=2), spec(segment=2, levels=2))


def step(model: nn.Module, inputs: dict[str, Any], context: Any) -> Any:
    """One training step; the loss, and the logits if there are any."""
    with context():
        out = model(**inputs)
    out.loss.backward()
    return out.loss, out.get("logits")


@pytest.mark.parametrize("under", POLICIES, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_training_is_exact(name: str, under: PolicySpec) -> None:
    build, make_batch = MODELS[name]
    made = under.make()

    def decorated() -> nn.Module:
        model = build().train()
        ckptdeco.decorate(model)
        return model

    assert_same(decorated, step, make_batch, lambda: made, steps=3)
    calls = ckptdeco.explain().calls
    assert len(calls) >= 2
    assert sum(call.n_recomputed for call in calls) >= len(calls) // 2, ckptdeco.explain()
    assert not [call.why for call in calls if "chain broken" not in call.why and call.why], ckptdeco.explain()


@pytest.mark.parametrize("name", ["bert", "llama", "t5"])
def test_keys_and_saved_model_are_those_of_the_plain_model(name: str, tmp_path: Any) -> None:
    build, _ = MODELS[name]
    model: Any = build()
    keys = list(model.state_dict())
    ckptdeco.decorate(model)
    assert list(model.state_dict()) == keys
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert all(
        torch.equal(a, b) for a, b in zip(model.state_dict().values(), loaded.state_dict().values(), strict=True)
    )
    assert not any("forward" in vars(module) for module in loaded.modules())


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5"])
def test_generation_between_steps_is_that_of_the_plain_model(name: str) -> None:
    build, make_batch = MODELS[name]

    def decorated() -> nn.Module:
        model = build()
        ckptdeco.decorate(model)
        return model

    def train_and_generate(model: Any, inputs: dict[str, Any], context: Any) -> Any:
        with context():
            loss = model.train()(**inputs).loss
            loss.backward()
            tokens = model.eval().generate(input_ids=inputs["input_ids"], max_new_tokens=4, do_sample=True)
        return loss, tokens

    made = ckptdeco.policy(segment=2)
    assert_same(decorated, train_and_generate, make_batch, lambda: made, steps=3)


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_models_own_checkpointing_is_not_doubled(name: str) -> None:
    model: Any = MODELS[name][0]()
    model.gradient_checkpointing_enable()
    with pytest.raises(ckptdeco.CheckpointError, match=r"model\.activation_checkpointing_disable\(\)"):
        ckptdeco.decorate(model)
    model.gradient_checkpointing_disable()
    assert len(ckptdeco.decorate(model)) == 3
