"""The disk as a store: bounded, checked first, clear when full, and clean whatever happens."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from models import gpt
from saved_steps import assert_equal, grads_of
from torch import Tensor

from sternway import saved
from sternway.errors import SavedError
from sternway.saved import Offload
from sternway.saved._offloader import Offloader
from sternway.saved.stores._disk import DiskStore
from sternway.saved.stores._folder import remove_orphans


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of two mebibytes."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount a small file system")
    place = tmp_path / "small"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(place)]
    if subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("this machine does not allow mounting a tmpfs")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def _written(policy: Offload) -> None:
    """Wait until everything that was moved is in its file."""
    assert isinstance(policy.offloader.store, DiskStore)
    policy.offloader.store.flush()


def _chain(x: Tensor, results: list[Tensor], length: int = 40) -> None:
    """Products that save 256 KiB each."""
    for _ in range(length):
        x = x.sin()
        results.append(x)


def test_a_disk_that_is_full_says_so_and_loses_nothing(small_disk: Path) -> None:
    x = torch.randn(256, 256, requires_grad=True)
    results: list[Tensor] = []
    policy = saved.offload(to="disk", directory=small_disk, min_bytes=0, buffer="300KiB")
    with pytest.raises(SavedError, match=r"there is no room in .*; got 256\.0 KiB to write and .* free"), policy:
        _chain(x, results)
    assert 3 <= len(results) < 10
    (found,) = torch.autograd.grad(results[-1].sum(), x)
    again: list[Tensor] = []
    _chain(x, again, len(results))
    (expected,) = torch.autograd.grad(again[-1].sum(), x)
    assert torch.equal(found, expected)
    del results, again
    assert list(small_disk.iterdir()) == []
    with policy:  # there is room again
        y = x.sin().sum()
    y.backward()


def test_a_write_that_fails_leaves_its_tensor_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check came too early: others filled the disk, or a quota is not the file system's."""
    from sternway.saved.stores._disk import _DiskAway

    real, writes = _DiskAway._write, []

    def write(self: _DiskAway, path: Path, source: Tensor) -> int:
        writes.append(path)
        if len(writes) > 2:
            raise OSError(28, "No space left on device")
        return real(self, path, source)

    monkeypatch.setattr(_DiskAway, "_write", write)
    x = torch.randn(256, 256, requires_grad=True)
    results: list[Tensor] = []
    policy = saved.offload(to="disk", directory=tmp_path, min_bytes=0, buffer="256KiB")
    with pytest.raises(SavedError, match=r"could not be written to .*; got No space left on device"), policy:
        _chain(x, results)
    assert len(results) >= 2
    (found,) = torch.autograd.grad(results[-1].sum(), x)
    monkeypatch.undo()
    again: list[Tensor] = []
    _chain(x, again, len(results))
    (expected,) = torch.autograd.grad(again[-1].sum(), x)
    assert torch.equal(found, expected)
    del results
    assert list(tmp_path.iterdir()) == []


def test_a_file_too_large_for_the_process_is_an_error_too(tmp_path: Path) -> None:
    """A real limit, in a process of its own."""
    code = f"""
        import resource, torch
        from sternway import saved
        from sternway.errors import SavedError
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        x = torch.randn(256, 256, requires_grad=True)
        policy = saved.offload(to="disk", directory={str(tmp_path)!r}, min_bytes=0, buffer=1)
        try:
            with policy:
                y = x.sin()
                z = y.sin()
        except SavedError as error:
            assert "File too large" in str(error), error
            y.sum().backward()
            assert torch.equal(x.grad, x.cos())
            print("intact")
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False)
    assert done.stdout == "intact\n", done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_killed_process_leaves_what_the_next_start_removes(tmp_path: Path) -> None:
    code = f"""
        import sys, torch
        from sternway import saved
        x = torch.randn(256, 256, requires_grad=True)
        policy = saved.offload(to="disk", directory={str(tmp_path)!r}, min_bytes=0, buffer=1)
        with policy:
            y = x.sin().exp().tanh()
            policy.offloader.store.flush()
            print("saved", flush=True)
            sys.stdin.read()
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "saved\n"
    (folder,) = tmp_path.iterdir()
    assert len(list(folder.glob("*.bin"))) == 2
    policy = saved.offload(to="disk", directory=tmp_path, min_bytes=0)
    with policy:
        pass
    assert folder.exists()  # its process lives
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdin.close()  # type: ignore[union-attr]
    process.stdout.close()
    assert folder.exists()
    with policy:
        pass
    assert list(tmp_path.iterdir()) == []


def test_other_peoples_files_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "sternway-saved-new").mkdir()  # being made this moment
    assert remove_orphans(tmp_path) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["precious", "sternway-saved-new"]


def test_the_folder_lives_as_long_as_it_is_needed(tmp_path: Path) -> None:
    x = torch.randn(64, 64, requires_grad=True)
    policy = saved.offload(to="disk", directory=tmp_path, min_bytes=0, buffer=1)
    with policy:
        y = x.sin().sin().sum()
    _written(policy)
    (folder,) = tmp_path.iterdir()
    assert list(folder.glob("*.bin"))
    y.backward()
    del y
    assert list(tmp_path.iterdir()) == []
    assert torch.allclose(x.grad, x.sin().cos() * x.cos())  # type: ignore[arg-type]
    del policy


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_error_leaves_no_file(tmp_path: Path, where: str) -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            if where == "forward":
                raise ZeroDivisionError("on purpose")
            return x * 1

        @staticmethod
        def backward(ctx: object, grad: Tensor) -> Tensor:
            raise ZeroDivisionError("on purpose")

    def run() -> None:
        x = torch.randn(64, 64, requires_grad=True)
        with policy:
            y = Fails.apply(x.sin().sin()).sin().sum()
        y.backward()

    policy = saved.offload(to="disk", directory=tmp_path, min_bytes=0)
    with pytest.raises(ZeroDivisionError, match="on purpose"):
        run()
    assert list(tmp_path.iterdir()) == []
    assert policy.offloader.store.folder.path is None  # type: ignore[attr-defined]


