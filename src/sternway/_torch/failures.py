"""Failed backwards: what torch's error says, and which tensors the backward started from."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from sternway._torch.probe import probe

Failure = Literal["inplace", "twice", "no_grad", "unused", "leaf"]
"""A saved tensor was changed in place; the graph was freed; nothing requires a gradient; DDP misses a gradient; in a
forward, a leaf that requires a gradient is changed in place."""

_FAILURES: dict[str, Failure] = {
    "modified by an inplace operation": "inplace",
    "backward through the graph a second time": "twice",
    "does not require grad": "no_grad",
    "Expected to have finished reduction in the prior iteration": "unused",
    "leaf Variable that requires grad is being used in an in-place operation": "leaf",
}


def failure_of(error: BaseException) -> Failure | None:
    """Which of the usual failures of a backward an error of torch is; None if it is another."""
    text = str(error)
    return next((failure for words, failure in _FAILURES.items() if words in text), None)


def changed_versions(error: BaseException) -> tuple[int, int]:
    """From an "inplace" failure: the version of the changed tensor, and the version that was saved; -1 if unknown."""
    found = re.search(r"is at version (\d+); expected version (\d+)", str(error))
    return (int(found[1]), int(found[2])) if found else (-1, -1)


def unused_parameters(error: BaseException) -> tuple[list[int], list[str]]:
    """From an "unused" failure: the parameters without a gradient, by index, or by name where torch debugs DDP."""
    lead = r"did not receive grad for rank \d+: "
    if listed := re.search(lead + r"([\d ]+)", str(error)):
        return [int(index) for index in listed[1].split()], []
    named = re.search(lead + r"([\w.]+(?:, [\w.]+)*)", str(error))
    return [], named[1].split(", ") if named else []


def failed_roots(error: BaseException) -> list[Tensor]:
    """The tensors that a failed backward started from, read from the frame of torch that called the engine."""
    roots: Any = ()
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_name == "_engine_run_backward":
            roots = trace.tb_frame.f_locals.get("t_outputs", ())
        trace = trace.tb_next
    return [root for root in roots if isinstance(root, Tensor)]


def _error_of(function: Callable[[], Any]) -> RuntimeError:
    try:
        function()
    except RuntimeError as error:
        return error
    raise ValueError("no error")


@probe(
    "torch.autograd.graph._engine_run_backward: t_outputs",
    expected="is the frame that calls the engine, with the tensors that a backward starts from",
    features=("graph",),
)
def _failed_roots() -> bool:
    loss = torch.ones(1, requires_grad=True).exp()
    loss.backward()
    roots = failed_roots(_error_of(loss.backward))
    return len(roots) == 1 and roots[0] is loss


@probe(
    "error texts: modified by an inplace operation, a second time, does not require grad",
    expected="say why a backward failed",
    features=("graph",),
)
def _failures() -> bool:
    x = torch.ones(1, requires_grad=True)
    changed, freed = x.exp(), x.exp()
    changed.add_(1)
    freed.backward()
    inplace = _error_of(changed.backward)
    errors = [inplace, _error_of(freed.backward), _error_of(torch.ones(1).backward)]
    failures = [failure_of(error) for error in errors]
    return failures == ["inplace", "twice", "no_grad"] and changed_versions(inplace) == (1, 0)


@probe(
    "error text: leaf Variable that requires grad is being used in an in-place operation",
    expected="says that a leaf was changed in place",
    features=(),  # without it, the error of a stage that does so is torch's own
)
def _leaf_failure() -> bool:
    x = torch.ones(2, requires_grad=True)
    return failure_of(_error_of(lambda: x.add_(1))) == failure_of(_error_of(lambda: x[:1].add_(1))) == "leaf"


@probe(
    "error text of DDP: Expected to have finished reduction in the prior iteration",
    expected="says which parameters got no gradient",
    features=(),  # without it, graph.explain lets the error pass as it is
)
def _ddp_failure() -> bool:
    from torch import nn

    distributed: Any = torch.distributed
    if not (distributed.is_available() and distributed.is_gloo_available()):
        return True
    store = distributed.HashStore()
    group = distributed.ProcessGroup(store, 0, 1)
    gloo = distributed.ProcessGroupGloo(store, 0, 1)
    group._register_backend(torch.device("cpu"), distributed.ProcessGroup.BackendType.GLOO, gloo)

    class HalfUsed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))

        def forward(self, x: Tensor) -> Tensor:
            return self.used * x

    parallel = nn.parallel.DistributedDataParallel(HalfUsed(), process_group=group)
    parallel(torch.ones(1)).backward()
    error = _error_of(lambda: parallel(torch.ones(1)))
    indices, names = unused_parameters(error)
    return failure_of(error) == "unused" and (indices == [1] or names == ["idle"])
