"""One stage's part of one forward.

The model's own forward runs from its first line. In segments of earlier stages, pieces are not called and glue that
depends on them is not computed: each returns what arrived from the stage before, or an ``Absent``. Then this stage's
segments run as they are. When the forward calls a piece of a later stage, it is left.

What every call returned is noted in a trail, which goes along with the values. A later stage compares each call with
it, so that no stage can take another way through the forward than the stages before it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sternway._torch.tensors import storage_id, version_of
from sternway._tree import CONSTANT, TensorIndex, leaves, replace_leaves
from sternway.errors import PipelineError
from sternway.pipeline.forward._absent import Absent, Like, Noted, not_here, note, tensors_in
from sternway.pipeline.forward._flow import Call, Crossing
from sternway.pipeline.forward._follow import PIECE, Follower, Interceptor, Key, check_replaced
from sternway.pipeline.forward._names import function_name, user_line
from sternway.pipeline.forward._python_random import python_seeded


class Left(BaseException):
    """Leaves the forward. Not an ``Exception``, so that no model's own code catches it."""


class Trail:
    """What earlier stages noted of one forward, and what all stages know of the batch. Constant while shapes are.

    Attributes:
        batch: the arguments of the forward, with a ``TensorIndex`` for each tensor.
        likes: these tensors.
        crossing: what each stage sends.
        segments: for each segment so far, what its calls returned: first that of the piece, if there is one.
    """

    __slots__ = ("batch", "crossing", "likes", "segments")

    def __init__(self, batch: Any, likes: list[Like], crossing: Crossing, segments: list[list[Noted]]) -> None:
        self.batch, self.likes, self.crossing, self.segments = batch, likes, crossing, segments

    @property
    def varies(self) -> bool:
        """Whether the batch has arguments that may differ from step to step without notice."""
        return any(not isinstance(leaf, CONSTANT) for leaf in leaves(self.batch))

    def _all(self) -> tuple[Any, ...]:
        return self.batch, self.likes, self.crossing, self.segments

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Trail) and self._all() == other._all()

    __hash__ = None  # type: ignore[assignment]  # mutable while it is made

    def __reduce__(self) -> Any:
        return Trail, self._all()


Message = tuple[dict[int, Tensor], dict[Key, Tensor], Trail]
"""What a stage passes on: tensors of the batch, values, and the trail."""


@dataclass(frozen=True, slots=True)
class StageTask:
    """Which part of which model a stage runs."""

    model: nn.Module
    pieces: Interceptor
    stage: int
    last: int
    stage_of_call: Mapping[Call, int]
    kept: Mapping[int, Tensor]
    device: torch.device
    python_seed: int | None
    has: Callable[[nn.Parameter], bool]  # whether a parameter is that of any stage


