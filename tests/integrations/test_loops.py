"""Lightning and accelerate: their real loops train to the same weights with a policy, and leave the model as it was."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ckptdeco
from tests.integrations.test_decorate import model
from tests.support.layers import DIM

pytestmark = pytest.mark.filterwarnings("ignore")


def data(n: int = 12) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(n, DIM, generator=generator), torch.randn(n, DIM, generator=generator))


class Lightning:
    """A module of Lightning and its Trainer, made when the package is there."""

    def __init__(self) -> None:
        pl = pytest.importorskip("lightning.pytorch")
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        from ckptdeco.integrations.lightning import CheckpointPolicyCallback

        self.callback = CheckpointPolicyCallback
        self.trainer = pl.Trainer

        class Module(pl.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.net, self.norm = model(), nn.BatchNorm1d(DIM)
                self.fails_at = -1

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.norm(self.net(x))

            def training_step(self, batch: Any, index: int) -> torch.Tensor:
                if index == self.fails_at:
                    raise ZeroDivisionError
                return nn.functional.mse_loss(self(batch[0]), batch[1])

            def validation_step(self, batch: Any, index: int) -> None:
                self(batch[0])

            def configure_optimizers(self) -> torch.optim.Optimizer:
                return torch.optim.AdamW(self.parameters(), lr=1e-2)

        self.module = Module

    def fit(self, net: nn.Module, *callbacks: Any, **options: Any) -> None:
        torch.manual_seed(5)
        trainer = self.trainer(
            max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, num_sanity_val_steps=0, callbacks=list(callbacks), **options,
        )  # fmt: skip
        trainer.fit(net, DataLoader(data(), batch_size=3, shuffle=True), DataLoader(data(3), batch_size=3))


@pytest.fixture
def lightning() -> Lightning:
    return Lightning()


def is_clean(net: nn.Module) -> bool:
    return not any("forward" in vars(module) for module in net.modules())


@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2}, {"precision": "bf16-mixed"}])
@pytest.mark.parametrize("policy", ["segment=1", "segment=2, levels=2", ckptdeco.policy(every=2)])
def test_lightning_trains_to_the_same_weights(lightning: Lightning, policy: Any, options: dict[str, Any]) -> None:
    weights = []
    for callbacks in ([], [lightning.callback(policy)]):
        torch.manual_seed(0)
        net = lightning.module()
        lightning.fit(net, *callbacks, **options)
        weights.append(list(net.state_dict().values()))
    assert all(map(torch.equal, *weights))
    assert len(weights[0]) > 10
    assert sum(call.n_recomputed for call in ckptdeco.explain().calls) >= 2
    assert is_clean(net)


def test_lightning_names_the_layers(lightning: Lightning) -> None:
    lightning.fit(lightning.module(), lightning.callback("segment=1", layers="net.layers.[12]"))
    assert [call.name for call in ckptdeco.explain().calls] == ["net.layers.1", "net.layers.2"]


def test_exception_in_a_step_leaves_lightnings_module_as_it_was(lightning: Lightning) -> None:
    net = lightning.module()
    net.fails_at = 1
    with pytest.raises(ZeroDivisionError):
        lightning.fit(net, lightning.callback("segment=2"))
    assert is_clean(net)


def test_lightning_fits_twice_with_one_callback(lightning: Lightning) -> None:
    net, callback = lightning.module(), lightning.callback("segment=2")
    for _ in range(2):
        lightning.fit(net, callback)
        assert is_clean(net)


def test_lightning_without_layers_is_an_error(lightning: Lightning) -> None:
    net = lightning.module()
    net.net = nn.Linear(DIM, DIM)
    with pytest.raises(ckptdeco.CheckpointError, match="no repeated blocks"):
        lightning.fit(net, lightning.callback("segment=2"))
    with pytest.raises(ckptdeco.CheckpointError, match="Fix:"):
        lightning.callback("segmant=2")


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("options", [{}, {"gradient_accumulation_steps": 2}, {"mixed_precision": "bf16"}])
def test_accelerate_trains_to_the_same_weights(order: str, options: dict[str, Any]) -> None:
    accelerate = pytest.importorskip("accelerate")
    from accelerate.state import AcceleratorState

    def train(policy: Any, is_decorated: bool) -> list[torch.Tensor]:
        AcceleratorState._reset_state(True)
        torch.manual_seed(0)
        accelerator = accelerate.Accelerator(cpu=True, **options)
        net: Any = model()
        if is_decorated and order == "before":
            ckptdeco.decorate(net)
        net, optimizer, loader = accelerator.prepare(
            net, torch.optim.AdamW(net.parameters(), lr=1e-2), DataLoader(data(), batch_size=3, shuffle=True)
        )
        if is_decorated and order == "after":
            ckptdeco.decorate(net)
        with policy:
            for _ in range(2):
                for x, y in loader:
                    with accelerator.accumulate(net):
                        accelerator.backward(nn.functional.mse_loss(net(x), y))
                        accelerator.clip_grad_norm_(net.parameters(), 1.0)
                        optimizer.step()
                        optimizer.zero_grad()
        ckptdeco.undecorate(net)
        AcceleratorState._reset_state(True)
        return list(net.state_dict().values())

    expected = train(ckptdeco.policy(None), False)
    assert all(map(torch.equal, expected, train(ckptdeco.policy(segment=2), True)))
    assert [call.n_recomputed for call in ckptdeco.explain().calls] == [1] * 4
