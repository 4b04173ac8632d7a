"""A snapshot is the live graph: same nodes, same edges, same bytes; and the graph is as it was."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable

import pytest
import torch
from models import MODELS
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sternway import graph
from sternway.demo import GPT
from sternway.errors import GraphError


def _live(loss: Tensor) -> tuple[set, set]:
    """Nodes and edges by a plain walk of our own."""
    seen, edges, stack = {loss.grad_fn}, set(), [loss.grad_fn]
    while stack:
        node = stack.pop()
        for position, (child, output) in enumerate(node.next_functions):
            if child is not None:
                edges.add((node, position, child, output))
                if child not in seen:
                    seen.add(child)
                    stack.append(child)
    return seen, edges


def _kept_bytes(nodes: set, model: nn.Module) -> int:
    """Bytes by unpacking every saved tensor, storages counted once, the model's own left out."""
    own = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers()]}
    sizes = {}
    for node in nodes:
        for name in dir(node):
            if name.startswith("_saved_"):
                value = getattr(node, name)
                for tensor in value if isinstance(value, tuple | list) else (value,):
                    if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in own:
                        sizes[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
    return sum(sizes.values())


@pytest.mark.parametrize("name", MODELS)
def test_equal_to_the_live_graph(name: str) -> None:
    torch.manual_seed(0)
    make, shape = MODELS[name]
    model = make()
    loss = model(torch.randn(shape)).square().sum()
    g = graph.capture(loss, model)
    nodes, edges = _live(loss)
    assert len(g.nodes) == len(nodes)
    assert sorted(node.kind for node in g.nodes) == sorted(type(node).__name__ for node in nodes)
    by_sequence = {node._sequence_nr(): node for node in nodes if type(node).__name__ != "AccumulateGrad"}
    parameters = dict(model.named_parameters())
    live = {
        node.id: by_sequence[node.sequence] if not node.is_leaf else _leaf(nodes, parameters[node.parameter])
        for node in g.nodes
    }
    assert {(live[e.source], e.input, live[e.target], e.output) for e in g.edges} == edges
    assert all(edge.source > edge.target for edge in g.edges)
    for node in g.nodes:
        assert [(m.shape, m.dtype, m.device) for m in node.outputs] == [
            (tuple(m.shape), str(m.dtype)[6:], str(m.device)) for m in live[node.id]._input_metadata
        ]
        for target, info in zip(node.next, node.inputs, strict=True):
            assert info == (None if target is None else g.nodes[target[0]].outputs[target[1]])
    assert g.saved_bytes == _kept_bytes(nodes, model) > 0
    assert sum(row.saved_bytes for row in g.by_module().values()) == g.saved_bytes
    assert g.unused_parameters() == ()
    assert g.roots == ((len(g.nodes) - 1, 0),)


def _leaf(nodes: set, parameter: Tensor) -> object:
    (found,) = (node for node in nodes if type(node).__name__ == "AccumulateGrad" and node.variable is parameter)
    return found


def test_names_from_parameters_alone() -> None:
    model = GPT(vocabulary=11, dim=16, heads=2, layers=3, length=6)
    tokens = torch.randint(0, 11, (3, 6))
    loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    g = graph.capture(loss, model)
    owners = {(node.kind, node.module) for node in g.nodes}
    assert ("AddmmBackward0", "blocks.2.up") in owners
    assert ("GeluBackward0", "blocks.1") in owners  # between up and down
    assert ("NativeLayerNormBackward0", "norm") in owners
    assert ("NllLossBackward0", "") in owners
    assert {node.parameter for node in g.nodes if node.is_leaf} == {name for name, _ in model.named_parameters()}
    assert all(node.parameter.startswith(node.module) for node in g.nodes if node.is_leaf)


def test_record_names_modules_and_lines() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Sequential(nn.Linear(8, 2), nn.ReLU()))
    with graph.record(model):
        hidden = model(torch.ones(3, 4))
        hidden.register_hook(lambda grad: None)
        loss = hidden.square().sum()
    g = graph.capture(loss, model)
    found = {node.kind: node for node in g.nodes if not node.is_leaf}
    assert found["GeluBackward0"].module == "1"
    assert found["ReluBackward0"].module == "2.1"
    assert found["ReluBackward0"].hooks == ("tensor hook",)
    assert found["PowBackward0"].module == ""
    assert found["PowBackward0"].op == "square"
    assert "test_capture.py:" in found["PowBackward0"].source
    assert found["PowBackward0"].source.endswith("in test_record_names_modules_and_lines")
    assert not model[0]._forward_hooks
    assert not model[0]._forward_pre_hooks


