"""A whole model as stages: which piece is in which stage, what each holds, and what crosses the cuts."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from sternway._torch.modes import buffer_places, buffers_by_name, has_backward_hooks
from sternway._torch.tensors import version_of
from sternway.errors import PipelineError
from sternway.pipeline.forward._attributes import OwnAttributes
from sternway.pipeline.forward._flow import Call, Crossing, Flow
from sternway.pipeline.forward._follow import Interceptor
from sternway.pipeline.forward._part import ModelPart, within
from sternway.pipeline.forward._record import record
from sternway.pipeline.forward._recorder import names_of_kept


class CutModel:
    """A model, its pieces, and the stage of each call of a piece.

    Args:
        model: the whole model.
        pieces: the names of its pieces.
        stage_of_call: the stage of each call; the number -1 stands for all calls of a piece.
        flow: what a forward showed; None to look at the first batch.
    """

    def __init__(
        self, model: nn.Module, pieces: Sequence[str], stage_of_call: Mapping[Call, int], flow: Flow | None
    ) -> None:
        self.model, self.stage_of_call = model, dict(stage_of_call)
        self.pieces = {name: model.get_submodule(name) for name in pieces}
        self.last = max(stage_of_call.values(), default=0)
        names = names_of_kept(model, self.pieces)
        inside = {id(module): module for piece in self.pieces.values() for module in piece.modules()}
        self.interceptor, self._buffers_inside = Interceptor(self.pieces), buffer_places(inside.values())
        self._outside = [(name, module) for name, module in model.named_modules() if id(module) not in inside]
        stages = {
            name: {s for (each, _), s in self.stage_of_call.items() if within(each, [name])}
            for name, _ in self._outside
        }
        self._own = [
            (module, name) for _, module in self._outside for name, _ in module.named_parameters(recurse=False)
        ]
        self._known: dict[int, weakref.ref[Tensor]] = {}
        self._cut_inside = [(name, module) for name, module in self._outside if name and len(stages[name]) > 1]
        self.attributes, self.shared_by = OwnAttributes([module for _, module in self._outside], model), 0
        self.crossing: Crossing | None = None
        self._flow = flow
        self._release: set[int] | None = None  # the stages to keep, once the whole model is not needed any more
        self.stages_of = self._stages_of(names, flow)
        if flow is not None:
            self.crossing = flow.crossing(self.stage_of_call)

    def _stages_of(self, names: Mapping[int, Sequence[str]], flow: Flow | None) -> dict[int, set[int]]:
        """The stages that hold each parameter and each buffer of a piece, by the tensor's id."""
        found: dict[int, set[int]] = {key: set() for key in names}
        if flow is not None:
            stage_of = flow.stages(self.stage_of_call)
            for key, aliases in names.items():
                found[key] = {stage_of[segment] for name in aliases for segment in flow.kept.get(name, ())}
        for (name, _), stage in self.stage_of_call.items():
            for tensor in [*self.pieces[name].parameters(), *self.pieces[name].buffers()]:
                if flow is None or not found[id(tensor)]:
                    found[id(tensor)].add(stage)
        everywhere = set(range(self.last + 1)) if flow is None else {0}
        return {key: stages or everywhere for key, stages in found.items()}

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_known": {}}

    def buffers_inside(self) -> dict[int, Tensor]:
        """The buffers that the pieces have now, by id."""
        places = filter(None, self._buffers_inside)
        return {id(buffer): buffer for own in places for buffer in own.values() if buffer is not None}

    def buffers_outside(self) -> dict[tuple[str, str], tuple[Tensor, int]]:
        """The buffers that code between the pieces may use, by module and name, and what they are now."""
        return {
            (name, own): (buffer, version_of(buffer))
            for name, module in self._outside
            for own, buffer in buffers_by_name(module).items()
            if buffer is not None
        }

    def has(self, parameter: nn.Parameter) -> bool:
        """Whether a parameter is that of a stage, and so of ``pipe.parameters()``."""
        for _ in range(2):
            known = self._known.get(id(parameter))
            if known is not None and known() is parameter:
                return True
            pieces = [p for piece in self.pieces.values() for p in piece.parameters()]  # a piece may have got others
            outside = [getattr(module, name, None) for module, name in self._own]
            self._known = {id(p): weakref.ref(p) for p in [*pieces, *outside] if p is not None}
        return False

    def check_hooks(self) -> None:
        """Raise if a module that is cut inside has hooks for gradients: no stage has both its input and its output."""
        for name, module in self._cut_inside:
            if has_backward_hooks(module):
                raise PipelineError(
                    "a module that is cut inside cannot have backward hooks: no stage has its input and its output",
                    got=name,
                    fix="put the hooks on modules inside it, or cut elsewhere",
                )

    def look(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Crossing:
        """What crosses the cuts: as is known, or else as one forward of this batch shows."""
        if self.crossing is None:
            self._flow = flow = record(self.model, self.pieces, args, kwargs)
            names = {
                name: key for key, all_names in names_of_kept(self.model, self.pieces).items() for name in all_names
            }
            stage_of = flow.stages(self.stage_of_call)
            for name, segments in flow.kept.items():
                elsewhere = {stage_of[segment] for segment in segments} - self.stages_of[names[name]]
                if elsewhere:
                    raise PipelineError(
                        f"{name} is used in stage {min(elsewhere)}, but was given to another",
                        got=f"stages {sorted(self.stages_of[names[name]])}",
                        fix="pass sample=, one microbatch, from which it is found who uses what",
                    )
            self.crossing = flow.crossing(self.stage_of_call)
            if self._release is not None:
                self.release(self._release)
        return self.crossing

    def crosses(self) -> list[list[str]] | None:
        """What crosses each cut, in words; None if it is not known yet."""
        if self.crossing is None or self._flow is None:
            return None
        return [[self._flow.describe(key) for key in sorted(keys)] for keys in self.crossing.values]

    def ties(self) -> list[list[str]]:
        """Parameters that have several names, or are in several stages: all names of each."""
        names: dict[int, list[str]] = {}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
        return [group for key, group in names.items() if len(group) > 1 or len(self.stages_of[key]) > 1]

    def release(self, stages: set[int]) -> None:
        """Free what other stages hold than these. If the first batch is still to be looked at, do so afterwards."""
        if self.crossing is None and 0 in stages:
            self._release = stages
            return
        for module in self.model.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                if id(parameter) in self.stages_of and not self.stages_of[id(parameter)] & stages:
                    setattr(module, name, nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad))
            for name, buffer in list(module.named_buffers(recurse=False)):
                if id(buffer) in self.stages_of and not self.stages_of[id(buffer)] & stages:
                    setattr(module, name, buffer.detach().to("meta"))
        self.stages_of = {}  # by the ids of tensors that may be gone

    def parts(self) -> list[ModelPart]:
        """A module for each stage."""
        return [ModelPart(self, stage) for stage in range(self.last + 1)]
