"""Files as a store: written and read by threads, through a bounded buffer.

A GPU tensor goes through a page-locked buffer; a CPU tensor is written from its own memory. At most ``buffer`` bytes
wait to be written; a ``send`` of more blocks. If a write fails, its tensor stays in memory and the error is raised by
the next ``raise_failure``, so nothing of the step is lost.
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
from sternway.saved.stores._copies import Clock, Threaded, Wait, Waited
from sternway.saved.stores._folder import DiskFolder, remove_orphans
from sternway.saved.stores._pool import Buffer, Pool
from sternway.saved.stores._store import Arrival, Away, Store

_MAKE_ROOM = "free some space, pass another directory, or raise the budget; what was saved so far is intact"


def _bytes(flat: Tensor) -> memoryview:
    """The memory of a CPU tensor; the caller keeps the tensor."""
    return memoryview((ctypes.c_char * flat.numel()).from_address(flat.data_ptr())).cast("B")


def shrink(flat: Tensor, itemsize: int) -> bytes:
    """Compress exactly: the first bytes of all elements, then the second bytes, …, since those resemble each other."""
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
    """A file being read; for a GPU it is copied to the device in ``join()``."""

    def __init__(self, future: Future[Tensor], device: torch.device, store: DiskStore) -> None:
        self._future, self._device, self._store = future, device, store
        self._target: Tensor | None = None

    def join(self) -> tuple[Tensor, Wait | None]:
        if self._target is not None:
            return self._target, None
        start = self._store.clock()
        read = self._future.result()
        wait = Waited(self._store.clock() - start)
        self._target = read
        if self._device.type != "cpu":
            self._target = torch.empty(len(read), dtype=torch.uint8, device=self._device)
            self._store.mover(self._device).back(read, self._target).join()
        return self._target, wait

    def drop(self) -> None:
        self._future.cancel()


class _DiskAway(Away):
    def __init__(self, store: DiskStore, flat: Tensor, device: torch.device, itemsize: int, lossless: bool) -> None:
        self._store, self._size, self._device = store, len(flat), device
        self._itemsize, self._lossless = itemsize, lossless
        self._path: Path | None = None
        self._source: Tensor | None = flat  # until it is written: a thread keeps its arguments longer
        self._held: Tensor | None = None  # the bytes, if they could not be written
        self._freed = threading.Event()
        self._lock = threading.Lock()

    def write(self, buffer: Buffer | None, copied: Any) -> None:
        """Write the file, in a writer thread."""
        written, source, self._source = 0, self._source, None
        assert source is not None  # it is written once
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
                if self._freed.is_set():
                    self.free()
        finally:
            self._store.wrote(self._size, written, buffer)

    def _write(self, path: Path, source: Tensor) -> int:
        data = memoryview(shrink(source, self._itemsize)) if self._lossless else _bytes(source)
        with path.open("wb", buffering=0) as file:
            done = 0
            while done < len(data):
                done += file.write(data[done:])
        return len(data)

    def read(self, into: Tensor) -> Tensor:
        """Read the file, in a reader thread."""
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
                "the file of a saved tensor cannot be read", got=str(error), fix="keep the directory until the backward"
            ) from error
        if done < self._size:
            raise SavedError(
                "the file of a saved tensor is cut short",
                got=f"{done} of {self._size} bytes in {self._path}",
                fix="keep the directory as it is until the backward",
            )
        return into

    def back(self) -> Arrival:
        if not self.out.done():
            self.out.join()  # the file is not complete yet
        if self._store.closed:
            raise SavedError(
                "a saved tensor cannot be brought back, because its policy was closed",
                got=f"{self._size} bytes in a file",
                fix="close the policy after the backward",
            )
        # Allocated here, so that the memory is taken in the order of the program, whenever the thread runs.
        into = torch.empty(self._size, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        return _DiskArrival(self._store.readers.submit(self.read, into), self._device, self._store)

    def free(self) -> None:
        with self._lock:
            self._freed.set()
            path, self._path, self._held = self._path, None, None
        if path is not None:
            path.unlink(missing_ok=True)


class DiskStore(Store):
    """Keeps tensors in files under the user's directory."""

    name = "disk"

    def __init__(self, directory: Path, buffer: int, clock: Clock = time.perf_counter) -> None:
        super().__init__()
        if not directory.is_dir():
            raise SavedError(
                "directory must be an existing directory", got=repr(str(directory)), fix="make it, or pass another"
            )
        self.folder = DiskFolder(directory)
        self.clock = clock
        self.written_bytes = 0
        self._pool = Pool(buffer, pinned=torch.cuda.is_available())
        self._limit, self._backlog = buffer, 0
        self._changed = threading.Condition()
        self._failure: OSError | None = None
        self._count = 0
        self._writers = ThreadPoolExecutor(2, "sternway-write")
        self.readers = ThreadPoolExecutor(2, "sternway-read")
        self._shut = weakref.finalize(self, _shut, self._writers, self.readers, self.folder)

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
                f"there is no room in {self.folder.directory} for a saved tensor",
                got=f"{show_bytes(size)} to write and {show_bytes(max(free, 0))} free",
                fix=_MAKE_ROOM,
            )
        with self._changed:
            while self._backlog and self._backlog + size > self._limit:
                self._changed.wait()
            self._backlog += size
        buffer, copied, source = None, None, flat
        if flat.device.type != "cpu":
            buffer = self._pool.take(size, wait=True)
            assert buffer is not None  # told to wait
            source = buffer.data[:size]
            copied = self.mover(flat.device).out(flat, source, buffer.after)
        away = _DiskAway(self, source, flat.device, itemsize, lossless)
        away.out = Threaded(self._writers.submit(away.write, buffer, copied), self.clock, copied)
        return away

    def wrote(self, size: int, written: int, buffer: Buffer | None) -> None:
        """A write of ``size`` bytes has ended, well or not; the file has ``written``."""
        if buffer is not None:
            buffer.after = None
            self._pool.give(buffer)
        with self._changed:
            self._backlog -= size
            self.written_bytes += written
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
                f"a saved tensor could not be written to {self.folder.directory}",
                got=os.strerror(failure.errno or 0),
                fix=_MAKE_ROOM,
            ) from failure

    def rates(self, device: torch.device) -> tuple[float, float]:
        """Measured with one file of 32 MiB."""
        size = 2**25
        flat = torch.zeros(size, dtype=torch.uint8, device=device)
        start = self.clock()
        away = self.send(flat, 1, False)
        assert away is not None  # a disk always has room, or says that it has not
        away.out.join()
        middle = self.clock()
        away.back().join()
        end = self.clock()
        away.free()
        return size / (middle - start), size / (end - middle)

    def flush(self) -> None:
        """Wait until everything that was sent is written."""
        with self._changed:
            while self._backlog:
                self._changed.wait()

    def idle(self, forget: bool) -> None:
        with self._changed:
            self.flush()  # tensors that were dropped before they were written
            self.folder.close()
        if forget:
            self._pool.clear()

    def close(self) -> None:
        super().close()
        self.flush()
        self._writers.shutdown(wait=True)
        self.readers.shutdown(wait=True)
        self._pool.clear()
        self._shut()


def _shut(writers: ThreadPoolExecutor, readers: ThreadPoolExecutor, folder: DiskFolder) -> None:
    """Stop the threads. All work is done by now, since it holds the store; a worker thread may be running this."""
    writers.shutdown(wait=False, cancel_futures=True)
    readers.shutdown(wait=False, cancel_futures=True)
    folder.close()
