"""Where the forward ends: torch's own partitioner, told to save what W multiplies.

torch saves little and computes cheap things again in the backward, which suits a backward that runs at once. Here W
needs the left sides of all weight products at its start, long after I. If I computed them again, more would be held
after I than after F. F has computed them anyway, for its own products; so they are saved.

What ``torch.utils.checkpoint`` marks for recomputation is not saved. What is computed from a tensor that the forward
overwrites, such as a running mean, always is: the partitioner would save that tensor, and the backward would compute
from what it was overwritten with.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from sternway._torch.compile import (
    example_value,
    gradient_indices,
    output_node,
    overwritten_inputs,
    split_joint,
    tangents,
)
from sternway.split.compiled._cut import spine_of
from sternway.split.compiled._ops import base, is_view


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
    save_before_overwritten(joint)
    recomputes = save_operands(joint, parameters)
    return split_joint(joint, inputs, least_memory=fuses or recomputes, **options)


def save_operands(joint: GraphModule, parameters: Collection[int]) -> bool:
    """Have the forward values that W multiplies saved. Returns whether a checkpoint marked values of the graph."""
    graph = joint.graph
    slots = {slot for slot, index in enumerate(gradient_indices(joint)) if index in parameters}
    outputs: Any = output_node(joint).args[0]
    grads = [outputs[slot] for slot in slots if isinstance(outputs[slot], Node)]
    others = [node for slot, node in enumerate(outputs) if slot not in slots and isinstance(node, Node)]
    backward = _backward(graph)
    for product in spine_of(graph, grads, others)[1]:
        for operand in product.all_input_nodes:
            root = base(operand)
            if root not in backward and root.op == "call_function" and "recompute" not in root.meta:
                root.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    return any(
        node.meta.get("recompute") in (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)
        for node in graph.nodes
    )


def save_before_overwritten(joint: GraphModule) -> None:
    """Have what is computed from inputs that the forward overwrites saved, if the backward needs it.

    Inductor takes copies for needless, so that the backward may use such an input itself: then it is copied.
    """
    graph, inputs = joint.graph, overwritten_inputs(joint)
    if not inputs:
        return
    backward = _backward(graph)
    shown = [node for node in graph.nodes if base(node) in inputs]
    for node in shown:
        if not backward.isdisjoint(node.users):
            _copy(graph, node)
    for node in graph.nodes:
        is_own = node.op == "call_function" and node not in backward and not is_view(node)
        if is_own and not inputs.isdisjoint([base(each) for each in node.all_input_nodes]):
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    joint.recompile()


def _copy(graph: Graph, node: Node) -> None:
    """Put a copy in the place of a node, except where the node is written to or returned."""
    inputs = [each for each in graph.nodes if each.op == "placeholder"]
    with graph.inserting_after(inputs[-1] if node in inputs else node):
        copy = graph.call_function(torch.ops.aten.clone.default, (node,))
    copy.meta["val"] = example_value(node).clone()
    kept = (copy, *[user for user in node.users if user.op == "output" or user.is_impure()])
    node.replace_all_uses_with(copy, lambda user: user not in kept)


def _backward(graph: Graph) -> set[Node]:
    """What is computed from gradients."""
    found = tangents(graph)
    for node in graph.nodes:
        if not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found
