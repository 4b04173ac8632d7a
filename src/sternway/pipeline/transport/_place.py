"""Where do the stages compute, and can the processes talk from there?"""

from __future__ import annotations

import atexit
import os
from collections.abc import Mapping, Sequence
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from sternway._torch import distributed
from sternway.errors import PipelineError

TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""The variables of the environment by which processes find each other, as torchrun sets them."""

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


def join_processes() -> None:
    """Initialize torch.distributed, if that is still to be done and torchrun started this process.

    Raises:
        PipelineError: if torchrun did not.
    """
    if dist.is_initialized():
        return
    missing = [name for name in TORCHRUN if name not in os.environ]
    if missing:
        raise PipelineError(
            "a pipeline over several processes needs torch.distributed",
            got="no process group",
            fix="start with torchrun, or call torch.distributed.init_process_group(), or pass LocalTransport()",
        )
    dist.init_process_group("cpu:gloo,cuda:nccl" if distributed.has_nccl() else "gloo")
    atexit.register(_leave_processes)


def _leave_processes() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def devices_of(stages: Mapping[int, nn.Module] | nn.Module) -> list[torch.device]:
    """The devices of the parameters and buffers of some stages, each once."""
    modules = [stages] if isinstance(stages, nn.Module) else [m for m in stages.values() if isinstance(m, nn.Module)]
    tensors = (chain(module.parameters(), module.buffers()) for module in modules)
    return list(dict.fromkeys(_computes_on(tensor) for each in tensors for tensor in each))


def _computes_on(tensor: Tensor) -> torch.device:
    """The device of a tensor; of a DTensor, that of its mesh: FSDP may keep its shards on the CPU."""
    if isinstance(tensor, DTensor) and tensor.device.type != tensor.device_mesh.device_type:
        return with_index(torch.device(tensor.device_mesh.device_type))
    return tensor.device


def check_device(found: Sequence[torch.device], wanted: torch.device | None) -> torch.device | None:
    """The device of this rank: that of its stages, or the one that was asked for; None if neither says.

    Raises:
        PipelineError: if they disagree, or the process group does not reach that device.
    """
    if len(found) > 1:
        raise PipelineError(
            "the stages of a rank must be on one device",
            got=" and ".join(map(str, found)),
            fix="move them there before you build the pipeline",
        )
    device = found[0] if found else wanted
    if device is None:
        return None
    if wanted is not None and (device.type != wanted.type or (wanted.index is not None and device != wanted)):
        raise PipelineError(
            f"the stages must be on the device of the transport or mesh, {wanted}",
            got=str(device),
            fix="move them there, or pass no device",
        )
    served = dict(pair.split(":") for pair in dist.get_backend_config().split(","))
    if device.type not in BACKENDS or device.type not in served:
        raise PipelineError(
            "the process group must reach the device of the stages",
            got=f"stages on {device}, and a process group for {' and '.join(served)}",
            fix='move the stages to "cpu" or "cuda", and call init_process_group("cpu:gloo,cuda:nccl")',
        )
    if device.type == "cuda" and served["cuda"] != "nccl":
        raise PipelineError(
            "stages on a GPU need a process group that uses NCCL",
            got=f"stages on {device}, and a process group that uses {served['cuda']}",
            fix='call init_process_group("cpu:gloo,cuda:nccl"), or move the stages to the CPU',
        )
    return with_index(device)


def with_index(device: torch.device) -> torch.device:
    """``device``, with the number of the current GPU if it has none."""
    return torch.device("cuda", torch.cuda.current_device()) if device == torch.device("cuda") else device


def gpu_fault() -> str | None:
    """What is wrong with the current GPU, if it failed, as after an assertion in a kernel. Does not wait for it."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch's
        try:
            torch.cuda.current_stream().query()
        except RuntimeError as error:
            return str(error).partition("\n")[0]
    return None


def one_kind(devices: Sequence[torch.device | None]) -> str:
    """The kind of device of all ranks, those left out that have no tensors.

    Raises:
        PipelineError: if there are two.
    """
    kinds = {device.type: rank for rank, device in enumerate(devices) if device is not None}
    if len(kinds) > 1:
        raise PipelineError(
            "the stages of all ranks must be on the same kind of device",
            got=" and ".join(f"{kind} on rank {rank}" for kind, rank in sorted(kinds.items())),
            fix="move all of them to CPUs, or all of them to GPUs",
        )
    return next(iter(kinds), "cpu")
