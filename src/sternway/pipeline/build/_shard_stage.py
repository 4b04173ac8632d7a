"""Shard one stage of a whole model by the user's function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

ShardFn = Callable[[nn.Module], Any]
"""Calls ``fully_shard`` on a stage, or on modules of it."""


def shard_stages_of(model: nn.Module, stages: Sequence[nn.Module], shard: ShardFn) -> None:
    """Call ``shard`` on the stages of a model that are here, once others have let go of them."""
    called = {id(module) for stage in stages for module in stage.modules()}
    for stage in stages:
        outside = _take_out(stage, model)
        try:
            shard(stage)
        finally:
            _put_back(stage, model, outside, called)


@dataclass(frozen=True, slots=True)
class _Outside:
    """A parameter that a stage holds, but no module that it calls: it is used as it is, or is another's second name."""

    name: str
    parameter: nn.Parameter
    inside: str | None  # the name of the same parameter in a module that the stage calls


def _take_out(stage: nn.Module, model: nn.Module) -> list[_Outside]:
    """Take those parameters out of a stage: sharded, they would be others than those that the model's forward uses."""
    held = dict(stage.named_parameters(remove_duplicate=False))
    own = {name: stage.get_submodule(name.rpartition(".")[0]) for name in held}
    called = {name for name in held if own[name] is model.get_submodule(name.rpartition(".")[0])}
    inside = {id(held[name]): name for name in called}
    found = [_Outside(name, held[name], inside.get(id(held[name]))) for name in held if name not in called]
    for each in found:
        delattr(own[each.name], each.name.rpartition(".")[2])
    return found


def _put_back(stage: nn.Module, model: nn.Module, outside: list[_Outside], called: set[int]) -> None:
    """Put them back; those that have a sharded twin now as that twin, and the whole one is freed.

    It is not freed in a module that another stage here calls, which is one of ``called``: that shards its own.
    """
    for each in outside:
        path, _, short = each.name.rpartition(".")
        now = each.parameter if each.inside is None else stage.get_parameter(each.inside)
        stage.get_submodule(path).register_parameter(short, now)
        if now is not each.parameter and id(model.get_submodule(path)) not in called:
            empty = nn.Parameter(each.parameter.detach().to("meta"), each.parameter.requires_grad)
            setattr(model.get_submodule(path), short, empty)
