"""Tensors that a stage was given, and must not change for others, nor for autograd.

A received tensor is a leaf of the stage's graph, and in one process it may be memory that another stage still uses. So
what the stage writes to in place is copied before. Which tensors these are is learnt in the first forward, in which all
are copied.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import TypeVar

from torch import Tensor

from sternway._torch.tensors import version_of
from sternway.errors import PipelineError
from sternway.pipeline.forward._absent import Absent

Name = TypeVar("Name", bound=Hashable)


class Shield:
    """Copies those tensors that a stage changes, and notices if it changes another."""

    def __init__(self) -> None:
        self._changed: dict[Hashable, bool] = {}
        self._given: list[tuple[Hashable, Tensor, int]] = []

    def give(self, tensors: Mapping[Name, Tensor]) -> dict[Name, Tensor]:
        """The tensors to use in place of these."""
        given = {
            name: tensor.clone() if self._changed.get(name, True) and not isinstance(tensor, Absent) else tensor
            for name, tensor in tensors.items()
        }
        self._given += [(name, tensor, version_of(tensor)) for name, tensor in given.items()]
        return given

    def check(self) -> None:
        """After the forward: learn what it changed.

        Raises:
            PipelineError: if it changed a tensor that it did not change before.
        """
        given, self._given = self._given, []
        for name, tensor, version in given:
            changed = version_of(tensor) != version
            if changed and not self._changed.get(name, True):
                self._changed[name] = True
                raise PipelineError(
                    "a stage changed what it was given in place, and had not done so before",
                    got=f"a tensor of shape {tuple(tensor.shape)}",
                    fix="change a copy: x = x.clone(); or run the step again",
                )
            self._changed[name] = self._changed.get(name, False) or changed

    def clear(self) -> None:
        """Forget what was given, after an error."""
        self._given.clear()
