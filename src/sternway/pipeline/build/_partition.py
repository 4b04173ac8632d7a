"""Cutting a whole model into stages, at the names of modules.

The model is traced with torch.fx. Each module that is called from outside a container is one piece, so only the model's
own top-level forward must be traceable. Whatever is computed before a cut and used after it, including the model's
inputs, is passed on from stage to stage. The parameters of a stage keep their names in the whole model.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx, nn

from sternway.errors import PipelineError


class _Tracer(fx.Tracer):
    """Traces into containers, and takes every other module as one piece."""

    def is_leaf_module(self, module: nn.Module, name: str) -> bool:
        return not isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict)


def trace(model: nn.Module) -> fx.Graph:
    """The model's top-level forward as a graph.

    Raises:
        PipelineError: if torch.fx cannot trace it.
    """
    try:
        return _Tracer().trace(model)
    except Exception as error:
        raise PipelineError(
            "a whole model must have a forward that torch.fx can trace, down to its layers",
            got=f"{type(error).__name__}: {error}",
            fix="pass the stages yourself, as {index: module}",
        ) from error


def called_modules(model: nn.Module) -> list[str]:
    """The names of the modules that the model's forward calls, in order, each once. It can be cut at these."""
    return list(dict.fromkeys(str(node.target) for node in trace(model).nodes if node.op == "call_module"))


def split_model(model: nn.Module, cuts: Sequence[str]) -> list[nn.Module]:
    """Cut ``model`` into stages. A new stage begins at each module named in ``cuts``.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
        >>> [name for stage in split_model(model, ["2"]) for name, _ in stage.named_parameters()]
        ['0.weight', '0.bias', '2.weight', '2.bias']

    Raises:
        PipelineError: if a name is not called, or the names are not in the order of the calls.
    """
    graph = trace(model)
    called = [str(node.target) for node in graph.nodes if node.op == "call_module"]
    starts = []
    for name in cuts:
        if name not in called:
            near = ", ".join(called[:12]) + (", …" if len(called) > 12 else "")
            raise PipelineError(
                "a cut must name a module that the forward calls", got=repr(name), fix=f"choose from {near}"
            )
        starts.append(called.index(name))
    if starts != sorted(set(starts)):
        raise PipelineError(
            "cuts must be in the order of the calls, each once",
            got=str(list(cuts)),
            fix=f"pass {sorted(set(cuts), key=called.index)}",
        )
    return _stages(model, graph, set(cuts))


def _stages(model: nn.Module, graph: fx.Graph, cuts: set[str]) -> list[nn.Module]:
    stage_of: dict[fx.Node, int] = {}
    stage, seen = 0, set()
    for node in graph.nodes:
        if node.op == "call_module" and node.target in cuts and node.target not in seen:
            stage += 1
            seen.add(node.target)
        stage_of[node] = 0 if node.op == "placeholder" else stage
    for node in graph.nodes:
        if node.op == "get_attr":  # a parameter of the model itself belongs to the first stage that uses it
            stage_of[node] = min((stage_of[user] for user in node.users), default=stage_of[node])
    return [_stage_module(model, graph, stage_of, index, stage) for index in range(stage + 1)]


def _stage_module(
    model: nn.Module, graph: fx.Graph, stage_of: dict[fx.Node, int], index: int, last: int
) -> fx.GraphModule:
    def crossing(boundary: int) -> list[fx.Node]:
        """Values that are made in stages up to ``boundary`` and used in later ones."""
        return [
            node
            for node in graph.nodes
            if stage_of[node] <= boundary and any(stage_of[user] > boundary for user in node.users)
        ]

    part = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    if index:
        for node in crossing(index - 1):
            copies[node] = part.placeholder(node.name)
    for node in graph.nodes:
        if stage_of[node] == index and node.op != "output":
            copies[node] = part.node_copy(node, copies.__getitem__)
    if index == last:
        result = next(node for node in graph.nodes if node.op == "output")
        part.output(fx.node.map_arg(result.args[0], copies.__getitem__))
    else:
        part.output(tuple(copies[node] for node in crossing(index)))
    return fx.GraphModule(model, part)


def balance(costs: Sequence[float], parts: int) -> list[int]:
    """Cut a sequence into ``parts`` so that the largest sum is as small as possible; returns where each part starts.

    Example:
        >>> balance([4, 1, 1, 1, 1], 2)
        [0, 1]
    """
    if parts > len(costs):
        raise PipelineError(
            f"a model of {len(costs)} modules cannot have more stages than that",
            got=f"{parts} stages",
            fix="use fewer ranks",
        )
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    # best[i]: the smallest possible largest sum of the first i entries in k parts, and where the last part starts.
    best = [(total, 0) for total in sums]
    choices: list[list[int]] = []
    for k in range(2, parts + 1):
        rows = [
            min(((max(best[j][0], sums[i] - sums[j]), j) for j in range(k - 1, i)), default=(float("inf"), 0))
            for i in range(len(sums))
        ]
        choices.append([j for _, j in rows])
        best = rows
    starts, end = [], len(costs)
    for row in reversed(choices):
        end = row[end]
        starts.append(end)
    return [0, *reversed(starts)]
