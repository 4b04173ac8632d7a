"""The same samples under the policies of ``sternway.saved``.

Where nothing is lost (moved to the host's memory, to disk, copied before a change) every gradient equals autograd's in
every bit. Where something is (``compress``), what comes back has the sign of what was saved, and zeros where it had
some, and the backward runs.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from sweep import Subject, Tally, backward, crash, differs, modules, operators
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sternway import saved
from sternway.saved._offloader import Offloader
from sternway.saved.stores._host import HostStore

EVERYTHING = 2**40


def lossless(directory: str) -> dict[str, saved.Policy]:
    offloader = Offloader(HostStore(EVERYTHING, pinned=False), 0, EVERYTHING, EVERYTHING)
    return {
        "offload": saved.Offload(offloader, anywhere=True),  # on a CPU, there is nothing to move otherwise
        "disk": saved.offload(to="disk", directory=directory, min_bytes=0),
        "mutable": saved.mutable(),
    }


def check_lossless(subject: Subject, policies: dict[str, saved.Policy], tally: Tally) -> None:
    """Compare one sample under each policy, bit by bit."""
    try:
        theirs, outputs = subject.build()
        found = backward(outputs, subject.name)
    except Exception:  # whatever torch cannot do either
        found = None
    if found is None:
        tally.skipped += 1
        return
    tally.samples += 1
    for name, policy in policies.items():
        ours = _under(policy, f"{subject.name} {name}", subject, tally)
        tally.comparisons += len(ours)
        if ours and (problem := _first_difference(ours, theirs)):
            kind = tally.changed if _torch_changes_it(subject, theirs) else tally.faults
            kind.append(f"{subject.name} {name}: {problem}")


def _first_difference(ours: list[Tensor], theirs: list[Tensor]) -> str | None:
    problems = [differs(mine.grad, their.grad, rtol=0, atol=0) for mine, their in zip(ours, theirs, strict=True)]
    return next(filter(None, problems), None)


class _Nothing(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


def _torch_changes_it(subject: Subject, theirs: list[Tensor]) -> bool:
    """Whether torch's own means change a sample's gradients: hooks that copy, or a mode that does nothing.

    ``rrelu`` fills a tensor with noise after the hooks have had it. A complex ``pinverse`` takes another way in a mode.
    """
    copying = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.clone(), lambda tensor: tensor)
    for context in (copying, _Nothing()):
        with context:
            leaves, outputs = subject.build()
        backward(outputs, subject.name)
        if _first_difference(leaves, theirs):
            return True
    return False


def _under(policy: AbstractContextManager[Any], name: str, subject: Subject, tally: Tally) -> list[Tensor]:
    """The leaves of a sample whose forward ran under a policy, after a backward."""
    try:
        with policy:
            leaves, outputs = subject.build()
        backward(outputs, subject.name)
    except Exception as error:
        tally.faults.append(f"{name}: {crash(error)}")
        return []
    return leaves


def check_compress(subject: Subject, policies: dict[str, saved.Policy], tally: Tally) -> None:
    """Look at every tensor that a sample saves, before and after; then run the sample."""
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.detach())
        return kept[-1]

    try:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            _, outputs = subject.build()
        if backward(outputs, subject.name) is None:
            return
    except Exception:
        tally.skipped += 1
        return
    tally.samples += 1
    for name, policy in policies.items():
        for tensor in kept:
            tally.comparisons += 1
            if problem := _sign(policy.pack(tensor).unpack(), tensor):
                tally.faults.append(f"{subject.name} {name}: {problem}")
        _under(policy, f"{subject.name} {name}", subject, tally)


def _sign(mine: Tensor, their: Tensor) -> str | None:
    """What is wrong with a tensor that comes back from an encoding, beside its precision."""
    if (mine.shape, mine.dtype, mine.layout, mine.device) != (their.shape, their.dtype, their.layout, their.device):
        return "wrong: another type, layout or shape"
    if mine.layout is not torch.strided or not mine.dtype.is_floating_point:
        return differs(mine, their, rtol=0, atol=0)
    if not torch.equal(mine.isnan(), their.isnan()):
        return "wrong: nan elsewhere"
    same = torch.equal(mine.nan_to_num().sign(), their.nan_to_num().sign())
    return None if same else "wrong: another sign or zero"


def sweep_saved(pick: Callable[[int], bool] = lambda number: True, every: int = 1) -> Tally:
    """Check every sample, or every third and so on, of the operators and modules whose number is picked."""
    tally = Tally()
    encoded: dict[str, saved.Policy] = {name: saved.compress(name) for name in ("int8", "bf16")}
    with tempfile.TemporaryDirectory() as directory, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        policies = lossless(directory)
        for subjects in (operators(pick, every=every), modules(pick, every)):
            for subject in subjects:
                check_lossless(subject, policies, tally)
        for subject in operators(pick, (torch.float32,), every):
            check_compress(subject, encoded, tally)
    return tally
