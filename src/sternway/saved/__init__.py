"""What autograd keeps between forward and backward, and where: policies that compose.

Example:
    >>> import torch
    >>> from sternway import saved
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64))
    >>> with saved.compress("int8"), saved.keep(where="2") as report:
    ...     loss = model(torch.randn(32, 64)).square().mean()
    >>> loss.backward()
    >>> round(report.ratio, 1)
    3.9
"""

from sternway.saved._compress import Compress, compress
from sternway.saved._forbid import forbid
from sternway.saved._mutable import Mutable, mutable
from sternway.saved._offload import Offload, offload
from sternway.saved._pack import Packed
from sternway.saved._policy import Hooks, Policy, keep
from sternway.saved._recompute import recompute
from sternway.saved._report import ModuleRow, Report

__all__ = [
    "Compress",
    "Hooks",
    "ModuleRow",
    "Mutable",
    "Offload",
    "Packed",
    "Policy",
    "Report",
    "compress",
    "forbid",
    "keep",
    "mutable",
    "offload",
    "recompute",
]
