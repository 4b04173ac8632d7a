"""What a random program is, and how it is built: steps over pools of live tensors; see ``test_random_graphs.py``."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge, register_multi_grad_hook
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

BATCH, DIM = 3, 4
DOUBLE, SINGLE = torch.float64, torch.float32
ACCUMULATE = "AccumulateGrad"
STRAIGHT = ("TBackward0", "TransposeBackward0", "ToCopyBackward0")
HOOKS = ("hook", "hook", "node_hook", "node_hook", "accumulated", "several", "retain")


@dataclass(frozen=True, slots=True)
class Step:
    """One step; the numbers choose tensors from the pools, and variants."""

    op: str
    a: int
    b: int
    c: int


@dataclass(frozen=True, slots=True)
class Param:
    """A parameter: how it lies in memory, and what is in its ``.grad`` beforehand."""

    layout: str
    frozen: bool
    fill: str


@dataclass(frozen=True, slots=True)
class Program:
    seed: int
    weights: list[Param]
    vectors: list[Param]
    stack: Param
    inputs: list[bool]  # for each, whether it needs a gradient
    steps: list[Step]
    outputs: list[tuple[int, str]]
    rounds: int
    between: bool  # whether the second forward comes after the first I
    turned: bool  # whether W of the second round comes first
    param_input: bool  # whether the first weight is an input
    hooked: int  # in how many rounds hooks are put on
    cached: bool  # whether the second round uses the weights that the first has derived


Log = dict[str, list[Any]]


def copied(grads: Any) -> Any:
    return tuple(copied(g) for g in grads) if isinstance(grads, tuple) else None if grads is None else grads.clone()


class Two(torch.autograd.Function):
    """Two outputs. Without materialized gradients it sees None for one that is not used."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, log: Log, label: str, materialize: bool) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, w)
        ctx.note = lambda grads: log[label].append(copied(grads))
        ctx.set_materialize_grads(materialize)
        return x * w, x + w

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, w = ctx.saved_tensors
        ctx.note(grads)
        first, second = (torch.zeros_like(x) if g is None else g for g in grads)
        return first * w + second, (first * x + second).sum_to_size(w.shape), None, None, None


