"""What an operation that may be left out of a recompute did besides returning a result (`save=`)."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ckptdeco.engine.attributes import signature
from ckptdeco.engine.fingerprint import fingerprint
from ckptdeco.engine.host_rng import global_streams
from ckptdeco.engine.layer import Protection, layer_info
from ckptdeco.engine.rng import Draws, Watch, capture
from ckptdeco.engine.state import Snapshot

__all__ = ["Effects"]

_SMALL = 1 << 16  # bytes of an argument without grad up to which its values are compared: kernels write buffers unseen


class Effects:
    """Looks at what an operation could change, before it runs and after.

    Args:
        function: the function of torch, or the forward of a layer.
        args: its arguments.
        kwargs: likewise.
        arguments: the tensors among them.
        watch: of the call around it, whose random number streams it may draw from; None if it looks at none.
        is_layer: whether it is a layer, which has state.
    """

    __slots__ = ("_arguments", "_layer", "_marks", "_signature", "_snapshot", "_streams", "_values", "_whole")

    def __init__(
        self, function: Any, args: Any, kwargs: Any, arguments: list[Tensor], watch: Watch | None, is_layer: bool
    ) -> None:
        self._streams = () if watch is None else (*global_streams(), *watch.others)
        self._marks = [stream.mark() for stream in self._streams]
        self._whole = args, kwargs
        self._signature = signature(self._whole)
        self._arguments = [t for t in arguments if not t.requires_grad and t.nbytes <= _SMALL]
        layer = getattr(function, "__self__", None) if is_layer else None
        self._layer = layer if isinstance(layer, nn.Module) else None
        self._snapshot: Snapshot | None = None
        if self._layer is not None:
            tree = layer_info(self._layer, function).tree
            if tree is not None:
                self._snapshot = Snapshot(tree, self._layer, Protection())
                self._arguments += [t for t in self._snapshot.tensors if not isinstance(t, nn.Parameter)]
        self._values = [fingerprint(tensor) for tensor in self._arguments]

    def are_seen(self) -> bool:
        """Whether it changed an argument, or state of its own: code after it may read that."""
        if self._signature != signature(self._whole):
            return True
        if self._values != [fingerprint(tensor) for tensor in self._arguments]:
            return True
        snapshot = self._snapshot
        if snapshot is None:
            return False
        is_changed = snapshot.has_new_tensors() or snapshot.has_other_children() or snapshot.has_written_parameters()
        return is_changed or bool(snapshot.written_buffers()) or bool(snapshot.attribute_change())

    def drawn(self) -> Draws:
        """The streams that it drew from, as it left them."""
        moved = [stream for stream, mark in zip(self._streams, self._marks, strict=True) if stream.mark() != mark]
        return capture(moved)
