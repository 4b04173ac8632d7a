"""Process groups and their store; communicators; checkpoints' descriptions."""

from __future__ import annotations

import ctypes
import importlib
import io
import os
import pickle
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sternway._torch.probe import probe

# Process groups and their store, for the pipeline


def default_store() -> Any:
    """The key-value store of the default process group."""
    return dist.distributed_c10d._get_default_store()


def own_connection(store: Any, timeout: float) -> Any:
    """A client of the store below all prefixes, with a connection and a timeout (in seconds) of its own.

    A wait in one thread then does not block another thread.
    """
    client = _below_prefixes(store).clone()
    client.set_timeout(timedelta(seconds=timeout))
    return client


def store_port(store: Any) -> int | None:
    """The TCP port of the process that holds the store; None for a store that has none."""
    return getattr(_below_prefixes(store), "port", None)


def _below_prefixes(store: Any) -> Any:
    while isinstance(store, dist.distributed_c10d.PrefixStore):
        store = store.underlying_store
    return store


def agent_holds_store() -> bool:
    """Whether torchrun's agent holds the default store, and not rank 0."""
    return bool(importlib.import_module("torch.distributed.rendezvous")._torchelastic_use_agent_store())


@probe(
    "torch.distributed.distributed_c10d._get_default_store",
    expected="gives the default group's store, or raises ValueError where there is no group",
    features=("pipeline",),
)
def _default_store() -> bool:
    if dist.is_initialized():
        return isinstance(default_store(), dist.distributed_c10d.Store)
    try:
        default_store()
    except ValueError:
        return True
    return False


@probe(
    "PrefixStore.underlying_store, Store.clone",
    expected="lead to the store below a prefix, and to a second connection to it",
    features=("pipeline",),
)
def _own_connection() -> bool:
    store = dist.HashStore()  # type: ignore[attr-defined]  # exported, but not as mypy wants it
    store.set("key", "value")
    return (
        own_connection(dist.distributed_c10d.PrefixStore("a", dist.distributed_c10d.PrefixStore("b", store)), 1.0).get(
            "key"
        )
        == b"value"
    )


@probe(
    "torch.distributed.rendezvous._torchelastic_use_agent_store",
    expected="says whether torchrun's agent holds the store",
    features=("pipeline",),
)
def _agent_holds_store() -> bool:
    found = importlib.import_module("torch.distributed.rendezvous")._torchelastic_use_agent_store()
    return isinstance(found, bool)


# Communicators that are no process groups of torch's, for the pipeline

ABORT_SECONDS = 4.0
_BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"
_MOST_GROUPS, _NOT_IN_A_GROUP = 8, 5  # 5 is ncclInvalidUsage


def has_nccl() -> bool:
    """Whether this torch can send between GPUs, and there is one."""
    return dist.is_nccl_available() and torch.cuda.is_available()


def nccl_communicator(
    store: Any, name: str, rank: int, members: Sequence[int], device: torch.device, timeout: float
) -> Any:
    """A communicator of a few processes. Blocks until all of them call this.

    ``new_group`` would do more: it enters the group into a registry, and if the default group has a device, it splits
    the default group's communicator, which needs every process.

    Nobody but its owner watches over it. By default torch starts two threads for each communicator, which end the whole
    process when another one dies. If waits block the host, as they do here, torch leaves that to whoever waits, and
    starts no thread. Nothing here waits so: see ``StreamWork``.

    Args:
        store: where the processes find each other.
        name: the same on all of them, and never used before.
        rank: the place of this process among ``members``.
        members: the global ranks.
        device: the GPU of this process.
        timeout: how many seconds an abort may take.
    """
    kind: Any = dist.ProcessGroupNCCL
    options = kind.Options()
    options._timeout = timedelta(seconds=timeout)
    options.group_name = name
    options.global_ranks_in_group = list(members)
    before = os.environ.get(_BLOCKING_WAIT, "0")
    os.environ[_BLOCKING_WAIT] = "1"  # read when it is made
    try:
        made = kind(dist.distributed_c10d.PrefixStore(name, store), rank, len(members), options)
    finally:
        os.environ[_BLOCKING_WAIT] = before  # not removed: another thread may read the environment at this moment
    made.eager_connect_single_device(device)
    return made


class StreamWork:
    """An operation between GPUs."""

    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self) -> None:
        """Make the current stream wait for the operation, and not the host."""
        self._work.block_current_stream()

    def is_completed(self) -> bool:
        """Whether it is over; does not wait."""
        return bool(self._work.is_completed())


def gloo_communicator(store: Any, name: str, rank: int, members: Sequence[int], timeout: float) -> Any:
    """The same of CPUs. Where only some processes call ``new_group``, torch's later groups get different names."""
    kind: Any = dist.ProcessGroupGloo
    prefixed = dist.distributed_c10d.PrefixStore(name, store)
    return kind(prefixed, rank, len(members), timedelta(seconds=timeout))


def post_message(communicator: Any, tensors: Sequence[Tensor], peer: int, *, is_send: bool) -> StreamWork:
    """Start to send tensors to a process of a communicator, or to receive them, as one operation; returns the work.

    The operation waits for the current stream. One operation of several tensors costs one kernel, and unlike single
    sends it is not what torch warns about.
    """
    communicator._start_coalescing()
    try:
        for tensor in tensors:
            if is_send:
                communicator.send([tensor], peer, 0)
            else:
                communicator.recv([tensor], peer, 0)
        return StreamWork(communicator._end_coalescing())
    except RuntimeError:
        _leave_groups(communicator)
        raise