class Quiet(torch.autograd.Function):
    """Has no gradient for its second operand."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, log: Log, label: str) -> Tensor:
        ctx.note = lambda grads: log[label].append(copied(grads))
        return 0.7 * x + w.mean()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.note(grads)
        return 0.7 * grads[0], None, None, None


class Canary:
    """Lives as long as the node that it is put on."""


@dataclass(slots=True)
class World:
    """What both rounds share: parameters, the log, nodes that must live on for their hooks."""

    program: Program
    plain: bool
    log: Log = field(default_factory=lambda: defaultdict(list))
    params: list[Tensor] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)
    vectors: list[Tensor] = field(default_factory=list)
    stacks: list[Tensor] = field(default_factory=list)
    derived: list[Tensor] = field(default_factory=list)  # the weights of the last round
    kept: list[Any] = field(default_factory=list)
    canaries: list[weakref.ref[Canary]] = field(default_factory=list)

    def make(self) -> None:
        flat = torch.randn(128, dtype=DOUBLE)
        shapes = [(self.weights, p, (DIM, DIM)) for p in self.program.weights]
        shapes += [(self.vectors, p, (DIM,)) for p in self.program.vectors]
        shapes += [(self.stacks, self.program.stack, (BATCH, DIM, DIM))]
        start = 0
        for pool, param, shape in shapes:
            made = laid_out(0.5 * torch.randn(shape, dtype=DOUBLE), param.layout)
            made.requires_grad_(not param.frozen)
            if not param.frozen:
                match param.fill:
                    case "dense":
                        made.grad = torch.randn(shape, dtype=DOUBLE)
                    case "other":
                        made.grad = laid_out(torch.randn(shape, dtype=DOUBLE), "turned")
                    case "bucket":
                        made.grad = flat[start : start + made.numel()].view(shape)
                        start += made.numel()
            pool.append(made)
            self.params.append(made)
        if self.program.param_input:
            self.weights[0].grad = None


def laid_out(values: Tensor, layout: str) -> Tensor:
    """The values, in other strides."""
    match layout:
        case "turned":
            return values.mT.contiguous().mT if values.ndim > 1 else values
        case "strided":
            return torch.stack([values, values], -1)[..., 0]
        case _:
            return values


class Forward:
    """One forward: runs the steps, and puts on the hooks."""

    def __init__(self, world: World, round_: int) -> None:
        self.world, self.round, self.log = world, round_, world.log
        program = world.program
        self.inputs = [torch.randn(BATCH, DIM, DIM, dtype=DOUBLE).requires_grad_(needs) for needs in program.inputs]
        self.acts = list(self.inputs)
        self.weights, self.vectors = list(world.weights), list(world.vectors)
        if program.cached and round_:
            self.weights = world.derived or self.weights
        self.leaf_inputs = list(self.inputs)
        if program.param_input and world.weights[0].requires_grad:
            self.inputs.append(world.weights[0])
            self.leaf_inputs.append(world.weights[0])
        self.retained: list[Tensor] = []
        self.nodes_of_inputs = {get_gradient_edge(x).node for x in self.inputs if x.requires_grad}
        for number, step in enumerate(program.steps):
            self.label = f"round {round_}, step {number}: {step.op}"
            if step.op not in HOOKS or round_ < program.hooked:
                getattr(self, "do_" + step.op)(step)
        world.derived = [w for w in self.weights if not (w.requires_grad and self.leads_to_input(w))]
        self.plant()
        self.outputs, self.grads = [], []
        for which, kind in program.outputs:
            self.add_output(self.w(which) if kind == "weight" else self.x(which), kind)

    def add_output(self, act: Tensor, kind: str) -> None:
        grad: Tensor | None = None
        match kind:
            case "scalar":
                act = act.tanh().sum()
            case "weight":  # at a leaf itself, torch would not call hooks on several tensors
                act = act * 1.0
                grad = torch.randn(act.shape, dtype=act.dtype)
            case "rand":
                grad = torch.randn(act.shape, dtype=act.dtype)
            case "expanded":
                grad = torch.ones((), dtype=act.dtype).expand(act.shape)
            case "turned":
                grad = torch.randn(act.shape, dtype=act.dtype).mT
        self.outputs.append(act)
        self.grads.append(grad)

    def plant(self) -> None:
        for tensor in (*self.acts, *self.weights):
            if tensor.grad_fn is not None and tensor.grad_fn not in self.nodes_of_inputs:
                canary = tensor.grad_fn.metadata.setdefault("canary", Canary())
                self.world.canaries.append(weakref.ref(canary))

    # Choosing.

    def x(self, index: int) -> Tensor:
        return self.acts[-1 - index % len(self.acts)]

    def w(self, index: int, like: Tensor | None = None) -> Tensor:
        weight = self.weights[-1 - index % len(self.weights)]
        return weight if like is None else weight.to(like.dtype)

    def v(self, index: int, like: Tensor | None = None) -> Tensor:
        vector = self.vectors[-1 - index % len(self.vectors)]
        return vector if like is None else vector.to(like.dtype)

    def is_input(self, tensor: Tensor) -> bool:
        return any(tensor is each for each in self.inputs)

    def leads_to_input(self, tensor: Tensor) -> bool:
        stack, seen = [get_gradient_edge(tensor).node], set()
        while stack:
            node = stack.pop()
            if node in self.nodes_of_inputs:
                return True
            if node not in seen:
                seen.add(node)
                stack += [child for child, _ in node.next_functions if child is not None]
        return False

    # Activations.

    def do_act(self, step: Step) -> None:
        operation = list(ACTS.values())[step.c % len(ACTS)]
        self.acts.append(operation(self, self.x(step.a), step.b, step.c // len(ACTS)))

    def do_weight(self, step: Step) -> None:
        operation = list(WEIGHTS.values())[step.c % len(WEIGHTS)]
        self.weights.append(operation(self, self.w(step.a), step.b))

    def do_vector(self, step: Step) -> None:
        v, w = self.v(step.a), self.w(step.b)
        self.vectors.append([lambda: w[0], lambda: w.sum(0), lambda: v * 2, lambda: w.diagonal()][step.c % 4]())

    def do_in_place(self, step: Step) -> None:
        x = self.x(step.a) if step.b % 2 else self.w(step.a)
        if x.is_leaf or self.is_input(x):
            return
        match step.c % 4:
            case 0:
                x.mul_(0.5)
            case 1:
                x.tanh_()
            case 2:
                x.add_(self.v(step.b))
            case 3:
                x[..., :2].mul_(0.5)

    def do_input_here(self, step: Step) -> None:
        """Gradient stops at this activation, which is an input of the split."""
        index = -1 - step.a % len(self.acts)
        if not self.acts[index].requires_grad:
            return
        h = self.acts[index] * 1.0
        if self.world.plain:
            h = h.detach().requires_grad_()
        self.acts[index] = h
        self.inputs.append(h)
        self.nodes_of_inputs.add(get_gradient_edge(h).node)

    def checkpointed(self, x: Tensor, b: int, c: int) -> Tensor:
        w, other, v = self.w(b, x), self.w(b + 1, x), self.v(b, x)
        log, label, hook = self.log, self.label, self.seen("inside", change=True)  # self would hold the graph

        def region(x: Tensor) -> Tensor:
            log[label].append("region")
            match c % 4:
                case 0:
                    return F.linear(x, w, v).tanh() @ other
                case 1:
                    return x * w
                case 2:
                    turned = w.t()
                    if turned.requires_grad:
                        turned.register_hook(hook)
                    return F.layer_norm(x @ turned, (DIM,), v)
                case _:
                    return (x @ w).relu() @ (w + other[:, :1] @ other[:1])

        return checkpoint(region, x, use_reentrant=False)

    # Hooks.

    def seen(self, what: str, change: bool) -> Callable[[Any], Any]:
        """A hook that notes what it is given, and may change it."""
        log, label = self.log, f"{self.label} {what}"

        def hook(grads: Any) -> Any:
            log[label].append(copied(grads))
            if not change or grads is None:
                return None
            if isinstance(grads, tuple):
                return tuple(None if g is None else g * 1.5 for g in grads)
            return grads * 1.5

        return hook

    def do_hook(self, step: Step) -> None:
        tensor = (self.x, self.w, self.v)[step.b % 3](step.a)
        if tensor.requires_grad and not (self.round and any(tensor is p for p in self.world.params)):
            tensor.register_hook(self.seen("tensor", change=bool(step.c % 2)))

    def do_retain(self, step: Step) -> None:
        tensor = self.x(step.a)
        node = tensor.grad_fn
        while node not in self.nodes_of_inputs and type(node).__name__ in STRAIGHT:
            node = node.next_functions[0][0]
        is_derived = type(node).__name__ == ACCUMULATE and node not in self.nodes_of_inputs
        if node is not None and not is_derived and not self.is_input(tensor):
            tensor.retain_grad()
            self.retained.append(tensor)

    def do_node_hook(self, step: Step) -> None:
        tensor = (self.x, self.w)[step.b % 2](step.a)
        if not tensor.requires_grad:
            return
        node = get_gradient_edge(tensor).node
        for turn in range(step.c // 4 % 5):
            below = [child for child, _ in node.next_functions if child is not None]
            if not below or node in self.nodes_of_inputs:
                break
            node = below[(step.b // 2 >> turn) % len(below)]
        if node in self.nodes_of_inputs or (type(node).__name__ == ACCUMULATE and self.round):
            return
        self.world.kept.append(node)
        note, change = self.seen("node", change=False), bool(step.c % 2)
        if step.c // 2 % 2:
            node.register_prehook(self.seen("before node", change))
        else:

            def after(ins: Any, outs: Any) -> Any:
                note((ins, outs))
                return tuple(None if g is None else g * 1.5 for g in ins) if change and ins else None

            node.register_hook(after)

    def do_accumulated(self, step: Step) -> None:
        params = [p for p in self.world.params if p.requires_grad and not self.is_input(p)]
        if self.round or not params:
            return
        log, label, kind = self.log, self.label, step.c % 3

        def hook(param: Tensor) -> None:
            log[label].append(copied(param.grad))
            if kind == 1 and param.grad is not None:
                param.grad = param.grad * 0.5
            elif kind == 2:
                param.grad = None

        params[step.a % len(params)].register_post_accumulate_grad_hook(hook)

    def do_several(self, step: Step) -> None:
        """One hook on several parameters, or on several activations."""
        if step.b % 2:
            pool = [p for p in self.world.params if p.requires_grad and not self.is_input(p) and not self.round]
        else:
            pool = [t for t in self.acts if t.requires_grad and not t.is_leaf and self.leads_to_input(t)]
            pool = [t for t in pool if not self.is_input(t)]
        chosen = [pool[(step.a + turn) % len(pool)] for turn in range(min(len(pool), 1 + step.c % 4))]
        if not chosen:
            return
        log, label = self.log, self.label
        if step.c // 4 % 2:
            register_multi_grad_hook(chosen, lambda grads: log[label].append(copied(tuple(grads))))
        else:  # which comes first is not ours to say
            register_multi_grad_hook(chosen, lambda grad: log[label].append("any"), mode="any")


def _left(f: Forward, x: Tensor, b: int, c: int) -> Tensor:
    return torch.cat([(f.w(b, x) @ x[0]).unsqueeze(0), x[1:]])


def _addmm(f: Forward, x: Tensor, b: int, c: int) -> Tensor:
    alpha, beta = [(1, 1), (0.5, 2), (0, 1)][c % 3]
    return torch.addmm(f.v(b, x), x.reshape(-1, DIM), f.w(b, x), alpha=alpha, beta=beta).view(x.shape)


def _packed(f: Forward, x: Tensor, b: int, c: int) -> Tensor:
    log, label = f.log, f.label

    def unpack(packed: list[Tensor]) -> Tensor:
        log[label].append("unpacked")
        return packed[0]

    with torch.autograd.graph.saved_tensors_hooks(lambda t: [t], unpack):
        return (x @ f.w(b, x)).tanh()


def _module(f: Forward, x: Tensor, b: int, c: int) -> Tensor:
    """A module with backward hooks of its own."""
    w, v = f.w(b, x), f.v(b, x)
    module = nn.Identity()
    module.forward = lambda x: F.linear(x, w, v)
    note, change = f.seen("module", change=False), c % 2

    def after(module: nn.Module, ins: Any, outs: Any) -> Any:
        note((ins, outs))
        return tuple(None if g is None else g * 1.5 for g in ins) if change else None

    module.register_full_backward_hook(after)
    return module(x)


def _indices() -> Tensor:
    return torch.randint(DIM, (BATCH, DIM))


ACTS: dict[str, Callable[[Forward, Tensor, int, int], Tensor]] = {
    "tanh": lambda f, x, b, c: x.tanh(),
    "mm": lambda f, x, b, c: (x.reshape(-1, DIM) @ f.w(b, x)).view(x.shape),
    "left": _left,
    "left stack": lambda f, x, b, c: f.w(b, x) @ x,
    "matmul": lambda f, x, b, c: x @ f.w(b, x),
    "linear": lambda f, x, b, c: F.linear(x, f.w(b, x), f.v(c, x)),
    "bare linear": lambda f, x, b, c: F.linear(x, f.w(b, x)),
    "addmm": _addmm,
    "bmm": lambda f, x, b, c: torch.bmm(x, f.x(b).to(x.dtype)).tanh(),
    "bmm weight": lambda f, x, b, c: torch.bmm(x, f.w(b, x).expand(BATCH, DIM, DIM)),
    "bmm stack": lambda f, x, b, c: torch.bmm(x, f.world.stacks[0].to(x.dtype)),
    "left bmm": lambda f, x, b, c: torch.bmm(f.world.stacks[0].to(x.dtype).mT, x),
    "baddbmm": lambda f, x, b, c: torch.baddbmm(f.v(b, x), x, f.world.stacks[0].to(x.dtype), beta=0.5, alpha=2),
    "stack": lambda f, x, b, c: f.world.stacks[0] * 1 if c % 2 else f.world.stacks[0].mT,
    "conv": lambda f, x, b, c: F.conv1d(x, f.w(b, x).unsqueeze(-1), f.v(c, x)),
    "wide conv": lambda f, x, b, c: F.conv1d(x, torch.stack([f.w(b, x), f.w(c, x)] * 2, -1)[..., 1:], padding=1),
    "embedding": lambda f, x, b, c: F.embedding(_indices(), f.w(b)),
    "padded embedding": lambda f, x, b, c: F.embedding(_indices(), f.w(b, x), padding_idx=1) + x,
    "add": lambda f, x, b, c: x + f.x(b),
    "mul": lambda f, x, b, c: x * f.x(b).tanh(),
    "mul weight": lambda f, x, b, c: x * f.w(b),
    "add vector": lambda f, x, b, c: x + f.v(b),
    "softmax": lambda f, x, b, c: x.softmax(-1),
    "layer norm": lambda f, x, b, c: F.layer_norm(x, (DIM,), f.v(b, x), f.v(c, x)),
    "rms norm": lambda f, x, b, c: F.rms_norm(x, (DIM,), f.v(b, x)),
    "group norm": lambda f, x, b, c: F.group_norm(x, 2, f.v(b, x)),
    "sums": lambda f, x, b, c: x + 0.1 * x.sum(1, keepdim=True) - x.mean(),
    "chunks": lambda f, x, b, c: torch.cat(x.chunk(2, -1)[::-1], -1),
    "rows": lambda f, x, b, c: torch.stack(x.unbind(0)[::-1]),
    "narrow": lambda f, x, b, c: torch.cat([x @ f.w(b, x)[:, :2], F.linear(x, f.w(b, x)[2:])], -1),
    "transpose": lambda f, x, b, c: x.transpose(1, 2),
    "view": lambda f, x, b, c: x[:, :, :],
    "cast": lambda f, x, b, c: x.to(SINGLE if x.dtype is DOUBLE else DOUBLE),
    "einsum": lambda f, x, b, c: torch.einsum(["bij,jk->bik", "bij,kj->bik", "bij,ki->bkj"][c % 3], x, f.w(b, x)),
    "from weight": lambda f, x, b, c: f.w(b).expand(BATCH, DIM, DIM),
    "two": lambda f, x, b, c: Two.apply(x, f.w(b, x), f.log, f.label, bool(c % 2))[c // 2 % 2],
    "both of two": lambda f, x, b, c: torch.add(*Two.apply(x, f.w(b, x), f.log, f.label, True)),
    "quiet": lambda f, x, b, c: Quiet.apply(x, f.w(b, x), f.log, f.label),
    "detach": lambda f, x, b, c: x.detach() if c % 2 else x.relu(),
    "checkpoint": lambda f, x, b, c: f.checkpointed(x, b, c),
    "packed": _packed,
    "module": _module,
}

WEIGHTS: dict[str, Callable[[Forward, Tensor, int], Tensor]] = {
    "t": lambda f, w, b: w.t(),
    "transpose": lambda f, w, b: w.transpose(0, 1),
    "cast": lambda f, w, b: w.to(SINGLE if w.dtype is DOUBLE else DOUBLE),
    "low rank": lambda f, w, b: w + f.w(b, w)[:, :1] @ f.w(b + 1, w)[:1],
    "product": lambda f, w, b: w @ f.w(b, w),
    "scaled": lambda f, w, b: w * f.v(b),
    "sum": lambda f, w, b: w + f.w(b),
    "slices": lambda f, w, b: torch.cat([w[:, :2], f.w(b, w)[:, 2:]], 1),
    "normed": lambda f, w, b: w / (1 + w.square().sum(1, keepdim=True)),
    "changed": lambda f, w, b: w.clone().mul_(0.5),
    "copied in": lambda f, w, b: torch.zeros_like(w).copy_(w) if b % 2 else torch.empty_like(w).copy_(w).t(),
    "view": lambda f, w, b: w[:],
    "quiet": lambda f, w, b: Quiet.apply(w, f.w(b, w), f.log, f.label),
    "activation": lambda f, w, b: f.x(b)[0],
    "checkpoint": lambda f, w, b: checkpoint(lambda w: w.t().tanh(), w, use_reentrant=False),
}
