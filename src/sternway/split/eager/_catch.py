"""I of an eager graph: hooks that keep what W needs while the engine runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from torch import Tensor

from sternway._torch.hooks import hooks_registered, tensor_hooks
from sternway.split._part import Cut, Edge, Node
from sternway.split._unseen import UNSEEN
from sternway.split.eager._hiding import Ran, hiding


@contextmanager
def catching(cuts: list[Cut], quiet: bool = False, asked: bool = False) -> Iterator[None]:
    """Keep, at each cut that runs in the block, the gradient that arrives there and what W needs beside it.

    Where the plan is ``quiet``, nothing else that the block runs can change a gradient, and a hook only appends it to a
    list. Hooks may stay: the engine frees the nodes that it has run, and the gradient is taken out of the list
    afterwards. Where the engine is ``asked`` for the gradients at all cuts, no hook is needed.
    """
    handles, readers = [], []
    try:
        for cut in cuts:
            if asked:
                cut.read()
            elif cut.is_read_as_it_runs:
                readers.append(cut.node.register_prehook(cut.read_and_keep))
            elif cut.packing != "checkpoint":
                cut.read()
                if cut.runs_in_i:
                    handles.append(cut.node.register_prehook(cut.grads.append if quiet else cut.keeping()))
        UNSEEN.count_own(len(handles) + len(readers))
        yield
        handles.clear()
    finally:
        for handle in (*handles, *readers):
            handle.remove()


@contextmanager
def stopping(edges: list[Edge]) -> Iterator[dict[Edge, Tensor | None]]:
    """Take the gradients that arrive at ``edges`` in the block, and let them flow no further."""
    arrived: dict[Edge, Tensor | None] = {}

    def stop(node: Node, indices: list[int], grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        arrived.update({(node, index): grads[index] for index in indices})
        return tuple(None if index in indices else grad for index, grad in enumerate(grads))

    handles = [
        node.register_prehook(partial(stop, node, [index for other, index in edges if other is node]))
        for node in dict.fromkeys(node for node, _ in edges)
    ]
    UNSEEN.count_own(len(handles))
    try:
        yield arrived
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def without_hooks(leaves: list[Node]) -> Iterator[tuple[Ran, Tensor | None]]:
    """Keep the tensor hooks of parameters from running in the block; gives those that ran all the same.

    Beside them is the mark of ``hiding``, which the engine is asked for, if there is one.

    Asking the engine for the gradient of a leaf runs the leaf's tensor hooks. They must run once, in W, on the whole
    gradient. A hook that is put on a leaf in the block, as while a checkpoint recomputes, does run there.
    """
    before = {leaf: list(hooks) for leaf in leaves if (hooks := tensor_hooks(leaf.variable))}
    ran: Ran = {}
    registered = hooks_registered()
    with hiding(before) as mark:
        yield ran, mark
    for leaf in leaves if hooks_registered() != registered else ():
        known = before.get(leaf, ())
        if new := [key for key in tensor_hooks(leaf.variable) or () if key not in known]:
            ran[leaf] = new
