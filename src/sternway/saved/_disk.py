"""Files as a store: written and read by threads, through a bounded buffer.

A tensor of a GPU goes through a page-locked buffer; one of the CPU is written from where it lies. Either way at most
``buffer`` bytes wait to be written; whoever brings more waits. A write that fails leaves its tensor in memory and its
error to be raised at the next chance: nothing of the step is lost.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
import weakref
import zlib
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sternway._bytes import show_bytes
from sternway.errors import SavedError
from sternway.saved._folder import Folder, remove_orphans
from sternway.saved._pool import Buffer, Pool
from sternway.saved._store import Arrival, Away, Store
from sternway.saved._ticket import Threaded, Wait, Waited


def _bytes(flat: Tensor) -> memoryview:
    """The memory of a CPU tensor; the caller keeps the tensor."""
    return memoryview((ctypes.c_char * flat.numel()).from_address(flat.data_ptr())).cast("B")


def shrink(flat: Tensor, itemsize: int) -> bytes:
    """Fewer bytes, exactly: the first bytes of all elements, then the second, …; alike ones meet and compress."""
    if itemsize > 1 and flat.numel() % itemsize == 0:
        flat = flat.view(-1, itemsize).t().contiguous().view(-1)
    return zlib.compress(_bytes(flat), 1)


def grow(data: bytes, into: Tensor, itemsize: int) -> None:
    """Undo ``shrink``."""
    raw = torch.frombuffer(bytearray(zlib.decompress(data)), dtype=torch.uint8)
    if itemsize > 1 and raw.numel() % itemsize == 0:
        raw = raw.view(itemsize, -1).t().reshape(-1)
    into.copy_(raw)


class _DiskArrival(Arrival):
    """A file being read; what is on a GPU is copied there when it is joined."""

    def __init__(self, future: Future[Tensor], device: torch.device, store: DiskStore) -> None:
        self._future, self._device, self._store = future, device, store
        self._target: Tensor | None = None

    def join(self) -> tuple[Tensor, Wait | None]:
        if self._target is not None:
            return self._target, None
        start = time.perf_counter()
        read = self._future.result()
        wait = Waited(time.perf_counter() - start)
        self._target = read
        if self._device.type != "cpu":
            self._target = torch.empty(len(read), dtype=torch.uint8, device=self._device)
            self._store.mover(self._device).back(read, self._target).join()
        return self._target, wait

    def drop(self) -> None:
        self._future.cancel()


class _DiskAway(Away):
    def __init__(self, store: DiskStore, flat: Tensor, itemsize: int, lossless: bool) -> None:
        self._store, self._size, self._device = store, len(flat), flat.device
        self._itemsize, self._lossless = itemsize, lossless
        self._path: Path | None = None
        self._held: Tensor | None = None  # in memory after all, if it could not be written
        self._freed = threading.Event()
        self._lock = threading.Lock()

    def write(self, source: Tensor, buffer: Buffer | None, copied: Any) -> None:
        """In a writer's thread."""
        try:
            if copied is not None:
                copied.event.synchronize()
            if self._freed.is_set():
                return
            path = self._store.new_path()
            try:
                written = self._write(path, source)
            except OSError as error:
                self._held = source.clone()
                path.unlink(missing_ok=True)
                self._store.failed(error)
            else:
                with self._lock:
                    self._path = path
                    self._store.written_bytes += written
                if self._freed.is_set():
                    self.free()
        finally:
            self._store.written(self._size, buffer)

    def _write(self, path: Path, source: Tensor) -> int:
        data = memoryview(shrink(source, self._itemsize)) if self._lossless else _bytes(source)
        with path.open("wb", buffering=0) as file:
            done = 0
            while done < len(data):
                done += file.write(data[done:])
        return len(data)

    def read(self) -> Tensor:
        """In a reader's thread."""
        into = torch.empty(self._size, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        if self._held is not None:
            return into.copy_(self._held)
        assert self._path is not None
        try:
            if self._lossless:
                grow(self._path.read_bytes(), into, self._itemsize)
                return into
            view, done = _bytes(into), 0
            with self._path.open("rb", buffering=0) as file:
                while done < self._size and (count := file.readinto(view[done:])):
                    done += count
        except OSError as error:
            raise SavedError(
                "a saved tensor's file stays until its backward", got=str(error), fix="leave the directory alone"
            ) from error
        if done < self._size:
            raise SavedError(
                "a saved tensor's file stays whole until its backward",
                got=f"{done} of {self._size} bytes in {self._path}",
                fix="leave the directory alone",
            )
        return into

    def back(self) -> Arrival:
        if not self.out.done():
            self.out.join()  # it is not there yet
        return _DiskArrival(self._store.readers.submit(self.read), self._device, self._store)

    def free(self) -> None:
        with self._lock:
            self._freed.set()
            path, self._path, self._held = self._path, None, None
        if path is not None:
            path.unlink(missing_ok=True)


class DiskStore(Store):
    """Files under a directory of the user's."""

    name = "disk"

    def __init__(self, directory: Path, buffer: int) -> None:
        super().__init__()
        if not directory.is_dir():
            raise SavedError(
                "directory is a directory to write to", got=repr(str(directory)), fix="make it, or pass another"
            )
        self.folder = Folder(directory)
        self.written_bytes = 0
        self._pool = Pool(buffer, pinned=torch.cuda.is_available())
        self._limit, self._backlog = buffer, 0
        self._changed = threading.Condition()
        self._failure: OSError | None = None
        self._count = 0
        self._writers = ThreadPoolExecutor(2, "sternway-write")
        self.readers = ThreadPoolExecutor(2, "sternway-read")
        weakref.finalize(self, _shut, self._writers, self.readers, self.folder)

    def opened(self) -> None:
        remove_orphans(self.folder.directory)

    def new_path(self) -> Path:
        with self._changed:
            self._count += 1
            return self.folder.open() / f"{self._count}.bin"

    def send(self, flat: Tensor, itemsize: int, lossless: bool) -> Away | None:
        size = len(flat)
        with self._changed:
            free = self.folder.free_bytes() - self._backlog
        if free < size:
            raise SavedError(
                f"a saved tensor goes to {self.folder.directory} if there is room",
                got=f"{show_bytes(size)} to write and {show_bytes(max(free, 0))} free",
                fix="free some space, pass another directory, or raise the budget; what was saved so far is intact",
            )
        with self._changed:
            while self._backlog and self._backlog + size > self._limit:
                self._changed.wait()
            self._backlog += size
        away = _DiskAway(self, flat, itemsize, lossless)
        buffer, copied, source = None, None, flat
        if flat.device.type != "cpu":
            buffer = self._pool.take(size, wait=True)
            assert buffer is not None  # told to wait
            source = buffer.data[:size]
            copied = self.mover(flat.device).out(flat, source, buffer.after)
        away.out = Threaded(self._writers.submit(away.write, source, buffer, copied))
        return away

    def written(self, size: int, buffer: Buffer | None) -> None:
        """A write is over, well or not."""
        if buffer is not None:
            buffer.after = None
            self._pool.give(buffer)
        with self._changed:
            self._backlog -= size
            self._changed.notify_all()

    def failed(self, error: OSError) -> None:
        """Remember that a write failed."""
        with self._changed:
            self._failure = error

    def raise_failure(self) -> None:
        with self._changed:
            failure, self._failure = self._failure, None
        if failure is not None:
            raise SavedError(
                f"saved tensors can be written to {self.folder.directory}",
                got=os.strerror(failure.errno or 0),
                fix="free some space, pass another directory, or raise the budget; what was saved so far is intact",
            ) from failure

    def rates(self, device: torch.device) -> tuple[float, float]:
        """By one file of 32 MiB, written and read."""
        size = 2**25
        flat = torch.zeros(size, dtype=torch.uint8, device=device)
        start = time.perf_counter()
        away = self.send(flat, 1, False)
        assert away is not None  # a disk always has room, or says that it has not
        away.out.join()
        middle = time.perf_counter()
        away.back().join()
        end = time.perf_counter()
        away.free()
        return size / (middle - start), size / (end - middle)

    def idle(self, forget: bool) -> None:
        with self._changed:
            while self._backlog:  # of tensors that were dropped meanwhile
                self._changed.wait()
            self.folder.close()
        if forget:
            self._pool.clear()


def _shut(writers: ThreadPoolExecutor, readers: ThreadPoolExecutor, folder: Folder) -> None:
    """The store is gone, and so is all work on it: work holds the store. The thread that runs this may be a worker."""
    writers.shutdown(wait=False, cancel_futures=True)
    readers.shutdown(wait=False, cancel_futures=True)
    folder.close()
