"""One GPU as several small ones: run a function on processes that share a GPU, with real NCCL between them.

NCCL takes no two ranks on one device of one host. So each process gives itself a host name, and NCCL uses sockets of
the loopback device between them, as between real hosts. Where the MPS daemon of CUDA can be started, each process also
gets its share of the GPU's multiprocessors, and all of them compute at the same time. Otherwise they take turns.
"""

from __future__ import annotations

import atexit
import faulthandler
import functools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed as dist

from gloo import on_ranks
from sternway.demo import SHARED_GPU

Init = Literal["eager", "lazy", "both", "torchrun"]
"""How torch.distributed is initialized: "nccl" with a device or without, gloo and NCCL, or not at all."""


def on_small_gpus(
    count: int, function: Callable[..., None], *arguments: Any, init: Init = "eager", timeout: float = 150
) -> None:
    """Call ``function(rank, *arguments)`` on ``count`` processes of one GPU; raise the first rank's error, if any.

    A process that is not done in time says where it hangs.
    """
    join = functools.partial(become_small_gpu, init=init, shared=mps(), timeout=timeout)
    on_ranks(count, function, *arguments, timeout=timeout, join=join)


def become_small_gpu(
    rank: int, world: int, port: int, init: Init, shared: dict[str, str], timeout: float = 150
) -> None:
    """Become one of ``world`` small GPUs. Call it before anything of CUDA."""
    os.environ.update(SHARED_GPU, NCCL_HOSTID=f"small-gpu-{rank}", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK="0")
    if shared:
        assert not torch.cuda.is_initialized(), "CUDA is in use already: too late for a share of the GPU"
        os.environ.update(shared, CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=str(100 // world))
    faulthandler.dump_traceback_later(max(1.0, timeout - 15), exit=False)
    torch.set_num_threads(1)
    torch.cuda.set_device(0)
    if init == "eager":
        dist.init_process_group("nccl", device_id=torch.device("cuda", 0))
    elif init == "lazy":
        dist.init_process_group("nccl")
    elif init == "both":
        dist.init_process_group("cpu:gloo,cuda:nccl")


@functools.cache
def mps() -> dict[str, str]:
    """Start CUDA's MPS daemon, for as long as this process runs; the variables by which others find it.

    One test run at a time: ranks of several that share a daemon have waited for each other without end.
    """
    control = shutil.which("nvidia-cuda-mps-control")
    if control is None:
        return {}
    folder = tempfile.TemporaryDirectory(prefix="small-gpus-")
    found = {f"CUDA_MPS_{name}_DIRECTORY": os.path.join(folder.name, name.lower()) for name in ("PIPE", "LOG")}
    for path in found.values():
        os.mkdir(path)
    environment = os.environ | found
    try:
        subprocess.run([control, "-d"], env=environment, check=True, timeout=30, capture_output=True)
    except (OSError, subprocess.SubprocessError):
        folder.cleanup()
        return {}

    def stop() -> None:
        subprocess.run([control], input=b"quit\n", env=environment, timeout=60, check=False, capture_output=True)
        folder.cleanup()

    atexit.register(stop)
    return found
