"""``make_weights``: new parameters for a model on the meta device, of which a process makes those that it needs."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sternway.errors import PipelineError
from sternway.pipeline.build._weights import Weights

Init = Callable[[nn.Module], Any]


def make_weights(model: nn.Module, init: Init | None = None, *, seed: int | None = None) -> Weights:
    """A function for ``Pipeline(weights=…)`` that makes new weights, one module after the other.

    Values do not depend on how the model is cut: the random numbers of each module begin with a seed of its own.

    Example:
        >>> with torch.device("meta"):                                               # doctest: +SKIP
        ...     model = MyModel()
        >>> pipe = Pipeline(model, weights=make_weights(model), sample=row)           # doctest: +SKIP

    Args:
        model: the model, on the meta device.
        init: called with each module that has parameters or buffers of its own, as by ``model.apply(init)``. It must
            set all of these, and nothing of other modules. By default ``module.reset_parameters()``.
        seed: of the random numbers; ``torch.initial_seed()`` by default. It must be the same on all processes.

    Raises:
        PipelineError: when weights are made, if a module has no ``reset_parameters`` and there is no ``init``, or some
            values were not set.
    """
    PipelineError.unless(isinstance(model, nn.Module), "model must be an nn.Module", model, "pass the model")
    PipelineError.unless(init is None or callable(init), "init must be a function of a module", init, "pass one")
    base = torch.initial_seed() if seed is None else seed

    def make(names: Sequence[str]) -> dict[str, Tensor]:
        wanted: dict[str, list[str]] = {}
        for name in names:
            owner, _, short = name.rpartition(".")
            wanted.setdefault(owner, []).append(short)
        found: dict[str, Tensor] = {}
        for owner, shorts in wanted.items():
            made = _made(model.get_submodule(owner), owner, init, base)
            found |= {f"{owner}.{short}" if owner else short: made[short] for short in shorts}
        return found

    return make


def _made(module: nn.Module, name: str, init: Init | None, seed: int) -> dict[str, Tensor]:
    """The parameters and buffers that a module has of its own, with the values of a new one."""
    own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    memo: dict[int, Any] = {id(value): _room(value) for _, value in own}
    twin = copy.deepcopy(module, memo)  # of its submodules, what is on meta stays there
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        if init is not None:
            init(twin)
        elif callable(reset := getattr(twin, "reset_parameters", None)):
            reset()
        else:
            raise PipelineError(
                "a module with parameters or buffers needs reset_parameters, or an init function",
                got=f"{name or 'the model'}, a {type(module).__name__}, and none of them",
                fix="pass init= to make_weights",
            )
    made = {key: getattr(twin, key).detach() for key, _ in own}
    for key, value in made.items():
        if value.is_meta or bool(value.isnan().any()):
            raise PipelineError(
                "init must set every parameter and buffer of the module that it is called with",
                got=f"no values for {key} of {name or 'the model'}, a {type(module).__name__}",
                fix="set it in init",
            )
    return made


def _room(value: Tensor) -> Any:
    """Memory for what is on meta: nan, to see what is set, or zeros where there is no nan."""
    if not value.is_meta:
        return copy.deepcopy(value)
    made = torch.zeros_like(value, device="cpu")
    if made.is_floating_point() or made.is_complex():
        made.fill_(torch.nan)
    return nn.Parameter(made, value.requires_grad) if isinstance(value, nn.Parameter) else made
