"""Run code when gradients arrive: at one tensor, at several, at edges of the autograd graph.

Example:
    >>> import torch
    >>> from sternway import hooks
    >>> a, b = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    >>> with hooks.on_grads([a, b], lambda grads: print([grad is not None for grad in grads])):
    ...     (2 * a).sum().backward()
    [True, False]
"""

from sternway.hooks._collect import Collected, collect
from sternway.hooks._handle import Handle
from sternway.hooks._on_grads import on_grads

__all__ = ["Collected", "Handle", "collect", "on_grads"]
