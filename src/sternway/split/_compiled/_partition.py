"""Where the forward ends: torch's own partitioner, with one wish.

torch saves as little as it can and computes cheap things again in the backward, which suits a backward that runs at
once. Here W needs the left sides of all weight products at its start, long after I. If I computed them again, more
would be held after I than after F. F has written them anyway, for its own products; so they are saved.

What ``torch.utils.checkpoint`` marks for recomputation is not saved.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch._functorch.partitioners import default_partition, min_cut_rematerialization_partition
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from sternway.split._compiled._build import output_of, tangents_of, weight_slots
from sternway.split._compiled._cut import spine_of
from sternway.split._compiled._ops import base


def partition(
    joint: GraphModule, inputs: Any, parameters: Collection[int], *, fuses: bool, **options: Any
) -> tuple[GraphModule, GraphModule]:
    """The forward and the backward graph.

    Args:
        joint: AOTAutograd's graph of both.
        inputs: examples of its inputs.
        parameters: which of them are parameters.
        fuses: whether cheap operations cost nothing, being compiled into the kernels beside them.
        options: for torch's partitioner.
    """
    recomputes = save_operands(joint, parameters)
    if fuses or recomputes:
        return min_cut_rematerialization_partition(joint, inputs, **options)
    options.pop("compiler", None)
    return default_partition(joint, inputs, **options)


def save_operands(joint: GraphModule, parameters: Collection[int]) -> bool:
    """Ask that the forward values which W multiplies be saved; whether the graph has a checkpoint's marks."""
    graph = joint.graph
    slots = weight_slots(joint, parameters)
    outputs: Any = output_of(joint).args[0]
    grads = [outputs[slot] for slot in slots if isinstance(outputs[slot], Node)]
    others = [node for slot, node in enumerate(outputs) if slot not in slots and isinstance(node, Node)]
    backward = tangents_of(graph)
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