def test_recording_leaves_what_was_made_outside_alone() -> None:
    x = torch.ones(2, requires_grad=True)
    before = x * 2
    with graph.record():
        loss = before.exp().sum()
    sources = {node.kind: node.source for node in graph.capture(loss).nodes}
    assert sources["MulBackward0"] is None
    assert sources["ExpBackward0"] is not None


def test_nothing_changes_and_nothing_is_kept() -> None:
    unpacked: list[int] = []
    x = torch.ones(3, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach(), lambda t: unpacked.append(1) or t):
        y = x.exp()
        z = y * y
    told = weakref.ref(y)
    versions = (x._version, y._version)
    g = graph.capture(z.sum())
    assert unpacked == []
    assert (x._version, y._version) == versions
    assert {saved.hook for kept in [g.saved] for saved in (k.saved for k in kept)} != {None}
    expected = 2 * (x.exp() ** 2)
    z.sum().backward()
    torch.testing.assert_close(x.grad, expected)
    del y, z
    assert told() is None
    assert g.saved_bytes > 0  # the records live on


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_is_not_recomputed_and_its_inputs_count(reentrant: bool) -> None:
    runs: list[int] = []

    def region(x: Tensor) -> Tensor:
        runs.append(1)
        return (x * 2).exp().tanh()

    x = torch.ones(4, 4, requires_grad=True)
    loss = checkpoint(region, x * 3, use_reentrant=reentrant).sum()
    g = graph.capture(loss)
    assert len(runs) == 1
    held = [kept.saved for kept in g.saved if kept.saved.storage is not None and kept.saved.tensor.shape == (4, 4)]
    assert sum({saved.storage: saved.storage_nbytes for saved in held}.values()) == 64
    if not reentrant:
        assert {kept.saved.hook for kept in g.saved if kept.node.kind == "TanhBackward0"} == {"checkpoint"}
    loss.backward()
    assert len(runs) == 2


def test_offloaded_tensors() -> None:
    x = torch.ones(4, requires_grad=True)
    with torch.autograd.graph.save_on_cpu():
        loss = x.exp().sum()
    (kept,) = graph.capture(loss).saved
    assert (kept.saved.hook, kept.saved.nbytes, kept.saved.tensor.shape) == ("save_on_cpu", 16, (4,))


def test_parameters_their_views_and_buffers_stand_apart() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.BatchNorm1d(4))
    loss = model(torch.randn(3, 4, requires_grad=True)).sum()
    g = graph.capture(loss, model)
    saved = {(kept.saved.role, kept.saved.of, kept.saved.view) for kept in g.saved}
    assert ("parameter", "0.weight", True) in saved  # its transpose
    assert ("parameter", "1.weight", False) in saved
    assert ("buffer", "1.running_mean", False) in saved
    anonymous = graph.capture(loss)
    assert anonymous.saved_bytes == g.saved_bytes + 2 * 16  # without the model, buffers are like any tensor
    assert {node.parameter for node in anonymous.nodes if node.is_leaf} == {"", None}


def test_views_share_a_storage_and_count_once() -> None:
    base = torch.ones(100, requires_grad=True) * 1
    loss = base[:10].exp().sum() + (base[:10] * base[10:20]).sum()
    g = graph.capture(loss)
    parts = [kept for kept in g.saved if kept.node.kind == "MulBackward0" and kept.saved.nbytes == 40]
    assert {kept.saved.storage_nbytes for kept in parts} == {400}
    assert len({kept.saved.storage for kept in parts}) == 1
    assert [len(places) for places in g.shared_storages().values()] == [2]


def test_a_function_of_ones_own() -> None:
    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            ctx.aside = torch.ones(7)
            return x * 2

        @staticmethod
        def backward(ctx: object, grad: Tensor) -> Tensor:
            return grad * 2

    g = graph.capture(Scale.apply(torch.ones(3, requires_grad=True)).sum())
    assert {(kept.saved.name, kept.saved.nbytes) for kept in g.saved} == {("tensors[0]", 12), ("ctx.aside", 28)}


