"""Which compiled graphs belong to a module."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from sternway._torch.compile import original_callable
from sternway.errors import SplitError
from sternway.split.compiled._halves import Halves
from sternway.split.compiled._report import CompiledGraphs

KNOWN: weakref.WeakSet[Halves] = weakref.WeakSet()
"""Every compiled backward that is alive; each knows the parameters that it ran with."""


def inspect(compiled: nn.Module | Callable[..., Any]) -> tuple[CompiledGraphs, ...]:
    """The graphs that ``torch.compile(..., backend="sternway")`` has made of a module: F, I and W of each region.

    There are several where Dynamo broke the graph or compiled it again for other shapes.

    Example:
        >>> compiled = torch.compile(torch.nn.Linear(4, 4), backend="sternway")          # doctest: +SKIP
        >>> compiled(torch.ones(2, 4)).sum().backward()                                  # doctest: +SKIP
        >>> for graphs in split.inspect(compiled):                                       # doctest: +SKIP
        ...     print(graphs, graphs.W.code)

    Args:
        compiled: the module, compiled itself or in its parts; or a compiled function that closes over modules.

    Raises:
        SplitError: nothing of it was compiled by this backend, or no backward has run yet.
    """
    parameters = {id(parameter) for module in _modules(compiled) for parameter in module.parameters()}
    found = [halves for halves in KNOWN if not parameters.isdisjoint(halves.seen)]
    if not found:
        raise SplitError(
            "inspect must get a module that backend 'sternway' compiled",
            got=f"a {type(compiled).__name__} of which no backward was compiled by backend 'sternway'",
            fix='compile it with torch.compile(..., backend="sternway"), and run it and its backward once',
        )
    return tuple(halves.report for halves in sorted(found, key=lambda halves: halves.order))


def _modules(compiled: Any) -> Iterator[nn.Module]:
    try:
        function = original_callable(compiled)
    except AttributeError:
        function = compiled
    cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    for value in (compiled, function, getattr(function, "__self__", None), *cells):
        if isinstance(value, nn.Module):
            yield value
