"""Process groups and their store, checkpoints' descriptions; FSDP and DDP; torch.distributed.pipelining."""

from __future__ import annotations

import importlib
import io
import pickle
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

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


def abort_group(group: Any) -> None:
    """End what runs on a process group from another thread; gloo has no such call, NCCL has."""
    group.abort()


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


@probe("ProcessGroup.abort", expected="can be called from another thread", features=("pipeline",))
def _abort() -> bool:
    return callable(dist.ProcessGroup.abort)


# Checkpoints' descriptions, for the pipeline

_CHECKPOINT = "torch.distributed.checkpoint"


def description_globals() -> frozenset[tuple[str, str]]:
    """All that the pickled ``.metadata`` of a checkpoint of tensors may name, as (module, name); dtypes come on top."""
    metadata = ("Metadata", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata", "MetadataIndex")
    return frozenset(
        {
            *((f"{_CHECKPOINT}.metadata", name) for name in (*metadata, "StorageMeta", "_MEM_FORMAT_ENCODING")),
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
        state_dict_metadata={"a": tensor},
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


# FSDP, DDP and torch.distributed.pipelining, for the split