def test_freed_is_seen() -> None:
    x = torch.ones(3, requires_grad=True)
    y = x.exp()
    y.sum().backward()
    assert {node.kind: node.freed for node in graph.capture(y).nodes} == {"AccumulateGrad": False, "ExpBackward0": True}
    bias = nn.Parameter(torch.ones(2))
    half = torch.addmm(bias, torch.ones(3, 4), torch.ones(4, 2))  # nothing to save, nothing freed
    assert not any(node.freed for node in graph.capture(half).nodes)


def test_leaf_hooks_are_listed() -> None:
    x = torch.ones(1, requires_grad=True)
    x.register_hook(lambda grad: None)
    x.register_post_accumulate_grad_hook(lambda leaf: None)
    (leaf, _) = graph.capture(x * 1).nodes
    assert leaf.hooks == ("tensor hook", "post-accumulate hook")


def test_any_depth() -> None:
    x = torch.ones(1, requires_grad=True)
    for _ in range(20_000):
        x = x + 1
    assert len(graph.capture(x).nodes) == 20_001


DEEP = """
import torch
from sternway import graph
x = torch.ones(1, requires_grad=True)
y = x * 1
for _ in range(40_000):
    x, y = y + x, x * 1.0
loss = x + y
{look}
del loss, x, y
"""


def test_a_deep_graph_is_freed_without_a_crash() -> None:
    """torch frees what Python has walked in nested calls; our rungs keep these from overflowing the C stack."""
    look = "assert len(graph.capture(loss).nodes) == 80_003"
    done = subprocess.run([sys.executable, "-c", DEEP.format(look=look)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_several_outputs_in_any_nesting() -> None:
    x = torch.ones(2, requires_grad=True)
    a, b = x * 2, x + 1
    g = graph.capture({"a": a, "more": [b, torch.ones(1), 3]})
    assert [g.nodes[node].kind for node, _ in g.roots] == ["MulBackward0", "AddBackward0"]
    assert len(graph.capture(torch.autograd.graph.get_gradient_edge(a)).nodes) == 2


@pytest.mark.parametrize("tensors", [torch.ones(2), [], "loss"])
def test_what_has_no_graph_is_refused(tensors: object) -> None:
    with pytest.raises(GraphError, match=r"requires a gradient; got .*outside torch\.no_grad"):
        graph.capture(tensors)


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize(
    "make",
    [
        lambda x: torch.sparse.mm(torch.eye(3).to_sparse(), x).sum(),
        lambda x: torch.sparse.mm(torch.eye(3).to_sparse_csr(), x).sum(),
        lambda x: torch.cat([x, x])[torch.tensor([0, 1])].sum(),
        lambda x: torch.linalg.svd(x)[1].sum(),
        lambda x: torch.compile(lambda t: t.sin() * t, backend="aot_eager")(x).sum(),
        lambda x: x.to(torch.complex64).abs().sum(),
        lambda x: x.to("meta").exp().sum(),
        lambda x: torch.nested.nested_tensor_from_jagged(x, torch.tensor([0, 2, 3])).exp().values().sum(),
    ],
)
def test_all_sorts_of_graphs(make: Callable[[Tensor], Tensor]) -> None:
    g = graph.capture(make(torch.randn(3, 3, requires_grad=True)))
    assert graph.from_json(g.to_json()) == g


def test_recording_goes_around_what_is_traced() -> None:
    """``torch.cond`` failed: Dynamo found the recording in its branches."""
    x = torch.randn(3, requires_grad=True)
    with graph.record():
        y = torch.cond(torch.tensor(True), lambda x: x.sin(), lambda x: x.cos(), (x,)).exp()
    ops = {node.op for node in graph.capture(y.sum()).nodes}
    assert "exp" in ops


def test_a_capture_in_another_thread() -> None:
    x = torch.ones(2, requires_grad=True)
    found: list = []
    with graph.record():
        loss = x.exp().sum()
    thread = threading.Thread(target=lambda: found.append(graph.capture(loss)))
    thread.start()
    thread.join()
    assert found == [graph.capture(loss)]
    assert gc.isenabled()


def test_recording_without_a_model_hides_no_owner() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    with graph.record():
        loss = model(torch.ones(3, 4)).sum()
    recorded, plain = graph.capture(loss, model), graph.capture(model(torch.ones(3, 4)).sum(), model)
    assert [node.module for node in recorded.nodes] == [node.module for node in plain.nodes]
    assert {"0", "2"} <= {node.module for node in recorded.nodes}
    assert any("test_capture.py" in (node.source or "") for node in recorded.nodes)
