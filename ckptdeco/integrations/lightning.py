"""The `Trainer` of Lightning: one callback. Needs the package lightning or pytorch_lightning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ckptdeco.extras import MissingExtraError
from ckptdeco.integrations.modules import DecoratedLayers, decorate
from ckptdeco.integrations.selection import LayerSelector
from ckptdeco.integrations.text import as_policy
from ckptdeco.policy import Policy

try:
    from lightning.pytorch.callbacks import Callback
except ImportError:
    try:
        from pytorch_lightning.callbacks import Callback
    except ImportError as error:
        raise MissingExtraError(["lightning"], "lightning") from error

__all__ = ["CheckpointPolicyCallback"]


class CheckpointPolicyCallback(Callback):  # type: ignore[misc]
    """Fit under a policy: ``Trainer(callbacks=[CheckpointPolicyCallback("segment=2")])``.

    While fitting, the layers of the module are decorated, and the policy is active during each training batch.

    Args:
        policy: a policy, or how it reads as text: ``"segment=2, levels=2"``.
        layers: as for `ckptdeco.decorate`.

    Raises:
        PolicyError: the text is no policy; at the beginning of fitting, if no layers are found.
    """

    def __init__(self, policy: Policy | str, layers: LayerSelector | Sequence[LayerSelector] = "auto") -> None:
        self.policy = as_policy(policy)
        self.layers = layers
        self._decorated: DecoratedLayers | None = None
        self._is_active = False

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Decorate the layers."""
        self._decorated = decorate(pl_module, self.layers)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """The policy is active from here."""
        self._leave()
        self.policy.__enter__()
        self._is_active = True

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """And to here."""
        self._leave()

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Leave the module as it was."""
        self._detach()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Leave the module as it was."""
        self._detach()

    def _leave(self) -> None:
        if self._is_active:
            self._is_active = False
            self.policy.__exit__(None, None, None)

    def _detach(self) -> None:
        self._leave()
        if self._decorated is not None:
            self._decorated.undecorate()
            self._decorated = None
