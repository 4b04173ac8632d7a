"""A whole model cut into stages, at the names of modules.

The model is traced with torch.fx, each module that is called from outside a container taken as one piece, so that only
the model's own top-level forward has to be traceable. Whatever is computed before a cut and used after it, inputs of
the model included, is handed from stage to stage. A stage's module keeps the parameters' names in the whole model.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx, nn

from sternway.errors import PipelineError


class _Tracer(fx.Tracer):
    """Goes into containers and stops at everything else."""

    def is_leaf_module(self, module: nn.Module, name: str) -> bool:
        return not isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict)


def trace(model: nn.Module) -> fx.Graph:
    """The model's top level as a graph.

    Raises:
        PipelineError: a forward that torch.fx cannot follow.
    """
    try:
        return _Tracer().trace(model)
    except Exception as error:
        raise PipelineError(
            "a model that is cut by names has a forward that torch.fx can trace, down to its layers",
            got=f"{type(error).__name__}: {error}",
            fix="pass the stages yourself, as {index: module}",
        ) from error


def called_modules(model: nn.Module) -> list[str]:
    """The names of the modules that the model's forward calls, in order, each once: where it can be cut."""
    return list(dict.fromkeys(str(node.target) for node in trace(model).nodes if node.op == "call_module"))


def split_model(model: nn.Module, cuts: Sequence[str]) -> list[nn.Module]:
    """The stages of ``model``, a new one beginning at each module named in ``cuts``.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
        >>> [name for stage in split_model(model, ["2"]) for name, _ in stage.named_parameters()]
        ['0.weight', '0.bias', '2.weight', '2.bias']

    Raises:
        PipelineError: a name that is not called, or not in the order of the calls.
    """
    graph = trace(model)
    called = [str(node.target) for node in graph.nodes if node.op == "call_module"]
    starts = []
    for name in cuts:
        if name not in called:
            near = ", ".join(called[:12]) + (", …" if len(called) > 12 else "")
            raise PipelineError(
                "a cut names a module that the forward calls", got=repr(name), fix=f"choose from {near}"
            )
        starts.append(called.index(name))
    if starts != sorted(set(starts)):
        raise PipelineError(
            "cuts are in the order of the calls, each once", got=str(list(cuts)), fix=f"write {_ordered(called, cuts)}"
        )
    return _stages(model, graph, set(cuts))


def _ordered(called: list[str], cuts: Sequence[str]) -> list[str]:
    return sorted(set(cuts), key=called.index)


def _stages(model: nn.Module, graph: fx.Graph, cuts: set[str]) -> list[nn.Module]:
    stage_of: dict[fx.Node, int] = {}
    stage, seen = 0, set()
    for node in graph.nodes:
        if node.op == "call_module" and node.target in cuts and node.target not in seen:
            stage += 1
            seen.add(node.target)
        stage_of[node] = 0 if node.op == "placeholder" else stage
    for node in graph.nodes:
        if node.op == "get_attr":  # a parameter of the model's own belongs where it is used first
            stage_of[node] = min((stage_of[user] for user in node.users), default=stage_of[node])
    return [_stage_module(model, graph, stage_of, index, stage) for index in range(stage + 1)]


def _stage_module(
    model: nn.Module, graph: fx.Graph, stage_of: dict[fx.Node, int], index: int, last: int
) -> fx.GraphModule:
    def crossing(boundary: int) -> list[fx.Node]:
        """Values made in stages up to ``boundary`` and used in later ones."""
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
    """Where to cut a sequence into ``parts`` consecutive ones, so that the largest sum is smallest: the first of each.

    Example:
        >>> balance([4, 1, 1, 1, 1], 2)
        [0, 1]
    """
    if parts > len(costs):
        raise PipelineError(
            f"a model of {len(costs)} pieces has at most so many stages", got=f"{parts} stages", fix="use fewer ranks"
        )
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    # best[i]: the smallest largest sum of the first i pieces in k parts, and where the last of them begins.
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
