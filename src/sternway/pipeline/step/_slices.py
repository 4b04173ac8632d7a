"""Processes that each have a slice of the same sequences (context parallelism), and what they must know of each other.

Attention talks to the other slices inside the model, by collectives of the user's. The pipeline does the rest:
gradients are averaged over the slices as over rows, and sums are divided by what all slices count. That is the gradient
of whole sequences only if slices have the same shapes, and the loss is a mean, or a sum and a count, over positions:

    one number        the mean over this slice's positions          all slices count alike, also by labels that are -100
    (sum, count)      sum / (count of all slices / slices)          then the average is sum of all / count of all
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from sternway._tree import leaves
from sternway.errors import PipelineError
from sternway.pipeline.forward._own_loss import IGNORED
from sternway.pipeline.transport._collective import Collective
from sternway.pipeline.transport._crew import Crew
from sternway.pipeline.transport._later import to_host

T = TypeVar("T")


class Slices:
    """The processes that have the slices of one process's sequences.

    Args:
        members: their global ranks, in the order of the slices.
        crew: exchanges objects between them, on the host.
        collective: adds up tensors over them.
    """

    def __init__(self, members: Sequence[int], crew: Crew, collective: Collective) -> None:
        self._members, self._crew, self._collective = members, crew, collective
        self.size = len(members)

    def agree(self, call: Callable[[], T], shapes: str) -> T:
        """What ``call`` returns here, if it raises nowhere and all have the same shapes.

        Collectives of slices that do not fit each other would hang, or give numbers that are no sequence's.

        Raises:
            PipelineError: on all of them, if not.
        """
        mine = self._crew.attempt(call)
        rows = self._crew.share((mine.error, shapes))
        for place, (error, _) in enumerate(rows):
            if error is not None:
                raise type(error)(error.rule, got=f"{error.got} (on rank {self._members[place]})", fix=error.fix)
        self._check_alike(
            [row[1] for row in rows],
            "all processes that have slices of the same sequences must be called alike, with slices of one shape",
            f"pad sequences to a multiple of {self.size} positions, cut them into {self.size} equal slices, and make "
            "the same calls on all of them",
        )
        return mine.result()

    def check_sample(self, *sample: Any) -> None:
        """Raise on all of them unless all have a sample of the same shapes, or none: the model talks to the others."""
        self._check_alike(
            self._crew.share(shapes_of(sample)),
            "sample and sample_target must be slices of one shape on all processes that have slices of a sequence",
            "pass each process its own slice of the same rows",
        )

    def _check_alike(self, texts: list[str], rule: str, fix: str) -> None:
        for place, text in enumerate(texts):
            if text != texts[0]:
                first, other = self._members[0], self._members[place]
                raise PipelineError(rule, got=f"{text} on rank {other}, and {texts[0]} on rank {first}", fix=fix)

    def gather(self, numbers: Tensor) -> Tensor:
        """The numbers of all, one row for each slice. Over NCCL the stream waits, and not the host."""
        rows = numbers.new_zeros(self.size, len(numbers))
        rows[self._crew.rank] = numbers
        self._collective.sum(rows).wait()
        return rows

    def mean(self, number: Tensor) -> Tensor:
        """The mean of a number over all slices."""
        total = number.clone()
        self._collective.sum(total).wait()
        return total / self.size


def shapes_of(tree: Any) -> str:
    """The shapes and dtypes of the tensors in a tree, as text."""
    found = [
        f"{tuple(leaf.shape)} {str(leaf.dtype).removeprefix('torch.')}"
        for leaf in leaves(tree)
        if isinstance(leaf, Tensor)
    ]
    return f"tensors of {', '.join(found)}" if found else "no tensors"


class SliceCounts:
    """What the loss of each slice counts in one step: exchanged once, at the first microbatch.

    Args:
        slices: the processes.
        is_counted: whether ``loss_fn`` returned a sum and a count here.
        count: that of all microbatches here; else the number of labels that are not -100.
        device: where the loss is.

    Attributes:
        mean: of the counts of all slices.
    """

    def __init__(self, slices: Slices, is_counted: bool, count: Tensor | float, device: torch.device) -> None:
        mine = torch.zeros(2, dtype=torch.float64, device=device)
        mine[0] = float(is_counted)
        mine[1] = count
        rows = slices.gather(mine)
        self.mean = rows[:, 1].mean()
        kinds, counts = ((rows[:, each] != rows[0, each]).any() for each in (0, 1))
        self._wrong = [to_host(kinds.float()), to_host((counts & (rows[0, 0] == 0)).float())]

    def check(self) -> None:
        """Raise if the losses of the slices do not add up to that of the sequences. Waits for a GPU, up to here."""
        kinds, counts = (wait()[0][0] > 0 for wait in self._wrong)
        if kinds:
            raise PipelineError(
                "loss_fn must return (sum, count) for all slices of a sequence, or one number for all",
                got="both",
                fix="pass the same loss_fn on all ranks",
            )
        if counts:
            raise PipelineError(
                f"the targets that are not {IGNORED} are not spread evenly over the slices of the sequences, so means "
                "of them do not add up to the mean of the batch",
                got="a loss_fn that returns one number",
                fix="return (sum, count): the sum of the losses, and how many targets it has",
            )


def own_loss_of_a_slice() -> PipelineError:
    """The error if the model would compute its loss from one slice: labels move by one position across its end."""
    return PipelineError(
        "a model cannot compute its own loss from a slice of a sequence: it does not know the labels of the next slice",
        got="no loss_fn=, and a mesh with a dimension of slices",
        fix="pass loss_fn=, which returns (sum, count), and labels that were shifted before the sequence was cut",
    )
