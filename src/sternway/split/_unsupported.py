"""Node kinds that cannot be split: found before anything is computed, each with what to do instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import Parameter

from sternway.errors import SplitError

if TYPE_CHECKING:
    from sternway.split._pending import Pending


def _reentrant_checkpoint(node: Any) -> None:
    raise SplitError(
        "a region under reentrant checkpointing cannot be split: its backward is a whole backward of its own",
        got="torch.utils.checkpoint.checkpoint(..., use_reentrant=True) in the forward",
        fix="pass use_reentrant=False",
    )


def _fsdp(node: Any) -> None:
    if node.param_group.reduce_grads or node.param_group.reshard_after_backward:
        raise _early_fsdp()


def refuse_resharded(pending: Pending) -> None:
    """Raise SplitError if FSDP freed a deferred parameter at the end of I, as it does where no input needed a gradient.

    There no node of the graph shows FSDP beforehand. Its gradient, computed in W, would be lost.
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        for parameter in pending.deferred:
            if parameter.numel() and type(parameter) is Parameter and not parameter.untyped_storage().nbytes():
                raise _early_fsdp()


def _early_fsdp() -> SplitError:
    return SplitError(
        "FSDP must not reduce or reshard at the end of I, when the weight gradients are yet to come",
        got="a fully_shard module set to do so",
        fix="before I, call set_requires_gradient_sync(False), set_reshard_after_backward(False) and "
        "set_is_last_backward(False) on it, and reduce after the last W, as torch.distributed.pipelining does",
    )


def _static_ddp(node: Any) -> None:
    reducer_state = getattr(node, "ddp_weakref", lambda: None)()
    if reducer_state is not None and reducer_state.static_graph:
        raise SplitError(
            "DDP with static_graph reduces at the end of the first backward, before W",
            got="DistributedDataParallel(..., static_graph=True)",
            fix="leave static_graph out",
        )


UNSUPPORTED: dict[str, Callable[[Any], None]] = {
    "CheckpointFunctionBackward": _reentrant_checkpoint,
    "RegisterPostBackwardFunctionBackward": _fsdp,
    "_DDPSinkBackward": _static_ddp,
}
