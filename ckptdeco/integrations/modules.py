"""`decorate` and `undecorate`: the decorator for the layers of a model that nobody wants to edit.

The decorated forward is set on the layer instances, so their class, and other models of it, stay as they are.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType

from torch import nn

from ckptdeco.decorator import LayerForward, is_decorated
from ckptdeco.errors import PolicyError
from ckptdeco.integrations.refusals import check_not_checkpointed
from ckptdeco.integrations.selection import LayerSelector, select

__all__ = ["DecoratedLayers", "decorate", "undecorate"]


class DecoratedLayers(Mapping[str, nn.Module]):
    """What `decorate` matched: layers by qualified name; as a context manager it undecorates the model at the end.

    Holds the model weakly.
    """

    def __init__(self, model: nn.Module, names: Sequence[str], fresh: Sequence[str]) -> None:
        self._model = weakref.ref(model)
        self._names = tuple(names)
        self._fresh = tuple(fresh)  # those that were not decorated before

    def __getitem__(self, name: str) -> nn.Module:
        model = self._model()
        if name not in self._names or model is None:
            raise KeyError(name)
        return model.get_submodule(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __enter__(self) -> DecoratedLayers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.undecorate()

    def undecorate(self) -> None:
        """Take back what this call of `decorate` did, and no more."""
        model = self._model()
        if model is not None:
            for name in self._fresh:
                _undecorate_layer(name, model.get_submodule(name))

    def __repr__(self) -> str:
        model = self._model()
        kinds = {} if model is None else {type(layer).__name__: 0 for layer in self.values()}
        return f"<{len(self._names)} decorated layers: {', '.join(kinds)}; {', '.join(self._names)}>"


def decorate(model: nn.Module, layers: LayerSelector | Sequence[LayerSelector] = "auto") -> DecoratedLayers:
    """Make the layers of `model` checkpointable without editing it: as `@checkpointable` on their forward would.

    Only these instances change, and only in their attribute `forward`: classes, parameter names, state_dict keys, hooks
    and signatures stay. Copies of the model are decorated, too. Layers that are decorated already stay as they are.

    Args:
        model: the model, or a part of one.
        layers: a class, a name glob (``"encoder.layers.*"``), a predicate on modules, or several of these; of nested
            matches the outermost is taken. ``"auto"`` takes the layers that transformers marks for its own gradient
            checkpointing, else the blocks of which a list or `nn.Sequential` holds several of a class; stages are
            looked into.

    Returns:
        The layers by name; usable as a context manager that undecorates them at its end.

    Raises:
        PolicyError: nothing matches, or a layer is checkpointed by other means already (the error says how to switch
            that off).

    Cost:
        Memory: one small object a layer. Compute: that of `checkpointable`.

    Example:
        >>> import torch, ckptdeco
        >>> encoder = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 3)
        >>> list(ckptdeco.decorate(encoder))
        ['layers.0', 'layers.1', 'layers.2']
        >>> with ckptdeco.policy(segment=1):
        ...     encoder(torch.ones(2, 5, 8)).sum().backward()
    """
    if not isinstance(model, nn.Module):
        raise PolicyError("model", model, "only a torch.nn.Module has layers", "pass the model itself")
    found = select(model, layers)
    for name, layer in found.items():
        check_not_checkpointed(model, name, layer)
    fresh = [name for name, layer in found.items() if not is_decorated(layer.forward)]
    for name in fresh:
        found[name].forward = LayerForward(found[name], found[name].forward, name)
    return DecoratedLayers(model, list(found), fresh)


def undecorate(model: nn.Module) -> None:
    """Take back what `decorate` did to `model` and everything in it; layers decorated in their class stay so.

    Raises:
        PolicyError: something else replaced a decorated layer's forward since and still calls it.

    Example:
        >>> import torch, ckptdeco
        >>> encoder = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 3)
        >>> layers = ckptdeco.decorate(encoder)
        >>> ckptdeco.undecorate(encoder)
        >>> "forward" in vars(encoder.layers[0])
        False
    """
    for name, layer in model.named_modules():
        _undecorate_layer(name, layer)


def _undecorate_layer(name: str, layer: nn.Module) -> None:
    forward = vars(layer).get("forward")
    if isinstance(forward, LayerForward):
        forward.take_off(layer)
        return
    inner = forward
    for _ in range(8):  # wrappers around wrappers
        inner = getattr(inner, "__wrapped__", None) or getattr(inner, "func", None)
        if inner is None:
            return
        if isinstance(inner, LayerForward):
            raise PolicyError(
                "model",
                name or type(layer).__name__,
                f"its forward was replaced by {forward!r} after it was decorated",
                "take that off first, then undecorate",
            )
