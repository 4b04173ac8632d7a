"""The module of one stage of a whole model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from sternway._torch.modes import buffers_by_name, parameter_places
from sternway._tree import TensorIndex, tensor_places
from sternway.errors import PipelineError
from sternway.pipeline.forward._absent import like
from sternway.pipeline.forward._attributes import OwnAttributes
from sternway.pipeline.forward._flow import Crossing
from sternway.pipeline.forward._follow import Key
from sternway.pipeline.forward._own_loss import LABELS, check_term, filled, find_rule, loss_of, nothing_moved, trial
from sternway.pipeline.forward._python_random import python_seeded
from sternway.pipeline.forward._shield import Shield
from sternway.pipeline.forward._stage_run import Message, StageRun, StageTask, Trail
from sternway.pipeline.forward._untouched import untouched
from sternway.pipeline.transport._payload import pack

if TYPE_CHECKING:
    from sternway.pipeline.forward._cut_model import CutModel

SHARES = "sternway_shares"
"""The keyword argument of the first stage with a microbatch's shares of the labels; see ``_own_loss.py``."""
_SHARES_LEAF = -1


class ModelPart(nn.Module):
    """One stage of a whole model. It holds the stage's parameters and buffers, by their names in the whole model.

    The first stage is called with the arguments of the model, every other one with what the stage before returned. The
    last one returns what the model does.

    What it has besides is called ``sternway_…``: its modules and parameters have the names that the model gave them.
    """

    set_by_forward = ("sternway_dead", "sternway_begun", "sternway_weight")  # who replays the forward sees to these

    def __init__(self, cut: CutModel, stage: int) -> None:
        super().__init__()
        self._outside: list[tuple[nn.Module, str, nn.Module]] = []  # buffers not of its pieces: here, and in the model
        self._own: list[tuple[nn.Parameter, str, nn.Module, nn.Module]] = []  # those outside of pieces: here, and there
        self._fill(cut, stage)
        self._parameter_places = parameter_places(self)
        cut.shared_by += 1
        self._cut = (cut,)  # in a tuple, so that the whole model is not a submodule
        self._stage = stage
        self._shields = Shield(), Shield()
        self._sternway_rule: int | None = None  # how the model's own loss averages, once it is known
        self._is_tried = any(isinstance(p, DTensor) for p in self.parameters())  # whether it has no other term
        self.sternway_dead: list[Tensor] = []  # what the last forward returned and no gradient is expected for
        self.sternway_begun: float | None = None  # when the stage's own work of the last forward began
        self.sternway_uses_own_loss = False  # whether the model itself computes the loss, in the last stage
        self.sternway_weight: Tensor | None = None  # of the last microbatch in the model's own loss, in the last stage
        self.sternway_python_seed: int | None = None  # of what Python draws, the same in all stages of a microbatch
        super().train(cut.model.training)

    def _fill(self, cut: CutModel, stage: int) -> None:
        """Take the stage's pieces, what it holds besides them, and the buffers that are outside of pieces."""
        own = [name for (name, _), where in cut.stage_of_call.items() if where == stage]
        for name in dict.fromkeys(own):
            self._holder(name).add_module(name.rpartition(".")[2], cut.pieces[name])
        for name, parameter in cut.model.named_parameters(remove_duplicate=False):
            if stage in cut.stages_of[id(parameter)] and not within(name, own):
                path, _, short = name.rpartition(".")
                self._holder(name).register_parameter(short, parameter)
                self._own.append((parameter, short, self._holder(name), cut.model.get_submodule(path)))
        for path, module in cut.model.named_modules(remove_duplicate=False):
            for short, buffer in module.named_buffers(recurse=False):
                name = f"{path}.{short}" if path else short
                if stage in cut.stages_of.get(id(buffer), (stage,)) and not within(name, own):
                    persistent = short in module.state_dict(keep_vars=True) if _plain(module) else True
                    self._holder(name).register_buffer(short, buffer, persistent=persistent)
                    self._outside.append((self._holder(name), short, module))

    def _holder(self, name: str) -> nn.Module:
        """The module that holds what is called ``name``: as in the whole model, but empty unless it is a piece."""
        first = name.split(".")[0]
        if first in vars(self) or callable(getattr(type(self), first, None)) or first == "set_by_forward":
            raise PipelineError(
                "the model has something by a name that its stages need for themselves", got=first, fix="rename it"
            )
        holder: nn.Module = self
        for step in name.split(".")[:-1]:
            if step not in dict(holder.named_children()):
                holder.add_module(step, nn.Module())
            holder = holder.get_submodule(step)
        return holder

    def look_outside(self) -> None:
        """Hold the buffers that the model has now: it may have got others, as by ``model.double()``."""
        for holder, name, owner in self._outside:
            now = buffers_by_name(owner).get(name)
            if now is not None and now is not getattr(holder, name) and not now.is_meta:
                setattr(holder, name, now)

    def check_parameters(self) -> None:
        """Raise if the model has another parameter than when it was cut: the optimizer would not know it, nor ties."""
        for parameter, short, holder, owner in self._own:  # what fully_shard replaces, it replaces here too
            if getattr(owner, short, None) is not parameter is getattr(holder, short):
                raise PipelineError(
                    "a parameter cannot be replaced when a pipeline has been built of its model",
                    got=f"another {short} of {type(owner).__name__}",
                    fix="replace it before, or set its values: parameter.data.copy_(…)",
                )

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """As of any module; buffers not of its pieces are those that the whole model has now."""
        self.look_outside()
        return super().named_buffers(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As of any module; buffers not of its pieces are those that the whole model has now."""
        self.look_outside()
        return super().state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As of any module; buffers not of its pieces are those that the whole model has now."""
        self.look_outside()
        return super().load_state_dict(*args, **kwargs)

    @property
    def attributes(self) -> OwnAttributes:
        """What each stage of the whole model has of the attributes outside of pieces."""
        return self._cut[0].attributes

    @property
    def model(self) -> nn.Module:
        """The whole model."""
        return self._cut[0].model

    def crossing_of(self, args: tuple[Any, ...]) -> Crossing | None:
        """What crosses the cuts, if it is called so; None if that is unknown."""
        return self._cut[0].crossing if self._stage == 0 else args[2].crossing

    def expects_gradients(self, crossing: Crossing) -> bool:
        """Whether a gradient comes back for each value that is sent."""
        return self._stage == self._cut[0].last or not crossing.dead[self._stage]

    def train(self, mode: bool = True) -> ModelPart:
        """Set the mode of the whole model, whose code between the pieces runs in every stage."""
        super().train(mode)
        self.model.train(mode)
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run this stage's part of the model's forward."""
        cut = self._cut[0]
        with cut.attributes.of(self._stage) if cut.shared_by > 1 else nullcontext():
            return self._forward(args, kwargs)

    def _forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.check_parameters()
        if self._stage == 0:
            shares = kwargs.pop(SHARES, None)
            spec, tensors = pack((args, kwargs))
            batch = dict(enumerate(tensors)) | ({} if shares is None else {_SHARES_LEAF: shares})
            crossing = self._cut[0].look(args, kwargs).of_batch(tensor_places(spec.tree))
            values, trail = {}, Trail(spec.tree, [like(tensor) for tensor in tensors], crossing, [])
        else:
            batch, values, trail = args
        task = self._task(self.sternway_python_seed if trail.crossing.draws_python else None)
        if task.stage == task.last and self.sternway_uses_own_loss:
            self.sternway_weight = self._own_weight(task, batch, values, trail)
            if self._sternway_rule is not None and (leaf := _labels_leaf(trail)) is not None:
                batch = batch | {leaf: filled(batch[leaf], self._sternway_rule)}
        for shield in self._shields:
            shield.clear()
        self._cut[0].check_hooks()
        outside = self._cut[0].buffers_outside() if task.last else {}
        with _drawing(task):
            run = StageRun(task, self._shields[0].give(batch), self._shields[1].give(values), trail)
            result, made, noted = run.run()
        self.sternway_begun = run.begun
        if outside:
            _check_outside(outside, self._cut[0].buffers_outside())
        for shield in self._shields:
            shield.check()
        if task.stage == task.last:
            return result
        crossing = trail.crossing
        on = {key: tensor for key, tensor in values.items() if key in crossing.values[task.stage]} | made
        self.sternway_dead = [tensor for key, tensor in on.items() if key in crossing.dead[task.stage]]
        passed = crossing.batch[task.stage] | {_SHARES_LEAF}
        rest = {leaf: tensor for leaf, tensor in batch.items() if leaf in passed}
        message: Message = rest, on, Trail(trail.batch, trail.likes, crossing, [*trail.segments, *noted])
        return message

    def _task(self, python_seed: int | None) -> StageTask:
        cut = self._cut[0]
        stage_of, kept, device = cut.stage_of_call, cut.buffers_inside(), self._device()
        return StageTask(
            cut.model, cut.interceptor, self._stage, cut.last, stage_of, kept, device, python_seed, cut.has
        )

    def _device(self) -> torch.device:
        """Where the stage's parameters are, or else its buffers."""
        parameters = (each for own in self._parameter_places for each in own.values() if each is not None)
        first: Tensor | None = next(parameters, None)
        if first is None:
            first = next(self.buffers(), None)
        return torch.device("cpu") if first is None else first.device

    def _own_weight(
        self, task: StageTask, batch: dict[int, Tensor], values: dict[Key, Tensor], trail: Trail
    ) -> Tensor | None:
        """The weight of this microbatch in the model's own loss; None if it is not known."""
        shares, labels = batch.get(_SHARES_LEAF), _labels_leaf(trail)
        if shares is None or labels is None:
            return None
        if self._sternway_rule is None:

            def loss_with(other: Tensor) -> Tensor:
                changed = {leaf: tensor.clone() for leaf, tensor in batch.items()} | {labels: other}
                with trial(), torch.no_grad(), untouched(self, self.model), _drawing(task):
                    copies = {key: value.clone() for key, value in values.items()}
                    return loss_of(StageRun(task, changed, copies, trail).run()[0])

            self._sternway_rule = find_rule(batch[labels], loss_with)
        if not self._is_tried and torch.is_grad_enabled():

            def grads_with(other: Tensor) -> list[Tensor]:
                changed = {leaf: tensor.clone() for leaf, tensor in batch.items()} | {labels: other}
                copies = {k: v.detach().clone().requires_grad_(v.requires_grad) for k, v in values.items()}
                with trial(), untouched(self, self.model), _drawing(task), nothing_moved():
                    loss = loss_of(StageRun(task, changed, copies, trail).run()[0])
                    own = [copy for copy in copies.values() if copy.requires_grad and copy.ndim]
                    found = torch.autograd.grad(loss, own, allow_unused=True) if own else ()
                return [grad for grad in found if grad is not None]

            self._is_tried = check_term(batch[labels], grads_with)
        return shares[self._sternway_rule]


def with_models(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """These stages, and the whole models of which they are parts."""
    return [*modules, *(module.model for module in modules if isinstance(module, ModelPart))]


def _drawing(task: StageTask) -> AbstractContextManager[None]:
    return nullcontext() if task.python_seed is None else python_seeded(task.python_seed)


def _check_outside(
    before: dict[tuple[str, str], tuple[Tensor, int]], after: dict[tuple[str, str], tuple[Tensor, int]]
) -> None:
    for (module, name), (buffer, version) in before.items():
        now, now_version = after.get((module, name), (None, 0))
        if now is not buffer or now_version != version:
            raise PipelineError(
                "code between the modules changes a buffer, and every stage runs it",
                got=f"{name} of {module or 'the model'}, of shape {tuple(buffer.shape)}",
                fix="change it inside a module",
            )


def _labels_leaf(trail: Trail) -> int | None:
    """Which tensor of the batch has the labels."""
    found = trail.batch[1].get(LABELS)
    return found.index if isinstance(found, TensorIndex) else None


def within(name: str, pieces: Sequence[str]) -> bool:
    """Whether a name is that of something inside of one of these pieces."""
    return any(name.startswith(f"{piece}.") for piece in pieces)


def _plain(module: nn.Module) -> bool:
    return type(module).state_dict is nn.Module.state_dict
