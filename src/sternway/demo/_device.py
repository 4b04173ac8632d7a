"""Where the ranks of a demo compute: a GPU for each, one GPU for all, or the CPU."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from sternway.errors import PipelineError

SHARED_GPU = {  # sockets alone: what goes through shared memory finds out that there is one host
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_IB_DISABLE": "1",
    "NCCL_SOCKET_NTHREADS": "4",  # one socket alone would take twice as long for a message
    "NCCL_NSOCKS_PERTHREAD": "4",
}


def choose_device(wanted: str, ranks: int) -> tuple[str, str]:
    """The kind of device for so many ranks, and a sentence about it, or an empty one.

    Args:
        wanted: "auto" for GPUs if there is one for each rank, "cuda" for GPUs even if ranks must share them, or "cpu".
        ranks: the number of ranks.

    Raises:
        PipelineError: if GPUs are wanted and there are none, or this torch cannot send between them.
    """
    gpus = torch.cuda.device_count() if dist.is_nccl_available() else 0
    if wanted == "cuda" and not gpus:
        has = "no CUDA device" if dist.is_nccl_available() else "a torch without NCCL"
        raise PipelineError("ranks on GPUs need a GPU and NCCL", got=has, fix="pass --device cpu")
    some = f"{ranks} ranks, and {gpus} GPU{'' if gpus == 1 else 's'}"
    if wanted == "cpu" or not gpus:
        return "cpu", ""
    if gpus >= ranks:
        return "cuda", ""
    if wanted == "auto":
        return "cpu", f"{some}: on the CPU, as NCCL takes one rank on each GPU. To let them share, pass --device cuda."
    return "cuda", f"{some}: they share, over sockets, which is correct but not as fast as a GPU for each."


def take_device(device: str, rank: int, ranks: int) -> torch.device:
    """The device of one rank of those on this machine; call it before anything else of CUDA."""
    if device != "cuda":
        return torch.device("cpu")
    gpus = torch.cuda.device_count()
    if gpus < ranks:
        os.environ.update(SHARED_GPU, NCCL_HOSTID=f"sternway-{rank}")  # NCCL takes no two ranks on one GPU of one host
    torch.cuda.set_device(rank % gpus)
    return torch.device("cuda", rank % gpus)


def backend_of(device: torch.device) -> str:
    """What to pass to ``init_process_group`` for ranks on such devices."""
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def meet() -> None:
    """Wait for all ranks. ``barrier`` would use the GPU."""
    dist.all_reduce(torch.zeros(1))
