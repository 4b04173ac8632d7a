"""``split.inspect``: counts, bytes, FLOPs, readable code, and a report that the viewer and the graph's reader take."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from models import gpt
from torch import Tensor, nn

from compiled import compiled
from sternway import graph, split
from sternway.errors import SplitError
from sternway.split.compiled._cut import halve

pytestmark = pytest.mark.filterwarnings("default:::torch")  # Dynamo and Inductor warn of themselves


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()


def inspected(model: nn.Module, *shape: int) -> split.CompiledGraphs:
    compiled(model)(torch.randn(shape, requires_grad=True)).sum().backward()
    (graphs,) = split.inspect(model)
    return graphs


def test_a_linear_layer_in_full() -> None:
    graphs = inspected(nn.Linear(4, 3), 5, 4)
    assert (graphs.F.flops, graphs.I.flops, graphs.W.flops) == (120, 120, 120)
    assert (graphs.f_to_i, graphs.f_to_w, graphs.i_to_w) == (0, 5 * 4 * 4, 5 * 3 * 4)
    assert (graphs.held_after_f, graphs.held_after_i) == (80, 140)
    assert (graphs.early, graphs.late) == (0, 2)
    assert graphs.F.operations >= 1
    assert "torch.ops.aten.mm" in graphs.W.code
    assert "def forward" in graphs.I.code
    assert str(graphs).splitlines()[1].split()[0] == "F"


def test_norms_are_computed_in_i_and_counted() -> None:
    graphs = inspected(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)), 50, 8)
    assert (graphs.early, graphs.late) == (2, 4)
    two_products = 2 * (50 * 8 * 4 * 2)
    assert graphs.held_after_i == two_products + 2 * 8 * 4


def test_the_viewer_and_the_reader_take_it(tmp_path: Path) -> None:
    graphs = inspected(gpt(8, 1, heads=2), 2, 3, 8)
    record = graphs.to_record()
    read = graph.from_json(json.dumps(record))
    assert {node.module for node in read.nodes} == {"F", "I", "W"}
    assert len(read.split.waits) == 4
    assert all(target < node.id for node in read.nodes for target, _ in filter(None, node.next))
    assert read.nodes[read.split.waits[0].node].kind == "aten.mm"
    page = graphs.to_html(tmp_path / "three.html").read_text()
    assert "aten.mm" in page


def test_what_was_not_compiled_is_refused() -> None:
    with pytest.raises(SplitError, match="a Linear of which no backward was compiled by backend 'sternway'"):
        split.inspect(nn.Linear(2, 2))


def test_a_compiled_function_is_found_by_what_it_closes_over() -> None:
    layer = nn.Linear(4, 4)
    function = compiled(lambda x: layer(x).sin())
    function(torch.randn(2, 4)).sum().backward()
    assert len(split.inspect(function)) == 1


def _halved(function: object, *inputs: Tensor) -> tuple[set[str], set[str]]:
    from torch.fx.experimental.proxy_tensor import make_fx

    module = make_fx(function, tracing_mode="fake")(*inputs)
    output = next(iter(reversed(module.graph.nodes)))
    grad_input, *weights = output.args[0]
    found = halve(module.graph, weights, [grad_input], set())
    return {node.name for node in found.held}, {node.name for node in found.early}


def test_a_cheap_value_is_computed_again_and_the_smaller_one_held() -> None:
    def backward(small: Tensor, grad: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        wide = small.to(torch.float64) * 2  # twice the bytes of what it is made from
        step = grad * wide
        return step @ weight, wide.t() @ grad

    held, early = _halved(
        backward, torch.ones(4, 4), torch.ones(4, 4, dtype=torch.float64), torch.ones(4, 4, dtype=torch.float64)
    )
    assert held == {"small_1", "grad_1"}
    assert not early


def test_of_equal_bytes_the_later_value_is_held() -> None:
    def backward(x: Tensor, grad: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        y = x.tanh()
        return (grad * y) @ weight, y.t() @ grad

    held, _ = _halved(backward, torch.ones(4, 4), torch.ones(4, 4), torch.ones(4, 4))
    assert held == {"tanh", "grad_1"}


def test_a_reduction_is_done_in_i_unless_its_input_is_held_anyway() -> None:
    def backward(x: Tensor, grad: Tensor, weight: Tensor, other: Tensor) -> tuple[Tensor, ...]:
        step = grad * 2
        return step @ weight, (grad * other).sum(0), x.t() @ step, step.sum(0)

    held, early = _halved(backward, torch.ones(40, 4), torch.ones(40, 4), torch.ones(4, 4), torch.ones(40, 4))
    assert held == {"x_1", "mul"}
    assert early == {"sum_1"}
