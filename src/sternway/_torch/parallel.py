"""What data parallelism, checkpoints and torch.distributed.pipelining put into a backward.

No probe here starts a process group. Where torch is built without torch.distributed, there is nothing to probe.
"""

from __future__ import annotations

import inspect
import weakref
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils import checkpoint

from sternway._torch.probe import probe

REENTRANT_CHECKPOINT = "CheckpointFunctionBackward"
FSDP_NODE = "RegisterPostBackwardFunctionBackward"
DDP_NODE = "_DDPSinkBackward"
STAGE_FUNCTIONS = {
    "stage_backward": ["stage_output", "output_grads", "input_values", "outputs_with_grads_idxs"],
    "stage_backward_input": ["stage_outputs_or_loss", "output_grads", "input_values", "weights"],
    "stage_backward_weight": ["weights", "param_groups", "retain_graph"],
}
"""torch.distributed.pipelining's functions for a stage's backward, with their parameters."""


def fsdp_ends_backward(node: Any) -> bool:
    """Whether a ``fully_shard`` module, by its ``FSDP_NODE``, reduces or reshards when this backward ends."""
    group = node.param_group
    return bool(group.reduce_grads or group.reshard_after_backward)


def ddp_is_static(node: Any) -> bool:
    """Whether a DDP module, by its ``DDP_NODE``, was made with ``static_graph=True``."""
    module = node.ddp_weakref()
    return module is not None and bool(module.static_graph)


def pipelining() -> tuple[ModuleType, ModuleType]:
    """torch.distributed.pipelining's module of stages, and that of their backward functions.

    A stage looks the functions up in the first; the second keeps torch's own.
    """
    from torch.distributed.pipelining import _backward, stage

    return stage, _backward


def in_process_group() -> bool:
    """Whether torch.distributed runs: without it there is no DDP and no FSDP."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


@probe(REENTRANT_CHECKPOINT, expected="is the node of a reentrant checkpoint", features=("split",))
def _reentrant() -> bool:
    x = torch.ones(2, requires_grad=True)
    plain = inspect.unwrap(checkpoint.checkpoint)  # what it is wrapped in would import Dynamo
    output = plain(torch.exp, x, use_reentrant=True, preserve_rng_state=False)
    return type(output.grad_fn).__name__ == REENTRANT_CHECKPOINT


@probe(
    f"{FSDP_NODE}: param_group.reduce_grads, reshard_after_backward",
    expected="show whether FSDP acts at the end of a backward",
    features=("split.parallel",),
)
def _fsdp() -> bool:
    if not torch.distributed.is_available():
        return True
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup, RegisterPostBackwardFunction

    group = SimpleNamespace(reduce_grads=False, reshard_after_backward=True)
    (output,) = RegisterPostBackwardFunction.apply(group, torch.ones(1, requires_grad=True))
    node = output.grad_fn
    # The real group needs devices and ranks to be made: what its code writes is read instead.
    made = {"reduce_grads", "reshard_after_backward"} <= set(FSDPParamGroup.__init__.__code__.co_names)
    set_by = ("reduce_grads" in FSDPModule.set_requires_gradient_sync.__code__.co_names) and (
        "reshard_after_backward" in FSDPModule.set_reshard_after_backward.__code__.co_names
    )
    return made and set_by and type(node).__name__ == FSDP_NODE and fsdp_ends_backward(node)


@probe(
    f"{DDP_NODE}: ddp_weakref().static_graph",
    expected="show whether DDP takes the graph for static",
    features=("split.parallel",),
)
def _ddp() -> bool:
    if not torch.distributed.is_available():
        return True
    from torch.nn.parallel import DistributedDataParallel
    from torch.nn.parallel.distributed import _DDPSink

    class StaticDDP:
        _ddp_sink_clone = False
        static_graph = True

    module = StaticDDP()
    output: Tensor
    (output,) = _DDPSink.apply(weakref.ref(module), torch.ones(1, requires_grad=True).exp())
    made = "static_graph" in DistributedDataParallel.__init__.__code__.co_names
    return made and type(output.grad_fn).__name__ == DDP_NODE and ddp_is_static(output.grad_fn)


@probe(
    "torch.distributed.pipelining: stage_backward, stage_backward_input, stage_backward_weight",
    expected="are functions of the parameters that we know, which stages look up in their own module",
    features=("split.install",),
)
def _pipelining() -> bool:
    if not torch.distributed.is_available():
        return True
    stage, backward = pipelining()
    for name, parameters in STAGE_FUNCTIONS.items():
        found = list(inspect.signature(getattr(backward, name)).parameters)
        if found != parameters or not hasattr(stage, name):
            raise TypeError(f"{name} has the parameters {', '.join(found)}, not {', '.join(parameters)}")
    return True
