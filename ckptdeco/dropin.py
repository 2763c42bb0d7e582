"""`checkpoint()`: the drop-in for `torch.utils.checkpoint.checkpoint`, on ckptdeco's engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint as _torch_checkpoint
from torch.utils.checkpoint import noop_context_fn

from ckptdeco import context
from ckptdeco.engine.call import Inputs, Options, run
from ckptdeco.engine.closures import rerunnable
from ckptdeco.engine.contexts import ContextFn, InContexts
from ckptdeco.engine.dataflow import Upstream
from ckptdeco.engine.layer import layer_info
from ckptdeco.engine.record import PassLog, Record
from ckptdeco.engine.torch_private import checkpoint_switches, is_plain_autograd
from ckptdeco.errors import PolicyError
from ckptdeco.schedule.actions import Action

__all__ = ["checkpoint"]


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    use_reentrant: bool = False,
    preserve_rng_state: bool = True,
    determinism_check: str = "default",
    context_fn: ContextFn = noop_context_fn,
    debug: bool = False,
    early_stop: bool = True,
    **kwargs: Any,
) -> Any:
    """Call `function` now, drop what autograd saved in it, and recompute it in backward.

    A drop-in for `torch.utils.checkpoint.checkpoint` with `use_reentrant=False`; needs no policy and no decorator.
    Tensors in nested containers and in keyword arguments are kept, version-checked and seen by saved-tensor hooks.

    Args:
        function: what to run; takes `args` and `kwargs`.
        *args: its arguments, tensors or not.
        use_reentrant: True delegates to torch's reentrant variant, with its restrictions.
        preserve_rng_state: whether the recompute sees the random numbers that forward saw.
        determinism_check: `"default"` compares metadata of saved tensors, `"values"` values too, `"none"` skips the
            comparison by value of first recomputes.
        context_fn: returns two context managers, entered around the forward and around the recompute, such as those
            of `torch.utils.checkpoint.create_selective_checkpoint_contexts`.
        debug: whether errors show the first operation that differs; overridden by torch's
            `set_checkpoint_debug_enabled` around the call.
        early_stop: whether a recompute stops as soon as the last tensor that is needed exists; overridden by torch's
            `set_checkpoint_early_stop` around the call.
        **kwargs: keyword arguments of `function`. One that is named like an option here is reached by
            `functools.partial`, or by the decorator, which has no options at the call.

    Returns:
        What `function` returned.

    Raises:
        CheckpointError: in backward, when the recompute does not match forward.
        PolicyError: `function` cannot be called, or an option has a value that it cannot have.

    Cost:
        Memory: the tensors among the arguments stay; what `function` saves for backward does not.
        Compute: one more forward in backward, less what early stop skips.

    Example:
        >>> import torch, ckptdeco
        >>> x = torch.ones(3, requires_grad=True)
        >>> ckptdeco.checkpoint(lambda x: x.exp().sin(), x).sum().backward()
        >>> bool(x.grad.isfinite().all())
        True

    References:
        `torch.utils.checkpoint.checkpoint`. Differs: keyword and nested tensors are kept like positional ones, and
        buffers, module state and values are protected or compared; the page of limits lists the rest.
    """
    if use_reentrant:
        if debug or context_fn is not noop_context_fn:
            raise PolicyError(
                "use_reentrant", True, "`context_fn` or `debug` is only supported when use_reentrant=False",
                "leave use_reentrant out",
            )  # fmt: skip
        return _torch_checkpoint(function, *args, use_reentrant=True, preserve_rng_state=preserve_rng_state, **kwargs)
    if not callable(function):
        raise PolicyError("function", function, "only something callable can be checkpointed", "pass the layer itself")
    if determinism_check not in ("default", "values", "none"):
        raise PolicyError(
            "determinism_check", determinism_check, "is not a known check", "use 'default', 'values' or 'none'"
        )
    if torch.compiler.is_dynamo_compiling():  # torch.compile knows its own, and recomputes as it plans
        if context_fn is not noop_context_fn:
            kwargs["context_fn"] = context_fn
        check = "default" if determinism_check == "values" else determinism_check
        return _torch_checkpoint(
            function, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state, determinism_check=check,
            debug=debug, early_stop=early_stop, **kwargs,
        )  # fmt: skip
    is_switched = checkpoint_switches()[1]
    if context_fn is not noop_context_fn and (debug if is_switched is None else is_switched):
        raise PolicyError(
            "debug", True, "is incompatible with non-default context_fn, which may hide operators",
            "leave one of them out",
        )  # fmt: skip
    if not torch.is_grad_enabled() or not is_plain_autograd():
        return function(*args, **kwargs)
    body = rerunnable(function)
    entry = context.active()
    if entry is not None:  # decorated layers inside: as in a decorated layer (R6), whether or not the policy is left
        body = context.Within(body, context.Entry(entry.policy, outer=entry) if entry.policy.nested else None)
    if context_fn is not noop_context_fn:
        body = InContexts(body, context_fn)
    bound = getattr(function, "__self__", None)
    is_layer = isinstance(bound, torch.nn.Module)
    layer = bound if is_layer else function if isinstance(function, torch.nn.Module) else None
    info = layer_info(layer if layer is not None else getattr(function, "__code__", function), function)
    inputs = Inputs(args, kwargs)
    return run(
        body,
        inputs,
        Upstream(len(inputs.tensors)),
        Action.DROP_KEEP,
        info=info,
        options=Options(preserve_rng_state, determinism_check, early_stop, debug),
        at_backward=_alone,
        limit=1,
        chain=None,
        position=0,
        record=Record(info.name, 0, Action.DROP_KEEP, PassLog(None)),
    )


def _alone(first: int, target: int) -> tuple[Action, ...]:
    return (Action.SAVE,)
