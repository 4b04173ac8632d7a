"""Change a model before its weights are there, as PEFT does when it adds adapters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode

from sternway._tree import leaves
from sternway.errors import PipelineError
from sternway.pipeline.build._weights import on_zeros
from sternway.pipeline.forward._names import LOOKS, function_name

_HARMLESS = LOOKS | {"requires_grad_", "requires_grad.set", "grad.get", "grad.set", "__format__", "__repr__"}


class _NoValues(TorchFunctionMode):
    """Raises if anything is computed from parameters that have no values yet."""

    def __init__(self, names: dict[int, str]) -> None:
        super().__init__()
        self._names = names

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function_name(func) not in _HARMLESS:
            for leaf in leaves((args, kwargs)):
                if id(leaf) in self._names:
                    raise PipelineError(
                        "prepare cannot read weights, which are not there yet",
                        got=f"{function_name(func)} of {self._names[id(leaf)]}",
                        fix="load the whole model with transformers, change it, and pass it to Pipeline",
                    )
        return func(*args, **(kwargs or {}))


def prepared(plain: nn.Module, prepare: Callable[[Any], nn.Module]) -> tuple[nn.Module, dict[str, str]]:
    """The changed model, and for each of its tensors that the plain one has: the name there.

    ``prepare`` sees a model with parameters on the CPU, so that what it adds is made there, and has values.
    """
    whole = on_zeros(plain).train()
    names = {id(tensor): name for name, tensor in whole.state_dict(keep_vars=True).items()}
    held = list(whole.state_dict(keep_vars=True).values())  # so that no id is used twice
    with _NoValues({id(parameter): name for name, parameter in whole.named_parameters()}):
        model = prepare(whole)
    PipelineError.unless(isinstance(model, nn.Module), "prepare must return the model", model, "return it")
    known = {name: names[id(t)] for name, t in model.state_dict(keep_vars=True).items() if id(t) in names}
    empty: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for short, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) in names:
                meta = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
                setattr(module, short, empty.setdefault(id(parameter), meta))
    del held
    return model, known
