"""The state of an optimizer by parameter name, so that it fits any other cut of the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sternway.errors import CheckpointError

STATE = "optimizer.state"
"""What comes before the names of an optimizer's tensors in a checkpoint, as torch names them."""


@dataclass(slots=True)
class OptimizerState:
    """The state of an optimizer, of one process or of all.

    Attributes:
        tensors: by parameter name and field, such as ``exp_avg``.
        values: what is no tensor, by the same.
        options: the options of each parameter's group, such as ``lr``, by parameter name.
    """

    tensors: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    values: dict[str, dict[str, Any]] = field(default_factory=dict)
    options: dict[str, dict[str, Any]] = field(default_factory=dict)


def take(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> OptimizerState:
    """Read the state of an optimizer. ``names`` has the name of each parameter by its ``id``.

    Raises:
        CheckpointError: if a parameter is not the pipeline's.
    """
    found = OptimizerState()
    for group in optimizer.param_groups:
        options = {key: value for key, value in group.items() if key != "params"}
        for parameter in group["params"]:
            name = names.get(id(parameter))
            if name is None:
                raise CheckpointError(
                    "the optimizer must hold parameters of the pipeline only",
                    got=f"another one, of shape {tuple(parameter.shape)}",
                    fix="make the optimizer from pipe.parameters()",
                )
            found.options[name] = options
            state = optimizer.state.get(parameter, {})
            found.tensors[name] = {key: value for key, value in state.items() if isinstance(value, Tensor)}
            found.values[name] = {key: value for key, value in state.items() if not isinstance(value, Tensor)}
    return found


def as_torch_names(tensors: Mapping[str, Mapping[str, Tensor]], state: OptimizerState) -> dict[str, Any]:
    """The state of an optimizer, nested so that it is saved under torch's names.

    They are those of ``get_optimizer_state_dict`` with ``flatten_optimizer_state_dict=True``, so that other programs
    can load it with torch.distributed.checkpoint. Options are written for them; we read ours from ``run.pt``.
    """
    return {
        "state": {name: {**fields, **state.values[name]} for name, fields in tensors.items()},
        "param_groups": dict(state.options),
    }


def give(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str], saved: OptimizerState, ties: Mapping[str, Sequence[str]]
) -> None:
    """Set the state of an optimizer. That of a tied parameter may be saved under another of its names."""
    for group in optimizer.param_groups:
        for place, parameter in enumerate(group["params"]):
            name = known_name(names[id(parameter)], saved, ties)
            if place == 0:
                _set_options(group, saved.options[name])
            elif not _same(saved.options[name], group):
                raise CheckpointError(
                    "parameters of one group must have been saved with the same options",
                    got=f"others for {name}: {saved.options[name]}",
                    fix="group the parameters as they were grouped then",
                )
            state = optimizer.state[parameter]
            state.clear()
            state.update(saved.values.get(name, {}))
            on_device = bool(group.get("capturable") or group.get("fused"))
            for key, value in saved.tensors.get(name, {}).items():
                # torch keeps the count of steps on the CPU, unless kernels read it.
                state[key] = value if key == "step" and not on_device else value.to(parameter.device)


def known_name(name: str, saved: OptimizerState, ties: Mapping[str, Sequence[str]]) -> str:
    """The name under which a parameter's state was saved: its own, or one that it is tied to."""
    found = next((other for other in (name, *ties.get(name, ())) if other in saved.options), None)
    if found is None:
        raise CheckpointError(
            "the checkpoint does not have the optimizer's state of every parameter",
            got=f"none for {name}",
            fix="resume without the optimizer, or from a checkpoint that was saved with one",
        )
    return found


def _set_options(group: dict[str, Any], options: dict[str, Any]) -> None:
    for key, value in options.items():
        old = group.get(key)
        if isinstance(old, Tensor) and isinstance(value, Tensor):
            old.copy_(value)  # a learning rate scheduler may hold it
        else:
            group[key] = value


def _same(options: dict[str, Any], group: dict[str, Any]) -> bool:
    return all(
        torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in ((v, group[k]) for k, v in options.items())
    )
