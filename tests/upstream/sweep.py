"""Every operator and module that torch tests, with torch's own sample inputs, split at random places.

torch carries the databases of its tests (``torch.testing._internal``); no checkout is needed. A sample is run twice,
from the same seed: once with ``torch.autograd.backward``, once in two halves. Which leaves are inputs of the stage and
which as parameters, and what lies between a leaf and the operator, is drawn at random. ``opsweep.py`` is the program.
"""

from __future__ import annotations

import random
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from sternway import split
from sternway._tree import leaves, replace_leaves

DTYPES = (torch.float64, torch.complex128)
SAMPLES = 12  # of one operator and type


@dataclass
class Tally:
    """What a sweep found."""

    samples: int = 0
    comparisons: int = 0
    skipped: int = 0  # torch itself refuses the sample, or no gradient is asked of it
    changed: list[str] = field(default_factory=list)  # torch's own means change the gradients of the sample too
    faults: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        rows = [f"{self.samples} samples, {self.comparisons} comparisons, {self.skipped} that torch refuses"]
        for what, found in (("that torch's own means change too", self.changed), ("faults", self.faults)):
            causes = Counter(each.split(": ", 1)[1][:160] for each in found)
            rows += [f"{len(found)} {what}"] + [f"  {count} x {cause}" for cause, count in causes.most_common()]
        return "\n".join(rows)


@dataclass(frozen=True)
class Subject:
    """One sample: a name, and a function that builds its outputs from fresh leaves, the same each time."""

    name: str
    build: Build


Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]  # makes another function of an operator or a module
Build = Callable[..., tuple[list[Tensor], list[Tensor]]]  # given a Wrap or nothing: leaves, outputs


