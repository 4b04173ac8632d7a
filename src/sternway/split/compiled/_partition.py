"""Where the forward ends: torch's own partitioner, told to save what W multiplies.

torch saves little and computes cheap things again in the backward, which suits a backward that runs at once. Here W
needs the left sides of all weight products at its start, long after I. If I computed them again, more would be held
after I than after F. F has computed them anyway, for its own products; so they are saved.

What ``torch.utils.checkpoint`` marks for recomputation is not saved.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch.fx import GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from sternway._torch.compile import gradient_indices, output_node, split_joint, tangents
from sternway.split.compiled._cut import spine_of
from sternway.split.compiled._ops import base


def partition(
    joint: GraphModule, inputs: Any, parameters: Collection[int], *, fuses: bool, **options: Any
) -> tuple[GraphModule, GraphModule]:
    """The forward and the backward graph.

    Args:
        joint: AOTAutograd's graph of both.
        inputs: examples of its inputs.
        parameters: which of them are parameters.
        fuses: whether the compiler fuses cheap operations into other kernels, so that they cost nothing.
        options: for torch's partitioner.
    """
    recomputes = save_operands(joint, parameters)
    return split_joint(joint, inputs, least_memory=fuses or recomputes, **options)


def save_operands(joint: GraphModule, parameters: Collection[int]) -> bool:
    """Have the forward values that W multiplies saved. Returns whether a checkpoint marked values of the graph."""
    graph = joint.graph
    slots = {slot for slot, index in enumerate(gradient_indices(joint)) if index in parameters}
    outputs: Any = output_node(joint).args[0]
    grads = [outputs[slot] for slot in slots if isinstance(outputs[slot], Node)]
    others = [node for slot, node in enumerate(outputs) if slot not in slots and isinstance(node, Node)]
    backward = tangents(graph)
    for node in graph.nodes:
        if not backward.isdisjoint(node.all_input_nodes):
            backward.add(node)
    for product in spine_of(graph, grads, others)[1]:
        for operand in product.all_input_nodes:
            root = base(operand)
            if root not in backward and root.op == "call_function" and "recompute" not in root.meta:
                root.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    return any(
        node.meta.get("recompute") in (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)
        for node in graph.nodes
    )
