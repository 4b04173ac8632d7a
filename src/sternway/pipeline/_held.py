"""What a process holds of the model: its stages' parameters and buffers, by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Self

from torch import Tensor, nn

from sternway.errors import PipelineError
from sternway.pipeline._stage import Stage
from sternway.schedule import Schedule


class Held:
    """The part of ``Pipeline`` that is like an ``nn.Module``."""

    stages: dict[int, Stage]
    schedule: Schedule
    ranks_here: tuple[int, ...]

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This process's parameters, under their names in the whole model where that was given."""
        seen: set[int] = set()
        for stage in self.stages.values():
            for name, parameter in stage.module.named_parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield name, parameter

    def parameters(self) -> Iterator[nn.Parameter]:
        """This process's parameters, for an optimizer."""
        return (parameter for _, parameter in self.named_parameters())

    def state_dict(self) -> dict[str, Tensor]:
        """This process's parameters and buffers by name."""
        return {name: value for stage in self.stages.values() for name, value in stage.module.state_dict().items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take this process's parameters and buffers from ``state``, which may be the whole model's."""
        PipelineError.unless(isinstance(state, Mapping), "a state is a dict of tensors by name", state, "pass one")
        for stage in self.stages.values():
            own = stage.module.state_dict()
            missing = sorted(own.keys() - state.keys())
            if missing:
                raise PipelineError(
                    "a state has every parameter of this rank", got=f"none for {missing[0]}", fix="save it again"
                )
            try:
                stage.module.load_state_dict({name: state[name] for name in own})
            except (RuntimeError, TypeError, AttributeError) as error:
                got = f"{type(error).__name__}: {error}"
                raise PipelineError("a state fits the model", got=got, fix="pass the same model's state") from None

    def train(self, mode: bool = True) -> Self:
        """Put this process's modules into training mode, as ``nn.Module.train``."""
        for stage in self.stages.values():
            stage.module.train(mode)
        return self

    def eval(self) -> Self:
        """Put this process's modules into evaluation mode, as ``nn.Module.eval``."""
        return self.train(False)

    def _named(self) -> dict[int, dict[str, nn.Parameter]]:
        return {
            rank: {
                name: parameter
                for index in self.schedule.placement[rank]
                for name, parameter in self.stages[index].module.named_parameters(remove_duplicate=False)
            }
            for rank in self.ranks_here
        }