def _leave_groups(communicator: Any) -> None:
    """Leave NCCL's groups of calls, after one of ``post_message`` failed.

    NCCL and torch count, for each thread, how many groups are open, and a call that fails leaves some open: NCCL's when
    a send fails, torch's when the end of a group does. Whatever this thread then does with NCCL would never be done, or
    fail, also in a process group that has nothing to do with this one.
    """
    try:
        nccl = ctypes.CDLL("libnccl.so.2", mode=os.RTLD_NOLOAD | os.RTLD_NOW)  # the one that torch has loaded
    except OSError:
        return
    for _ in range(_MOST_GROUPS):
        if nccl.ncclGroupEnd() == _NOT_IN_A_GROUP:
            break
    communicator._start_coalescing()
    nccl.ncclGroupStart()  # so that torch can leave a group more than it enters
    communicator._end_coalescing()
    communicator._end_coalescing()


def start_sum(communicator: Any, tensor: Tensor) -> Any:
    """Start to replace a tensor by its sum over the processes of a communicator; returns the work."""
    options = dist.distributed_c10d.AllreduceOptions()
    options.asyncOp = True
    return _waiting(communicator, communicator.allreduce([tensor], options))


def start_copy(communicator: Any, tensor: Tensor, source: int) -> Any:
    """Start to overwrite a tensor by that of one process of a communicator; returns the work."""
    options = dist.distributed_c10d.BroadcastOptions()
    options.rootRank, options.asyncOp = source, True
    return _waiting(communicator, communicator.broadcast([tensor], options))


def _waiting(communicator: Any, work: Any) -> Any:
    """A work whose ``wait`` does not block the host, if it is one of GPUs."""
    kind = getattr(dist, "ProcessGroupNCCL", None)  # None in a torch without NCCL
    return StreamWork(work) if kind is not None and isinstance(communicator, kind) else work


def abort_communicators(communicators: Sequence[Any]) -> None:
    """End what runs on communicators, from any thread, and destroy them.

    All at once: to free its memory, an aborted communicator waits for the device, on which others may still wait for a
    message. After ``ABORT_SECONDS`` the rest is left to itself, as a GPU that failed may answer no more.
    """
    threads = [threading.Thread(target=_abort, args=(each,), daemon=True) for each in communicators]
    end = time.monotonic() + ABORT_SECONDS
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))


def _abort(communicator: Any) -> None:
    with suppress(RuntimeError):  # it may have been aborted before
        communicator.abort()


def close_communicator(communicator: Any) -> None:
    """Let what was posted on a communicator end, and destroy it."""
    communicator.shutdown()


@probe(
    "Work.block_current_stream",
    expected="is a method of works",
    features=("pipeline",),
)
def _block_current_stream() -> bool:
    return callable(dist.Work.block_current_stream)


@probe(
    "ProcessGroupNCCL: eager_connect_single_device, _start_coalescing, _end_coalescing, abort, shutdown",
    expected="are methods of its own, and its options have a timeout, a name and members",
    features=("pipeline",),
)
def _communicator() -> bool:
    kind = getattr(dist, "ProcessGroupNCCL", None)
    if kind is None:  # a torch without NCCL
        return True
    methods = ("eager_connect_single_device", "_start_coalescing", "_end_coalescing", "abort", "shutdown")
    options = kind.Options()
    options._timeout, options.group_name, options.global_ranks_in_group = timedelta(seconds=1), "name", [0, 1]
    made = [dist.distributed_c10d.AllreduceOptions(), dist.distributed_c10d.BroadcastOptions()]
    return all(callable(getattr(kind, name)) for name in methods) and all(hasattr(each, "asyncOp") for each in made)


# Checkpoints' descriptions, for the pipeline

_CHECKPOINT = "torch.distributed.checkpoint"


def description_globals() -> frozenset[tuple[str, str]]:
    """All that the pickled ``.metadata`` of tensors and bytes may name, as (module, name); dtypes come on top."""
    metadata = ("Metadata", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata", "MetadataIndex")
    more = ("BytesStorageMetadata", "StorageMeta", "_MEM_FORMAT_ENCODING")
    return frozenset(
        {
            *((f"{_CHECKPOINT}.metadata", name) for name in (*metadata, *more)),
            (f"{_CHECKPOINT}.filesystem", "_StorageInfo"),
            ("torch", "Size"),
            ("torch.serialization", "_get_layout"),
            *((module, f"{kind}Path") for module in ("pathlib", "pathlib._local") for kind in ("Posix", "Windows")),
        }
    )


@probe(
    "torch.distributed.checkpoint.filesystem._StorageInfo, metadata._MEM_FORMAT_ENCODING, serialization._get_layout",
    expected="are all that a checkpoint's description names besides public classes",
    features=("pipeline",),
)
def _description() -> bool:
    filesystem = importlib.import_module(f"{_CHECKPOINT}.filesystem")
    metadata = importlib.import_module(f"{_CHECKPOINT}.metadata")
    index = metadata.MetadataIndex("a", torch.Size([0]))
    tensor = metadata.TensorStorageMetadata(
        properties=metadata.TensorProperties(dtype=torch.float32),
        size=torch.Size([2]),
        chunks=[metadata.ChunkStorageMetadata(offsets=torch.Size([0]), sizes=torch.Size([2]))],
    )
    description = metadata.Metadata(
        state_dict_metadata={"a": tensor, "b": metadata.BytesStorageMetadata()},
        storage_data={index: filesystem._StorageInfo("file", 0, 8)},
        storage_meta=metadata.StorageMeta(checkpoint_id=Path("folder")),
    )
    named: set[tuple[str, str]] = set()

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            named.add((module, name))
            return super().find_class(module, name)

    found = Unpickler(io.BytesIO(pickle.dumps(description))).load()
    known = description_globals() | {("torch", "float32")}
    return named <= known and found.storage_data[index].relative_path == "file"
