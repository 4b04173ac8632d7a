"""One line that makes torch.distributed.pipelining's schedules use our split.

torch's stages look the three functions up in their own module, ``torch.distributed.pipelining.stage``; that is where
they are replaced. The originals stay in another module, so ``uninstall()`` needs no record of them.
"""

from __future__ import annotations

from types import ModuleType, TracebackType

import torch

from sternway._torch import parallel, require
from sternway.errors import UnsupportedTorch
from sternway.split import _stage


class install:  # noqa: N801 - reads as the verb it is: `with split.install():`
    """Make torch.distributed.pipelining use this split, for a ``with`` block or until ``uninstall()``.

    Example:
        >>> from sternway import split
        >>> with split.install():
        ...     schedule.step(inputs)                              # doctest: +SKIP

    Raises:
        UnsupportedTorch: this torch's functions have other parameters; nothing is changed.
    """

    def __init__(self) -> None:
        stage, _ = _modules()
        self._nested = stage.stage_backward is _stage.stage_backward
        for name in parallel.STAGE_FUNCTIONS:
            setattr(stage, name, getattr(_stage, name))

    def __enter__(self) -> install:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._nested:
            uninstall()


def uninstall() -> None:
    """Make torch.distributed.pipelining use its own split again."""
    stage, backward = _modules()
    for name in parallel.STAGE_FUNCTIONS:
        setattr(stage, name, getattr(backward, name))


def _modules() -> tuple[ModuleType, ModuleType]:
    if not torch.distributed.is_available():
        raise UnsupportedTorch(
            "install() must have a torch that is built with torch.distributed",
            got=f"torch {torch.__version__} without it",
            fix="install another build",
        )
    require("split.install")
    return parallel.pipelining()
