"""Objects that travel from a forward into its backward, also where both are compiled.

Example:
    >>> import torch
    >>> from sternway.state import BackwardState
    >>> state = BackwardState()
    >>> def forward(x):                                      # or torch.compile(forward, fullgraph=True)
    ...     return state.on_grad(x.sin(), lambda grad: print(state.name, tuple(grad.shape))).sum()
    >>> loss = forward(torch.ones(2, requires_grad=True))
    >>> state.name = "the sine's gradient"                   # filled after the forward
    >>> loss.backward()                                      # read in the backward
    the sine's gradient (2,)

The contract, for ``torch.compile`` with any backend that supports autograd, and for eager code:

1. It is an input of the forward graph: a graph is compiled once for all states and hooks.
2. It is used only in the backward: what the forward computes does not depend on it.
3. It is empty in the forward, and filled after it; reading it earlier is an error.
4. The forward saves it. It lives as long as the graph does, also when the user has dropped it.
5. It is an input of the backward: with many forwards in flight, each backward has its own.
6. A compiled graph has one; a second one in it, or one state in two graphs, is an error.
"""

from sternway.state._state import BackwardState

__all__ = ["BackwardState"]
