"""One backward, two halves: input gradients now (I), weight gradients later (W).

Example:
    >>> import torch
    >>> from sternway import split
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    >>> x = torch.randn(3, 8, requires_grad=True)
    >>> grads, pending = split.backward_input(model(x).sum(), None, x)   # I: the input's gradient
    >>> pending.run()                                                    # W: the weights', into .grad
"""

from sternway.split._accelerate import accelerate
from sternway.split._backward import backward_input
from sternway.split._install import install, uninstall
from sternway.split._later import Later, Product
from sternway.split._pending import Pending
from sternway.split._preview import DeferredNode, Preview, preview
from sternway.split._rules import rule
from sternway.split._stage import stage_backward, stage_backward_input, stage_backward_weight
from sternway.split._unseen import forward_begins
from sternway.split.captured._capture import Captured, capture
from sternway.split.captured._step import CapturedStep, capture_step
from sternway.split.compiled._inspect import inspect
from sternway.split.compiled._report import CompiledGraph, CompiledGraphs, CompiledNode
from sternway.split.eager import _known  # noqa: F401 - fills the table of rules
from sternway.split.learned._learn import learn, unlearn
from sternway.split.learned._table import FunctionKind, FunctionKinds, kinds
from sternway.split.learned._try import PartTimes

__all__ = [
    "Captured",
    "CapturedStep",
    "CompiledGraph",
    "CompiledGraphs",
    "CompiledNode",
    "DeferredNode",
    "FunctionKind",
    "FunctionKinds",
    "Later",
    "PartTimes",
    "Pending",
    "Preview",
    "Product",
    "accelerate",
    "backward_input",
    "capture",
    "capture_step",
    "forward_begins",
    "inspect",
    "install",
    "kinds",
    "learn",
    "preview",
    "rule",
    "stage_backward",
    "stage_backward_input",
    "stage_backward_weight",
    "uninstall",
    "unlearn",
]