class StageRun(Follower):
    """Runs one stage's part of one forward."""

    def __init__(self, task: StageTask, batch: dict[int, Tensor], values: dict[Key, Tensor], trail: Trail) -> None:
        super().__init__(task.kept, looks_at_python=trail.crossing.makes_tensors)
        self._task, self._batch, self._arrived, self._trail = task, batch, values, trail
        self._past, self._own = trail.segments, [list[Noted]()] if task.stage == 0 else []
        self._is_own = task.stage == 0
        self.begun = time.perf_counter()  # this stage's own work
        self._place = 0  # of the next call in a past segment
        self._numbers: Counter[str] = Counter()
        self._stale: set[int] = set()  # storages that only an earlier stage has changed
        self._now: dict[int, tuple[Tensor, Tensor]] = {}  # tensors that earlier stages changed, and what they are now
        wanted = trail.crossing.values[task.stage] if task.stage < task.last else frozenset()
        self._wanted = wanted
        self._records = torch.is_grad_enabled()
        self._made: dict[Key, Tensor] = {}
        for key, tensor in values.items():
            self.name_value(tensor, key)

    def run(self) -> tuple[Any, dict[Key, Tensor], list[list[Noted]]]:
        """What the forward returned, if this is the last stage, the values for the next, and what to add to the trail.

        Raises:
            PipelineError: if this stage takes another way than those before it.
        """
        args, kwargs = replace_leaves(self._argument, self._trail.batch)
        result: Any = None
        try:
            with self._task.pieces.passing_to(self.call) as replaced, self:
                result = self._task.model(*args, **kwargs)
        except Left:
            pass
        else:
            if self._task.stage < self._task.last or not self._is_own:
                raise self._another_way("the end of the forward")
            result = self._present(result)
            for tensor in tensors_in(result):
                self._must_be_here(tensor, "the result of the forward")
        check_replaced(replaced)
        return result, self._made, self._own

    def _argument(self, leaf: Any) -> Any:
        if not isinstance(leaf, TensorIndex):
            return leaf
        found = self._batch.get(leaf.index)
        return Absent(self._trail.likes[leaf.index], self._task.device) if found is None else found

    # Pieces

    def call(self, name: str, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A piece is called: run it, return what it returned elsewhere, or leave."""
        if self._aside:  # inside another one
            return forward(*args, **kwargs)
        number = self._numbers[name]
        self._numbers[name] += 1
        of_call = self._task.stage_of_call
        stage = of_call.get((name, number), of_call.get((name, -1)))
        if stage is None:
            raise PipelineError(
                "the forward must call the modules that it called when it was first run",
                got=f"{name} at {user_line()}",
                fix="pass a sample= that takes the same way through the forward",
            )
        if stage > self._task.stage:
            raise Left
        if not self._is_own:
            self._end_past_segment(name)
        elif stage < self._task.stage:
            raise PipelineError(
                "the stages must be in the order in which the forward calls their modules",
                got=f"{name} of stage {stage}, called in stage {self._task.stage}",
                fix="pass sample=, one microbatch, from which that order is found",
            )
        self.next_segment()
        if stage < self._task.stage:
            self._place = 0
            return self._replay((self.segment, PIECE, 0, 0), name, lambda: tensors_in(args, kwargs))
        if not self._is_own:
            self._is_own, self.begun = True, time.perf_counter()
            if len(self._past) != self.segment:
                raise self._another_way(name)
        self._own.append([])
        args, kwargs = self._present((args, kwargs))
        tensors = tensors_in(args, kwargs)
        for tensor in tensors:
            self._must_be_here(tensor, name)
        seed = self._task.python_seed
        with self.aside():  # to look at tensors costs much less there
            before = [version_of(tensor) for tensor in tensors]
            with nullcontext() if seed is None else python_seeded(hash((seed, self.segment))):
                result = forward(*args, **kwargs)
            written = tuple(i for i, tensor in enumerate(tensors) if version_of(tensor) != before[i])
            self._note((self.segment, PIECE, 0, 0), name, result, tensors, written)
        return result

    # Glue

    def read(self, function: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
        args, kwargs = self._present((args, kwargs))
        for tensor in tensors_in(args, kwargs):
            self._must_be_here(tensor, function_name(function))
        return function(*args, **kwargs)

    def glue(self, key: Key, function: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
        if not self._is_own:
            return self._replay(key, key[1], lambda: tensors)
        args, kwargs = self._present((args, kwargs))
        tensors = tensors_in(args, kwargs)
        for tensor in tensors:
            self._must_be_here(tensor, key[1])
        before = [version_of(tensor) for tensor in tensors]
        result = function(*args, **kwargs)
        written = tuple(i for i, tensor in enumerate(tensors) if version_of(tensor) != before[i])
        self._note(key, key[1], result, tensors, written)
        return result

    def _note(self, key: Key, name: str, result: Any, tensors: list[Tensor], written: tuple[int, ...]) -> None:
        is_piece = key[1] == PIECE
        noted, found = note(name, result, [] if is_piece else tensors, written)
        self._own[-1].append(noted)
        for place in written:
            self.name_written(tensors[place])
            if not is_piece:
                self._keep(tensors[place], (*key[:3], -1 - place))
        for place, tensor in enumerate(found):
            own = (*key[:3], place)
            if isinstance(noted.tensors[place], Like):
                self._keep(tensor, own)
            elif own in self._wanted and all(tensor is not made for made in self._made.values()):
                self._made[own] = tensor  # an argument, returned as it is: it keeps the key that it has

    def _keep(self, tensor: Tensor, key: Key) -> None:
        self.name_value(tensor, key)
        if key in self._wanted:
            self._made[key] = tensor

    # Segments of earlier stages

    def _replay(self, key: Key, name: str, arguments: Callable[[], list[Tensor]]) -> Any:
        past = self._past[self.segment] if self.segment < len(self._past) else []
        if self._place >= len(past) or past[self._place].name != name:
            raise self._another_way(name)
        noted = past[self._place]
        self._place += 1
        tensors = arguments() if noted.looks_at_arguments else []
        arrived = {
            place: self._arrived[(*key[:3], place)]
            for place, each in enumerate(noted.tensors)
            if (*key[:3], place) in self._arrived
            and (isinstance(each, Like) or isinstance(tensors[each], Absent))  # else the argument itself is here
        }
        for position in noted.written:
            tensor = tensors[position]
            if not isinstance(tensor, Absent):
                self.name_written(tensor)
                self._stale.add(storage_id(tensor))
            self._now.pop(id(tensor), None)
            changed = self._arrived.get((*key[:3], -1 - position))
            if changed is not None:
                self._now[id(tensor)] = tensor, changed
                for place, each in enumerate(noted.tensors):
                    if each == position:
                        arrived[place] = changed
        if self._records and not torch.is_grad_enabled() and arrived:
            # Perhaps inside a torch.autograd.Function, which would take what it returns for its own output.
            result = noted.again(tensors, {}, self._task.device)
            found = tensors_in(result)
            self._now |= {id(found[place]): (found[place], tensor) for place, tensor in arrived.items()}
            return result
        return noted.again(tensors, arrived, self._task.device)

    def _end_past_segment(self, name: str) -> None:
        if self.segment >= len(self._past) or self._place != len(self._past[self.segment]):
            raise self._another_way(name)

    def _present(self, tree: Any) -> Any:
        """``tree``, with what arrived in place of tensors that earlier stages changed."""
        if not self._now:
            return tree

        def present(leaf: Any) -> Any:
            now = self._now.get(id(leaf))
            if now is None:
                return leaf
            if self._records and not torch.is_grad_enabled() and now[1].requires_grad:
                raise PipelineError(
                    "a stage cannot begin with a torch.autograd.Function, or with code under no_grad, that takes what "
                    "an earlier stage changed in place or made in such a Function",
                    got=user_line(),
                    fix="cut elsewhere",
                )
            return now[1]

        return replace_leaves(present, tree)

    def _must_be_here(self, tensor: Tensor, what: str) -> None:
        if isinstance(tensor, Absent) or (self._stale and type(tensor) is Tensor and storage_id(tensor) in self._stale):
            raise not_here(what)
        if type(tensor) is not Tensor and isinstance(tensor, nn.Parameter) and tensor.requires_grad:
            self._must_be_known(tensor, what)

    def _must_be_known(self, parameter: nn.Parameter, what: str) -> None:
        if not self._task.has(parameter):
            raise PipelineError(
                "the forward uses a parameter that the model did not have when it was cut, and no stage has",
                got=f"one of shape {tuple(parameter.shape)} for {what} at {user_line()}",
                fix="build another pipeline of the changed model; what is inside of a stage's module may change",
            )

    def _another_way(self, name: str) -> PipelineError:
        return PipelineError(
            f"stage {self._task.stage} takes another way through the forward than the stages before it",
            got=f"{name} at {user_line()}",
            fix="let the way depend on nothing but the arguments of the forward and the mode, or cut elsewhere",
        )
