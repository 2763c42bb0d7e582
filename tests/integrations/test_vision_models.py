"""Models of timm and diffusers, ResNets and PyTorch's Transformer train under a policy bit for bit as plain."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

import ckptdeco
from tests.support.oracle import assert_same, total
from tests.support.subject import PolicySpec, spec

pytestmark = pytest.mark.filterwarnings("ignore")

from tests.integrations.vision_models import MODELS  # noqa: E402

POLICIES = (spec(segment=1), spec(segment=2), spec(segment=3), spec(every=2), spec(segment=2, levels=2))


def step(model: nn.Module, inputs: dict[str, Any], context: Any) -> Any:
    with context():
        outputs = model(**inputs)
    total(outputs).backward()
    return outputs


@pytest.mark.parametrize("under", POLICIES, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_training_is_exact(name: str, under: PolicySpec) -> None:
    made = under.make()

    def decorated() -> nn.Module:
        model = MODELS[name].build().train()
        ckptdeco.decorate(model)
        return model

    assert_same(decorated, step, MODELS[name].make_batch, lambda: made, steps=3)
    calls = ckptdeco.explain().calls
    assert len(calls) == len(MODELS[name].blocks)
    assert sum(call.n_recomputed for call in calls) >= len(calls) // 2, ckptdeco.explain()
    assert not [call.why for call in calls if "chain broken" not in call.why and call.why], ckptdeco.explain()


@pytest.mark.parametrize("name", MODELS)
def test_auto_takes_the_blocks_that_the_library_repeats(name: str) -> None:
    assert sorted(ckptdeco.decorate(MODELS[name].build())) == sorted(MODELS[name].blocks)
