"""The `Trainer` of transformers: one callback. Needs the package transformers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ckptdeco.extras import MissingExtraError
from ckptdeco.integrations.attached import Attachment, attach
from ckptdeco.integrations.selection import LayerSelector
from ckptdeco.integrations.text import as_policy
from ckptdeco.policy import Policy

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise MissingExtraError(["transformers"], "transformers") from error

__all__ = ["CheckpointPolicyCallback"]


class CheckpointPolicyCallback(TrainerCallback):  # type: ignore[misc]
    """Train under a policy: ``Trainer(..., callbacks=[CheckpointPolicyCallback("segment=2")])``.

    At the beginning of training the model's layers are decorated, and the policy is active whenever the model's forward
    runs; at the end the model is as it was. If training ends with an exception, the next training begins with a
    clean model, or call `detach`. With peft, `enable_input_require_grads` is not needed.

    Args:
        policy: a policy, or how it reads as text: ``"segment=2, levels=2"``.
        layers: as for `ckptdeco.decorate`.

    Raises:
        PolicyError: the text is no policy; at the beginning of training, if no layers are found or if
            ``gradient_checkpointing=True`` is among the training arguments.
    """

    def __init__(self, policy: Policy | str, layers: LayerSelector | Sequence[LayerSelector] = "auto") -> None:
        self.policy = as_policy(policy)
        self.layers = layers
        self._attachment: Attachment | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Attach the policy to the model."""
        self.detach()
        self._attachment = attach(model, self.policy, self.layers)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave the model as it was."""
        self.detach()

    def detach(self) -> None:
        """Leave the model as it was, if training did not come to its end."""
        if self._attachment is not None:
            self._attachment.detach()
            self._attachment = None
