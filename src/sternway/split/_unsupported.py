"""Node kinds that cannot be split: found before anything is computed. The errors say what to do instead."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from sternway._storage import dense_parts
from sternway._torch import async_tensors, parallel
from sternway._torch.compile import COMPILED_NODE
from sternway.errors import SplitError


def _reentrant_checkpoint(node: Any) -> None:
    raise SplitError(
        "a region under reentrant checkpointing cannot be split: its backward is a whole backward of its own",
        got="torch.utils.checkpoint.checkpoint(..., use_reentrant=True) in the forward",
        fix="pass use_reentrant=False",
    )


def _fsdp(node: Any) -> None:
    if parallel.fsdp_ends_backward(node):
        raise _early_fsdp()


def _static_ddp(node: Any) -> None:
    if parallel.ddp_is_static(node):
        raise SplitError(
            "DDP with static_graph cannot be split: it reduces at the end of the first backward, before W",
            got="DistributedDataParallel(..., static_graph=True)",
            fix="leave static_graph out",
        )


def _dropped_gradient(node: Any) -> None:
    if async_tensors.drops_gradient(node):
        raise SplitError(**async_tensors.DROPPED)


def refuse_resharded(deferred: Iterable[Tensor]) -> None:
    """Raise SplitError if FSDP freed a deferred parameter at the end of I; its gradient in W would be lost.

    FSDP does so where no input needed a gradient. No node of the graph shows that beforehand.
    """
    for parameter in deferred:
        parts = [part for part in dense_parts(parameter) if part.numel()]
        if isinstance(parameter, Parameter) and any(not part.untyped_storage().nbytes() for part in parts):
            raise _early_fsdp()


def _early_fsdp() -> SplitError:
    return SplitError(
        "FSDP must not reduce or reshard at the end of I, before the weight gradients are computed",
        got="a fully_shard module set to do so",
        fix="before I, call set_requires_gradient_sync(False), set_reshard_after_backward(False) and "
        "set_is_last_backward(False) on it, and reduce after the last W, as torch.distributed.pipelining does",
    )


UNSUPPORTED: dict[str, Callable[[Any], None]] = {
    parallel.REENTRANT_CHECKPOINT: _reentrant_checkpoint,
    parallel.FSDP_NODE: _fsdp,
    parallel.DDP_NODE: _static_ddp,
    COMPILED_NODE: _dropped_gradient,
}
"""By the node's type name, a check that raises SplitError."""


_SPENT = "sternway: split"  # in a node's metadata, which lives as long as the node


def spend(node: Any) -> None:
    """Mark a cut that the engine did not run, so that a second backward raises as it does elsewhere.

    The engine frees what a node saved when it runs it, and a second backward raises there. Nothing lies below such a
    cut, so nothing else would raise.
    """
    node.metadata[_SPENT] = True
    node.register_prehook(_refuse)


def refuse_spent(node: Any) -> None:
    """Raise SplitError if the node is a cut of an earlier split."""
    if _SPENT in node.metadata:
        _refuse()


def _refuse(*_: Any) -> None:
    raise a_second_time()


def a_second_time() -> SplitError:
    """The error if a graph is used again whose backward has run."""
    return SplitError(
        "Trying to backward through the graph a second time, which cannot be done after a split",
        got="a graph whose backward has run",
        fix="run the forward again",
    )
