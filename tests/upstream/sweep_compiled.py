"""The same samples compiled by ``backend="sternway"`` and split, beside a plain backward without a compiler."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable

import torch
from sweep import Subject, Tally, backward, crash, differs, modules, operators
from torch import Tensor

from sternway import split


def check_compiled(subject: Subject, tally: Tally) -> None:
    """Compare one sample. What torch's own ``aot_eager`` cannot do, or does otherwise, is not ours to answer for."""
    try:
        theirs, outputs = subject.build()
        grads = backward(outputs, subject.name)
        if grads is None:
            tally.skipped += 1
            return
        torch.compiler.reset()
        compiled, outputs = subject.build(lambda function: torch.compile(function, backend="aot_eager"))
        backward(outputs, subject.name)
        if any(differs(mine.grad, their.grad) for mine, their in zip(compiled, theirs, strict=True)):
            raise RuntimeError("the compiler changes the numbers")
    except Exception:
        tally.skipped += 1
        return
    tally.samples += 1
    draw = random.Random(subject.name)
    is_input = [draw.random() < 0.5 for _ in theirs]
    torch.compiler.reset()
    try:
        options = {"inner": "eager"}
        ours, outputs = subject.build(lambda function: torch.compile(function, backend="sternway", options=options))
        inputs = [leaf for leaf, chosen in zip(ours, is_input, strict=True) if chosen]
        found, pending = split.backward_input(outputs, grads, inputs)
        pending.run()
    except Exception as error:
        tally.faults.append(f"{subject.name}: {crash(error)}")
        return
    values: list[Tensor | None] = list(found)
    for mine, their, chosen in zip(ours, theirs, is_input, strict=True):
        tally.comparisons += 1
        if problem := differs(values.pop(0) if chosen else mine.grad, their.grad):
            tally.faults.append(f"{subject.name}: {problem}")


def sweep_compiled(pick: Callable[[int], bool]) -> Tally:
    """Check the first sample of each operator and module whose number is picked."""
    tally = Tally()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for subjects in (operators(pick, (torch.float64,)), modules(pick)):
            for subject in subjects:
                if subject.name.endswith(" 0"):
                    check_compiled(subject, tally)
    torch.compiler.reset()
    return tally
