"""One line that makes torch.distributed.pipelining's schedules use our split.

torch's stages look the three functions up in their own module, ``torch.distributed.pipelining.stage``; that is where
they are swapped. The originals stay in ``…pipelining._backward``, so undoing needs no memory.
"""

from __future__ import annotations

import inspect
from types import ModuleType, TracebackType

import torch

from sternway.errors import UnsupportedTorch
from sternway.split import _stage

KNOWN_TORCH = ("2.11", "2.12", "2.13")
NAMES = ("stage_backward", "stage_backward_input", "stage_backward_weight")


class install:  # noqa: N801 - reads as the verb it is: `with split.install():`
    """Make torch.distributed.pipelining use this split, for a ``with`` block or until ``uninstall()``.

    Example:
        >>> from sternway import split
        >>> with split.install():
        ...     schedule.step(inputs)                              # doctest: +SKIP

    Raises:
        UnsupportedTorch: this torch's pipelining is not one we know; nothing is changed.
    """

    def __init__(self) -> None:
        stage, backward = _modules()
        self._nested = stage.stage_backward is _stage.stage_backward
        for name in NAMES:
            theirs = list(inspect.signature(getattr(backward, name)).parameters)
            ours = list(inspect.signature(getattr(_stage, name)).parameters)
            if theirs != ours:
                raise UnsupportedTorch(
                    f"{name} has the parameters {', '.join(ours)}",
                    got=", ".join(theirs) + f" in torch {torch.__version__}",
                    fix="call split.backward_input from the training loop instead",
                )
        for name in NAMES:
            setattr(stage, name, getattr(_stage, name))

    def __enter__(self) -> install:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._nested:
            uninstall()


def uninstall() -> None:
    """Give torch.distributed.pipelining its own split back."""
    stage, backward = _modules()
    for name in NAMES:
        setattr(stage, name, getattr(backward, name))


def _modules() -> tuple[ModuleType, ModuleType]:
    release = ".".join(torch.__version__.split(".")[:2])
    if release not in KNOWN_TORCH:
        raise UnsupportedTorch(
            f"install() knows torch {', '.join(KNOWN_TORCH)}",
            got=torch.__version__,
            fix="use one of those, or call split.backward_input from the training loop",
        )
    if not torch.distributed.is_available():
        raise UnsupportedTorch(
            "install() needs a torch with torch.distributed",
            got="one built without it",
            fix="install another build",
        )
    from torch.distributed.pipelining import _backward, stage

    return stage, _backward
