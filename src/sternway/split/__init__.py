"""One backward, two halves: input gradients now (I), weight gradients later (W).

Example:
    >>> import torch
    >>> from sternway import split
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    >>> x = torch.randn(3, 8, requires_grad=True)
    >>> grads, pending = split.backward_input(model(x).sum(), None, x)   # I: the input's gradient
    >>> pending.run()                                                    # W: the weights', into .grad
"""

from sternway.split import _known  # noqa: F401 - fills the table of rules
from sternway.split._backward import backward_input
from sternway.split._compiled._inspect import inspect
from sternway.split._compiled._report import CompiledGraph, CompiledGraphs, Step
from sternway.split._install import install, uninstall
from sternway.split._later import Later, Product
from sternway.split._pending import Pending
from sternway.split._rules import rule
from sternway.split._stage import stage_backward, stage_backward_input, stage_backward_weight

__all__ = [
    "CompiledGraph",
    "CompiledGraphs",
    "Later",
    "Pending",
    "Product",
    "Step",
    "backward_input",
    "inspect",
    "install",
    "rule",
    "stage_backward",
    "stage_backward_input",
    "stage_backward_weight",
    "uninstall",
]
