"""See the backward: a frozen snapshot of an autograd graph, to query, compare and export, and errors that explain.

Example:
    >>> import torch
    >>> from sternway import graph
    >>> model = torch.nn.Linear(8, 4)
    >>> g = graph.capture(model(torch.ones(2, 8)).sum(), model)
    >>> g.saved_bytes, g.unused_parameters()
    (64, ())
"""

from sternway.graph._alive import Owners, why_alive
from sternway.graph._capture import capture
from sternway.graph._diff import Change, Diff
from sternway.graph._explain import explain, explain_inplace
from sternway.graph._json import from_json
from sternway.graph._nonfinite import Nonfinite, find_nonfinite
from sternway.graph._record import Recording, record
from sternway.graph._records import Edge, Node, Parameter, Saved, SplitPreview, TensorInfo, Waiting
from sternway.graph._snapshot import FrozenUse, Graph, Kept, ModuleSummary

__all__ = [
    "Change",
    "Diff",
    "Edge",
    "FrozenUse",
    "Graph",
    "Kept",
    "ModuleSummary",
    "Node",
    "Nonfinite",
    "Owners",
    "Parameter",
    "Recording",
    "Saved",
    "SplitPreview",
    "TensorInfo",
    "Waiting",
    "capture",
    "explain",
    "explain_inplace",
    "find_nonfinite",
    "from_json",
    "record",
    "why_alive",
]
