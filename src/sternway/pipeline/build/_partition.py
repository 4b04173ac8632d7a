"""Cutting a whole model into stages: where it can be cut, and where it is best cut.

How stages of an unmodified model run is in ``pipeline/forward``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from sternway.errors import PipelineError
from sternway.pipeline.forward._cut_model import CutModel
from sternway.pipeline.forward._flow import Call, Flow
from sternway.pipeline.forward._part import ModelPart
from sternway.pipeline.forward._pieces import Outline, called_modules, weight
from sternway.pipeline.forward._record import record, sample_runs


@dataclass(frozen=True, slots=True)
class Layout:
    """Where a model can be cut.

    Attributes:
        calls: the calls of its pieces, in order.
        flow: what a forward showed; None if there was no sample.
    """

    calls: tuple[Call, ...]
    flow: Flow | None = None

    @property
    def points(self) -> list[int]:
        """The calls at which a stage may begin: all, but for those where something would be cut that cannot be."""
        obstacles = [] if self.flow is None else self.flow.obstacles
        ends = [(each.made, len(self.calls) if each.used is None else each.used) for each in obstacles]
        return [i for i in range(len(self.calls)) if i == 0 or not any(made <= i < used for made, used in ends)]

    @property
    def names(self) -> list[str]:
        """The modules at which a stage may begin."""
        return [self.calls[point][0] for point in self.points]

    def stage_of_call(self, starts: Sequence[int]) -> dict[Call, int]:
        """The stage of each call, if stages begin at these of the points."""
        points = self.points
        begins = {points[start] for start in starts if start < len(points)}  # a model of one stage may have none
        stage, stage_of_call = -1, dict[Call, int]()
        for place, call in enumerate(self.calls):
            stage += place in begins
            stage_of_call[call] = max(stage, 0)
        return stage_of_call

    def cut(self, model: nn.Module, starts: Sequence[int]) -> CutModel:
        """The model in stages that begin at these of the points."""
        pieces = list(dict.fromkeys(name for name, _ in self.calls))
        return CutModel(model, pieces, self.stage_of_call(starts), self.flow)

    def balanced(self, costs: Sequence[float], parts: int) -> list[int]:
        """Where ``parts`` stages of equal cost begin, as far as possible, given the cost from each point to the next.

        Raises:
            PipelineError: if there are too few points.
        """
        if parts == 1:
            return [0]
        if len(costs) < parts <= len(self.calls) and self.flow is not None:
            raise self.flow.obstacles[0].error()
        return balance(costs, parts)

    def starts(self, cuts: Sequence[str]) -> list[int]:
        """Where the stages begin, given the modules that they begin with.

        Raises:
            PipelineError: if something would be cut that cannot be, or they are not in the order of the calls.
        """
        names = self.names
        if any(name not in names for name in cuts) and self.flow is not None and self.flow.obstacles:
            raise self.flow.obstacles[0].error()
        starts = [0, *(names.index(name) for name in cuts)]
        if starts != sorted(set(starts)):
            raise PipelineError(
                "cuts must be in the order of the calls, each once, and after the first",
                got=str(list(cuts)),
                fix=f"pass {[name for name in sorted(set(cuts), key=names.index) if names.index(name)]}",
            )
        return starts


def arguments_of(sample: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A sample as arguments of the model: a dict has keyword arguments, a tuple arguments; anything else is one."""
    if isinstance(sample, dict):
        return (), dict(sample)
    return (sample if type(sample) is tuple else (sample,)), {}


def lay_out(model: nn.Module, sample: Any = None, wanted: int = 2, named: Sequence[str] = ()) -> Layout:
    """Find at least ``wanted`` pieces of a model, with those ``named`` among them, if it has as many.

    Without a sample the model is not run: its modules count in the order in which it has them.
    """
    if sample is None:
        return Layout(tuple((name, -1) for name in Outline(model).pieces(wanted, named)))
    args, kwargs = arguments_of(sample)
    with sample_runs():
        called = called_modules(model, args, kwargs)
    pieces = Outline(model, called).pieces(wanted, named)
    flow = record(model, {name: model.get_submodule(name) for name in pieces}, args, kwargs)
    return Layout(tuple(flow.calls), flow)


def layout_of(names: Sequence[str]) -> Layout:
    """The layout in which a profile of a whole model was measured."""
    counts: Counter[str] = Counter()
    calls: list[Call] = []
    for name in names:
        calls.append((name, counts[name] if names.count(name) > 1 else -1))
        counts[name] += 1
    return Layout(tuple(calls))


def split_model(model: nn.Module, cuts: Sequence[str], sample: Any = None) -> list[ModelPart]:
    """Cut ``model`` into stages. A new stage begins at each module named in ``cuts``.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
        >>> [name for stage in split_model(model, ["2"]) for name, _ in stage.named_parameters()]
        ['0.weight', '0.bias', '2.weight', '2.bias']

    Raises:
        PipelineError: if a name is not called, or the names are not in the order of the calls.
    """
    layout = lay_out(model, sample, named=cuts)
    return layout.cut(model, layout.starts(cuts)).parts()


def weights(model: nn.Module, layout: Layout) -> list[float]:
    """A rough cost from each point to the next, without running it: parameters, except embedding tables."""
    each = [weight(model.get_submodule(name)) for name, _ in layout.calls]
    ends = [*layout.points[1:], len(each)]
    return [sum(each[start:end]) for start, end in zip(layout.points, ends, strict=False)]


def balance(costs: Sequence[float], parts: int) -> list[int]:
    """Cut a sequence into ``parts`` so that the largest sum is as small as possible; returns where each part starts.

    Example:
        >>> balance([4, 1, 1, 1, 1], 2)
        [0, 1]
    """
    if parts > len(costs):
        raise PipelineError(
            f"a model of {len(costs)} modules cannot have more stages than that",
            got=f"{parts} stages",
            fix="use fewer ranks",
        )
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    # best[i]: the smallest possible largest sum of the first i entries in k parts, and where the last part starts.
    best = [(total, 0) for total in sums]
    choices: list[list[int]] = []
    for k in range(2, parts + 1):
        rows = [
            min(((max(best[j][0], sums[i] - sums[j]), j) for j in range(k - 1, i)), default=(float("inf"), 0))
            for i in range(len(sums))
        ]
        choices.append([j for _, j in rows])
        best = rows
    starts, end = [], len(costs)
    for row in reversed(choices):
        end = row[end]
        starts.append(end)
    return [0, *reversed(starts)]
