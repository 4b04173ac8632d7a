"""Probes say how many hooks they register, so that nobody else's are taken for theirs."""

from __future__ import annotations

import os
import threading

import pytest
import torch
from torch.utils.hooks import RemovableHandle

from sternway._torch import Probe, all_probes
from sternway._torch.hooks import hooks_registered


@pytest.mark.parametrize("probe", [each for each in all_probes() if each.hooks], ids=lambda each: each.name)
def test_a_probe_registers_as_many_hooks_as_it_says(probe: Probe) -> None:
    assert probe.fault() is None
    before = RemovableHandle.next_id, hooks_registered()
    assert probe.fault() is None
    assert (RemovableHandle.next_id, hooks_registered()) == (before[0] + probe.hooks, before[1])


@pytest.mark.parametrize("probe", all_probes(), ids=lambda each: each.name)
def test_a_probe_draws_no_random_numbers(probe: Probe) -> None:
    """A room probes torch when it is first used: a user's numbers after that must be those without it."""
    before = torch.get_rng_state()
    assert probe.fault() is None
    assert torch.equal(torch.get_rng_state(), before)


def test_a_hook_of_another_thread_is_not_taken_for_a_probes() -> None:
    """It was: whatever was registered anywhere while a probe ran was left out, and W went past such a hook."""
    tensor = torch.zeros(2, requires_grad=True)

    def check() -> bool:
        torch.zeros(2, requires_grad=True).register_hook(lambda grad: None)
        other = threading.Thread(target=lambda: tensor.register_hook(lambda grad: None))
        other.start()
        other.join()
        return True

    before = hooks_registered()
    assert Probe("a name", "does something", ("split",), check, hooks=1).fault() is None
    assert hooks_registered() == before + 1


def test_a_probe_that_registers_fewer_hooks_than_it_says_fails() -> None:
    before = hooks_registered()
    assert Probe("a name", "does something", ("split",), lambda: True, hooks=1).fault() == (
        "fewer hooks than 1 registered"
    )
    assert hooks_registered() == before


def test_the_hooks_of_a_probe_that_fails_count_as_anybodys() -> None:
    def check() -> bool:
        torch.zeros(2, requires_grad=True).register_hook(lambda grad: None)
        return False

    before = hooks_registered()
    assert Probe("a name", "does something", ("split",), check, hooks=1).fault() == "something else"
    assert hooks_registered() == before + 1


def test_probes_share_a_thread_that_does_not_end() -> None:
    """torch 2.11 crashes on fake tensors if the thread that made the first ones has ended (CUDA, no GPU)."""
    threads: list[threading.Thread] = []

    def probe_of(result: bool) -> Probe:
        return Probe("one", "is there", ("split",), lambda: threads.append(threading.current_thread()) or result)

    assert [probe_of(result).fault() for result in (True, True, False, True)] == [None, None, "something else", None]
    assert threads[0] is threads[1] is threads[2] is not threads[3]  # a failed one may have left modes behind
    assert all(thread.is_alive() for thread in threads)
    assert threading.current_thread() not in threads


def test_a_probe_may_need_another() -> None:
    inner = Probe("inner", "is there", ("split",), lambda: True)
    assert Probe("outer", "is there", ("split",), lambda: inner.fault() is None).fault() is None


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # of a process with threads, Python 3.12
def test_probes_run_in_a_forked_process() -> None:
    assert Probe("one", "is there", ("split",), lambda: True).fault() is None
    child = os.fork()
    if not child:
        os._exit(0 if Probe("one", "is there", ("split",), lambda: True).fault() is None else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
