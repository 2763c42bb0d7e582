"""A policy that goes with a model: active while its forward runs, whoever calls it, on whichever thread.

Backward never looks at the policy, so this is all that a trainer of another library needs. It is done with hooks on the
model: nothing else changes, an exception in forward leaves no policy behind, and replicas of the model have it, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from ckptdeco.integrations.modules import decorate
from ckptdeco.integrations.selection import LayerSelector
from ckptdeco.integrations.text import as_policy
from ckptdeco.policy import Policy

__all__ = ["Attachment", "attach"]


class Attachment:
    """A model's layers and policy, until `detach`; also a context manager that detaches at its end."""

    def __init__(self, model: nn.Module, policy: Policy, layers: LayerSelector | Sequence[LayerSelector]) -> None:
        self.policy = policy
        self.layers = decorate(model, layers)
        self._handles = [
            model.register_forward_pre_hook(self._enter, prepend=True),
            model.register_forward_hook(self._leave, always_call=True),
        ]

    def _enter(self, model: nn.Module, args: Any) -> None:
        self.policy.__enter__()

    def _leave(self, model: nn.Module, args: Any, output: Any) -> None:
        self.policy.__exit__(None, None, None)

    def detach(self) -> None:
        """The model is as it was before, also if this is done twice."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self.layers.undecorate()

    def __enter__(self) -> Attachment:
        return self

    def __exit__(self, *error: object) -> None:
        self.detach()


def attach(
    model: nn.Module, policy: Policy | str, layers: LayerSelector | Sequence[LayerSelector] = "auto"
) -> Attachment:
    """Decorate the layers of `model`, and make `policy` active whenever its forward runs.

    For training loops that one cannot put a `with` block around. A policy that the loop enters itself lies outside of
    it, hence has no effect within the model.

    Args:
        model: the model.
        policy: a policy, or how it reads as text: ``"segment=2, levels=2"``.
        layers: as for `ckptdeco.decorate`; if layers are decorated in their class already, these are taken.

    Returns:
        An `Attachment`; call its `detach`, or use it as a context manager, to have the model as it was.

    Raises:
        PolicyError: the text is no policy, or no layers were found.

    Example:
        >>> import torch
        >>> from ckptdeco.integrations import attach
        >>> encoder = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 3)
        >>> with attach(encoder, "segment=2"):
        ...     encoder(torch.ones(2, 5, 8)).sum().backward()
    """
    return Attachment(model, as_policy(policy), layers)
