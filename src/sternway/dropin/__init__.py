"""Modules with torch's own names and signatures: change an import, keep the code.

- ``sternway.dropin.autograd_graph`` for ``torch.autograd.graph``;
- ``sternway.dropin.pipelining_backward`` for ``torch.distributed.pipelining._backward``.
"""
