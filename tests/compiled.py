"""Compiling with backend "sternway" in tests: by its function, so that it is this checkout's and not another's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from compare import assert_split_equals_backward
from sternway.split import Pending
from sternway.split.compiled._backend import sternway


def compiled(what: Any, inner: str = "eager", **options: Any) -> Any:
    return torch.compile(what, backend=sternway, options={"inner": inner}, **options)


def assert_compiled_equals_backward(
    model: nn.Module,
    *inputs: Any,
    inner: str = "eager",
    call: Callable[..., Tensor] = lambda model, *inputs: model(*inputs),
    dynamic: bool | None = None,
    **options: Any,
) -> Pending:
    """The split of the compiled model against the plain backward of the same model in eager."""
    fast = compiled(model, inner, dynamic=dynamic)
    return assert_split_equals_backward(
        model, *inputs, call=lambda which, *inputs: call(fast if which is model else which, *inputs), **options
    )
