"""A policy that goes with a model: `attach`, its text, and the callback for the Trainer of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckptdeco
from ckptdeco.integrations import attach, policy_from_text
from tests.integrations.test_decorate import model, trace_of
from tests.support.layers import batch


@pytest.mark.parametrize(
    ("text", "made"),
    [
        ("segment=2", ckptdeco.policy(segment=2)),
        (" segment=4,levels=2 ", ckptdeco.policy(segment=4, levels=2)),
        ("segment=sqrt, keep_last=1", ckptdeco.policy(segment="sqrt", keep_last=1)),
        ("policy(every=3, early_stop=False)", ckptdeco.policy(every=3, early_stop=False)),
        ("levels='log'", ckptdeco.policy(levels="log")),
        ("off", ckptdeco.policy(None)),
    ],
)
def test_text_reads_as_the_call(text: str, made: Any) -> None:
    assert policy_from_text(text) == made


@pytest.mark.parametrize("text", ["segment", "segment=", "=2", "segment=1, segment=2", "segmant=2", "segment=0"])
def test_text_that_is_no_policy_is_an_error(text: str) -> None:
    with pytest.raises(ckptdeco.CheckpointError, match="Fix:"):
        policy_from_text(text)


def test_attached_policy_drops_and_recomputes_and_leaves_with_the_attachment() -> None:
    plain = model()
    before = trace_of(plain)
    with attach(plain, "segment=2"):
        plain(batch()).sum().backward()
        calls = ckptdeco.explain().calls
        assert [call.n_recomputed for call in calls] == [1, 1, 1, 1]
        assert all(call.dropped_bytes for call in calls)
    after = trace_of(plain)
    assert after == before
    assert not plain._forward_hooks
    assert not plain._forward_pre_hooks


def test_attached_policy_is_left_when_forward_raises() -> None:
    plain = model()
    with attach(plain, ckptdeco.policy(segment=1)), pytest.raises(TypeError):
        plain(None)
    decorated = ckptdeco.checkpointable(lambda x: x.tanh())
    n_before = len(ckptdeco.explain().calls)
    decorated(batch()).sum().backward()
    assert len(ckptdeco.explain().calls) == n_before


def _trained(callbacks: list[Any], folder: Path, with_adapter: bool) -> tuple[list[torch.Tensor], nn.Module]:
    transformers = pytest.importorskip("transformers")
    from tests.integrations.hf_models import MODELS

    torch.manual_seed(0)
    build, make_batch = MODELS["bert"]
    net: Any = build()
    if with_adapter:
        peft = pytest.importorskip("peft")
        net = peft.get_peft_model(net, peft.LoraConfig(r=2, target_modules=["query", "value"], lora_dropout=0.1))
    data = [{key: value[0] for key, value in make_batch().items()} for _ in range(6)]
    arguments = transformers.TrainingArguments(
        str(folder), per_device_train_batch_size=2, num_train_epochs=1, report_to=[], save_strategy="no", use_cpu=True,
        disable_tqdm=True, seed=3,
    )  # fmt: skip
    transformers.Trainer(model=net, args=arguments, train_dataset=data, callbacks=callbacks).train()
    return [parameter.detach().clone() for parameter in net.parameters()], net


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("with_adapter", [False, True])
def test_callback_trains_to_the_same_weights_and_does_checkpoint(tmp_path: Path, with_adapter: bool) -> None:
    pytest.importorskip("transformers")
    from ckptdeco.integrations.transformers import CheckpointPolicyCallback

    expected, _ = _trained([], tmp_path, with_adapter)
    weights, net = _trained([CheckpointPolicyCallback("segment=2")], tmp_path, with_adapter)
    assert all(map(torch.equal, expected, weights))
    assert [call.n_recomputed for call in ckptdeco.explain().calls] == [1, 1, 1]
    assert not net._forward_hooks
    assert not any("forward" in vars(module) for module in net.modules())


@pytest.mark.filterwarnings("ignore")
def test_callback_refuses_a_model_that_checkpoints_itself() -> None:
    pytest.importorskip("transformers")
    from ckptdeco.integrations.transformers import CheckpointPolicyCallback
    from tests.integrations.hf_models import MODELS

    net: Any = MODELS["bert"][0]()
    net.gradient_checkpointing_enable()
    with pytest.raises(ckptdeco.CheckpointError, match=r"model\.activation_checkpointing_disable\(\)"):
        CheckpointPolicyCallback("segment=2").on_train_begin(None, None, None, model=net)
