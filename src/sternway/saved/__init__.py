"""What autograd keeps between forward and backward, and where: policies that compose.

    policies/     one policy a file: offload, compress, mutable, recompute, keep, hooks, forbid
    _policy       the stack of policies that are active in a thread
    _attach       a policy on a model, for somebody else's training loop
    _pack         the pair of hooks that torch calls, which asks that stack
    _slot         one storage, saved once however many tensors share it
    _content      the bytes of a slot, and where they are
    _offloader    which bytes go, stay and come back, and when; _round: one step of it; _plan: what it learns
    stores/       where bytes go: the host's memory, a disk
    _report       what was done, by module (_modules)

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

from sternway.saved._attach import Attached
from sternway.saved._pack import Packed
from sternway.saved._policy import Policy
from sternway.saved._report import ModuleRow, Report
from sternway.saved.policies._compress import Compress, compress
from sternway.saved.policies._forbid import forbid
from sternway.saved.policies._hooks import Hooks
from sternway.saved.policies._keep import keep
from sternway.saved.policies._mutable import Mutable, mutable
from sternway.saved.policies._offload import Offload, offload
from sternway.saved.policies._recompute import recompute

__all__ = [
    "Attached",
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