def test_a_file_that_disappears_is_a_clear_error(tmp_path: Path) -> None:
    x = torch.randn(64, 64, requires_grad=True)
    policy = saved.offload(to="disk", directory=tmp_path, min_bytes=0, buffer=1, prefetch=0)
    with policy:
        y = x.sin().sin().sin().sum()
    _written(policy)
    (folder,) = tmp_path.iterdir()
    for file in folder.glob("*.bin"):
        file.unlink()
    with pytest.raises(SavedError, match=r"the file of a saved tensor cannot be read; got .*No such file"):
        y.backward()


def test_a_file_that_is_cut_short_is_a_clear_error(tmp_path: Path) -> None:
    x = torch.randn(64, 64, requires_grad=True)
    policy = saved.offload(to="disk", directory=tmp_path, min_bytes=0, buffer=1, prefetch=0)
    with policy:
        y = x.sin().sin().sin().sum()
    _written(policy)
    (folder,) = tmp_path.iterdir()
    for file in folder.glob("*.bin"):
        os.truncate(file, 100)
    with pytest.raises(SavedError, match="is cut short; got 100 of 16384 bytes"):
        y.backward()


def test_lossless_writes_fewer_bytes(tmp_path: Path) -> None:
    x = (torch.randn(256, 256) > 1).float().cumsum(0).requires_grad_()
    policy = saved.offload(to="disk", directory=tmp_path, min_bytes=0, buffer=1)
    with policy, saved.compress("lossless"):
        y = (x * 2).sin().sum()
    y.backward()
    assert 0 < policy.offloader.store.written_bytes < x.nbytes / 4  # type: ignore[attr-defined]
    assert torch.equal(x.grad, 2 * (x * 2).cos())  # type: ignore[arg-type]


def test_gradients_with_a_buffer_smaller_than_any_tensor(tmp_path: Path) -> None:
    model, x = gpt(32, 3), torch.randn(2, 16, 32)
    policy = saved.offload(to="disk", directory=tmp_path, min_bytes=0, buffer=1, prefetch=1)
    expected = grads_of(model, x)
    for _ in range(3):
        with policy as report:
            assert_equal(grads_of(model, x), expected)
    assert report.moved_bytes > 0


def test_a_wait_for_the_disk_is_counted(tmp_path: Path) -> None:
    """By a clock that moves by a second whenever it is read: a wait is two readings."""
    seconds = itertools.count()
    store = DiskStore(tmp_path, 2**20, clock=lambda: float(next(seconds)))
    x = torch.randn(64, 64, requires_grad=True)
    with Offload(Offloader(store, 0, prefetch=0, window=0)) as report:  # a window of 0: the forward waits for the write
        y = x.sin().sin().sum()
    waits = next(seconds) // 2
    assert waits in (0, 1)  # none if the write was done when it was asked for
    assert report.stall_seconds == waits
    y.backward()
    assert report.stall_seconds == waits + 1  # for the read


def test_a_policy_that_is_closed_has_no_threads_and_no_files(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    policy = saved.offload(to="disk", directory=tmp_path, min_bytes=0)
    x = torch.randn(64, 64, requires_grad=True)
    with policy:
        y = x.sin().exp().sum()
    policy.put_away()
    (found,) = torch.autograd.grad(y, x, retain_graph=True)
    (expected,) = torch.autograd.grad(x.sin().exp().sum(), x)
    assert torch.equal(found, expected)
    assert {each.name for each in set(threading.enumerate()) - before} >= {"sternway-write_0", "sternway-read_0"}
    policy.close()
    policy.close()
    assert not set(threading.enumerate()) - before
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(SavedError, match="a saved tensor cannot be brought back, because its policy was closed"):
        y.backward()
    with pytest.raises(SavedError, match="a policy that was closed cannot be entered"), policy:
        pass


def test_what_is_spared_stays(tmp_path: Path) -> None:
    policy = saved.offload(to="disk", directory=tmp_path, min_bytes=0)
    rows = torch.randn(9, 4, 16)
    layer = torch.nn.Linear(16, 16)
    policy.spare([rows[0]])
    with policy as report:
        loss = layer(rows[3]).sum()
    assert report.moved_bytes == 0
    assert report.total.skipped["held anyway"] == rows.nbytes
    loss.backward()
    policy.spare([])
    with policy as report:
        loss = layer(rows[3]).sum()
    assert report.moved_bytes == rows[3].nbytes
    loss.backward()


def test_a_folder_is_locked_when_others_see_its_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process that looked for orphans in between took the folder for one, and removed it."""
    from sternway.saved.stores import _folder

    def look(*_: object) -> None:
        monkeypatch.undo()
        assert _folder.remove_orphans(tmp_path) == []

    monkeypatch.setattr(_folder.fcntl, "flock", look)
    folder = _folder.DiskFolder(tmp_path)
    assert (folder.open() / "lock").exists()
    folder.close()
    assert list(tmp_path.iterdir()) == []