def as_it_is(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def operators(
    pick: Callable[[int], bool], dtypes: tuple[torch.dtype, ...] = DTYPES, every: int = 1
) -> Iterator[Subject]:
    from torch.testing._internal.common_methods_invocations import op_db

    number = 0
    for op in op_db:
        for dtype in dtypes:
            if not op.supports_autograd or dtype not in op.supported_backward_dtypes("cpu"):
                continue
            number += 1
            if not pick(number):
                continue
            torch.manual_seed(number)
            samples = op.sample_inputs("cpu", dtype, requires_grad=True)
            name = f"{op.name}{'.' + op.variant_test_name if op.variant_test_name else ''} {str(dtype)[6:]}"
            for index, sample in islice(enumerate(samples), 0, SAMPLES, every):
                yield Subject(f"{name} {index}", _operator(op, sample, random.Random(f"{name} {index}")))


def _operator(op: Any, sample: Any, draw: random.Random) -> Build:
    seed, ways = draw.randrange(2**30), [draw.choice(BETWEEN) for _ in range(16)]

    def build(wrap: Wrap = as_it_is) -> tuple[list[Tensor], list[Tensor]]:
        made: list[Tensor] = []

        def fresh(value: Any) -> Any:
            if not isinstance(value, Tensor) or not value.requires_grad:
                return value
            made.append(value.detach().clone().requires_grad_())
            return ways[len(made) % len(ways)](made[-1])

        arguments = replace_leaves(fresh, [sample.input, *sample.args])
        keywords = replace_leaves(fresh, dict(sample.kwargs))
        torch.manual_seed(seed)
        result = wrap(op.op)(*arguments, **keywords)
        if sample.output_process_fn_grad is not None:
            result = sample.output_process_fn_grad(result)
        return made, [each for each in leaves(result) if isinstance(each, Tensor)]

    return build


BETWEEN: list[Callable[[Tensor], Tensor]] = [
    lambda t: t,
    lambda t: t,
    lambda t: t * 1.5,
    lambda t: t.mT.mT if t.ndim > 1 and t.layout is torch.strided else t,
]
"""What may lie between a leaf and the operator."""


def modules(pick: Callable[[int], bool], every: int = 1) -> Iterator[Subject]:
    from torch.testing._internal.common_modules import module_db

    for number, info in enumerate(module_db):
        if torch.float64 not in info.dtypes or not pick(number):
            continue
        for training in (True, False):
            inputs = info.module_inputs_func(
                info, device="cpu", dtype=torch.float64, requires_grad=True, training=training
            )
            for index, sample in islice(enumerate(inputs), 0, SAMPLES, every):
                if sample.forward_input is not None:
                    yield Subject(f"{info.name} {training} {index}", _module(info, sample, training))


def _module(info: Any, sample: Any, training: bool) -> Build:
    def build(wrap: Wrap = as_it_is) -> tuple[list[Tensor], list[Tensor]]:
        made: list[Tensor] = []

        def fresh(value: Any) -> Any:
            if not isinstance(value, Tensor) or not value.requires_grad:
                return value
            made.append(value.detach().clone().requires_grad_())
            return made[-1]

        torch.manual_seed(1)
        module = info.module_cls(*sample.constructor_input.args, **sample.constructor_input.kwargs)
        module = module.to(torch.float64).train(training)
        arguments = replace_leaves(fresh, list(sample.forward_input.args))
        keywords = replace_leaves(fresh, dict(sample.forward_input.kwargs))
        torch.manual_seed(2)
        result = wrap(module)(*arguments, **keywords)
        found = [each for each in leaves(result) if isinstance(each, Tensor)]
        return [*made, *(p for p in module.parameters() if isinstance(p, nn.Parameter))], found

    return build


def check(subject: Subject, tally: Tally) -> None:
    """Compare one sample; what is wrong goes into the tally."""
    draw = random.Random(subject.name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            theirs, outputs = subject.build()
            grads = backward(outputs, subject.name)
        except Exception:  # whatever torch cannot do either
            tally.skipped += 1
            return
        if grads is None:
            tally.skipped += 1
            return
        tally.samples += 1
        is_input = [draw.random() < 0.5 for _ in theirs]
        try:
            ours, outputs = subject.build()
            inputs = [leaf for leaf, chosen in zip(ours, is_input, strict=True) if chosen]
            found, pending = split.backward_input(outputs, grads, inputs)
            pending.run()
        except Exception as error:
            tally.faults.append(f"{subject.name}: {crash(error)}")
            return
    values = iter(found)
    for mine, their, chosen in zip(ours, theirs, is_input, strict=True):
        tally.comparisons += 1
        problem = differs(next(values) if chosen else mine.grad, their.grad)
        if problem:
            tally.faults.append(f"{subject.name}: {problem}")


def crash(error: Exception) -> str:
    place = traceback.extract_tb(error.__traceback__)[-1]
    at = f"{place.filename.rsplit('/', 1)[-1]}:{place.lineno}"
    return f"crash {type(error).__name__} at {at}: {str(error)[:200]}"


def backward(outputs: list[Tensor], seed: str) -> list[Tensor | None] | None:
    """A plain backward from random gradients, which are returned."""
    generator = torch.Generator().manual_seed(len(seed) + sum(map(ord, seed)))
    grads: list[Tensor | None] = []
    for output in outputs:
        if not output.requires_grad:
            grads.append(None)
        elif output.layout is torch.strided:
            grads.append(torch.rand(output.shape, generator=generator, dtype=torch.float64).to(output.dtype))
        else:
            grads.append(torch.ones_like(output))
    roots = [(output, grad) for output, grad in zip(outputs, grads, strict=True) if grad is not None]
    if not roots:
        return None
    torch.autograd.backward([output for output, _ in roots], [grad for _, grad in roots])
    return grads


def differs(mine: Tensor | None, their: Tensor | None, **tolerance: float) -> str | None:
    if mine is None or their is None:
        return (
            None if mine is their else f"wrong: {'no' if mine is None else 'a'} gradient where autograd has the other"
        )
    if (mine.dtype, mine.layout, mine.shape) != (their.dtype, their.layout, their.shape):
        return "wrong: another type, layout or shape"
    try:
        torch.testing.assert_close(mine, their, equal_nan=True, **tolerance)
    except AssertionError as error:
        return f"wrong: {str(error).splitlines()[0]}"
    return None


def sweep(pick: Callable[[int], bool] = lambda number: True, every: int = 1) -> Tally:
    """Check every sample, or every third and so on, of the operators and modules whose number is picked."""
    tally = Tally()
    for subjects in (operators(pick, every=every), modules(pick, every)):
        for subject in subjects:
            check(subject, tally)
    return tally
