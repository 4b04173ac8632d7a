"""Makes the table of docs/backward_state.md: ``python docs/make_backward_state.py``.

Each case is run with torch's own hooks in compiled code, without and with compiled autograd, and with ours. Each runs
in a process of its own, since some of torch's cases may crash. A case tests one thing: hooks return a gradient and have
no side effects, except where that is the question.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
from torch import Tensor, nn

from sternway.state import BackwardState

PAGE = Path(__file__).with_name("backward_state.md")
BEGIN, END = "<!-- made by make_backward_state.py -->", "<!-- end -->"
COLUMNS = {
    "off": "`Tensor.register_hook`, compiled autograd off",
    "on": "`Tensor.register_hook`, compiled autograd on",
    "ours": "`BackwardState.on_grad`",
}
CASES: dict[str, Callable[[Way], None]] = {}


@dataclass(frozen=True)
class Way:
    """One column: how a hook is put on a tensor inside compiled code."""

    name: str
    state: BackwardState

    @property
    def hook(self) -> Callable[[Tensor, Any], Tensor]:
        return self.state.on_grad if self.name == "ours" else _torch_hook

    def compile(self, fn: Any, backend: str = "aot_eager", **options: Any) -> Any:
        return torch.compile(fn, backend=backend, fullgraph=True, **options)

    def backward(self) -> AbstractContextManager[Any]:
        if self.name != "on":
            return nullcontext()
        return torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager"))


def _torch_hook(y: Tensor, fn: Any) -> Tensor:
    y.register_hook(fn)
    return y


def case(words: str) -> Callable[[Callable[[Way], None]], None]:
    def register(fn: Callable[[Way], None]) -> None:
        CASES[words] = fn

    return register


def expect(got: Any, wanted: Any) -> None:
    if got != wanted:
        raise AssertionError(f"{got} for {wanted}")


def leaf(rows: int = 3) -> Tensor:
    return torch.ones(rows, requires_grad=True)


def step(way: Way, forward: Any, *args: Any, **options: Any) -> None:
    with way.backward():
        way.compile(forward, **options)(*args).backward()


@case("a hook that returns another gradient")
def _(way: Way) -> None:
    hook, x = way.hook, leaf()
    step(way, lambda x: hook(2 * x, lambda grad: 3 * grad).sum(), x)
    expect(x.grad.tolist(), [6.0] * 3)  # type: ignore[union-attr]


@case("a hook that returns None")
def _(way: Way) -> None:
    hook, x = way.hook, leaf()

    def look(grad: Tensor) -> None:
        grad + 1

    step(way, lambda x: hook(2 * x, look).sum(), x)
    expect(x.grad.tolist(), [2.0] * 3)  # type: ignore[union-attr]


@case("a hook that appends to a list")
def _(way: Way) -> None:
    hook, seen = way.hook, []
    step(way, lambda x: hook(2 * x, lambda grad: seen.append(grad) or grad).sum(), leaf())
    expect([grad.tolist() for grad in seen], [[1.0] * 3])


@case("a hook that counts its calls")
def _(way: Way) -> None:
    hook, calls = way.hook, {"count": 0}

    def count(grad: Tensor) -> Tensor:
        calls["count"] += 1
        return grad

    with way.backward():
        compiled = way.compile(lambda x: hook(2 * x, count).sum())
        for _ in range(3):
            compiled(leaf()).backward()
    expect(calls["count"], 3)


@case("a hook that reads a number off the gradient")
def _(way: Way) -> None:
    hook, x = way.hook, leaf()
    step(way, lambda x: hook(2 * x, lambda grad: grad * grad.sum().item()).sum(), x)
    expect(x.grad.tolist(), [6.0] * 3)  # type: ignore[union-attr]


@case("any callable: an object, a `partial`, a bound method")
def _(way: Way) -> None:
    hook = way.hook

    class Times:
        def __call__(self, grad: Tensor) -> Tensor:
            return 3 * grad

        def method(self, grad: Tensor) -> Tensor:
            return 3 * grad

    for fn in (Times(), partial(torch.mul, 3), Times().method):
        torch._dynamo.reset()
        x = leaf()
        step(way, lambda x, fn: hook(2 * x, fn).sum(), x, fn)
        expect(x.grad.tolist(), [6.0] * 3)  # type: ignore[union-attr]


@case("a hook that raises: its own error comes out of `backward()`")
def _(way: Way) -> None:
    hook = way.hook

    def fail(grad: Tensor) -> None:
        raise ZeroDivisionError("in the hook")

    try:
        step(way, lambda x: hook(2 * x, fail).sum(), leaf())
    except ZeroDivisionError:
        return
    raise AssertionError("nothing was raised")


@case("a value set after the forward is read in the backward")
def _(way: Way) -> None:
    hook, x, holder = way.hook, leaf(), nn.Module()
    carrier: Any = way.state if way.name == "ours" else holder
    holder.scale = 1.0
    with way.backward():
        compiled = way.compile(lambda x: hook(2 * x, lambda grad: grad * carrier.scale).sum())
        for scale in (5.0, 7.0):
            x.grad = None
            loss = compiled(x)
            carrier.scale = scale
            loss.backward()
            expect(x.grad.tolist(), [2 * scale] * 3)


@case("two calls in flight keep their values apart")
def _(way: Way) -> None:
    hook, holder = way.hook, nn.Module()
    carrier: Any = way.state if way.name == "ours" else holder
    holder.scale = 1.0
    inputs, losses = [leaf(), leaf()], []
    with way.backward():
        compiled = way.compile(lambda x: hook(2 * x, lambda grad: grad * carrier.scale).sum())
        for scale, x in zip((5.0, 7.0), inputs, strict=True):
            losses.append(compiled(x))
            carrier.scale = scale
        for loss in losses:
            loss.backward()
    expect([x.grad[0].item() for x in inputs], [10.0, 14.0])  # type: ignore[index]


@case("another hook at the next call: no recompile")
def _(way: Way) -> None:
    hook, x = way.hook, leaf()
    with way.backward(), torch._dynamo.config.patch(error_on_recompile=True):
        compiled = way.compile(lambda x, fn: hook(2 * x, fn).sum())
        compiled(x, lambda grad: 3 * grad).backward()
        compiled(x, lambda grad: 4 * grad).backward()
    expect(x.grad.tolist(), [14.0] * 3)  # type: ignore[union-attr]


@case("`retain_graph` and a second backward")
def _(way: Way) -> None:
    hook, x = way.hook, leaf()
    with way.backward():
        loss = way.compile(lambda x: hook(2 * x, lambda grad: 3 * grad).sum())(x)
        loss.backward(retain_graph=True)
        loss.backward()
    expect(x.grad.tolist(), [12.0] * 3)  # type: ignore[union-attr]


@case("a hook removed before the backward is not called")
def _(way: Way) -> None:
    x, state = leaf(), way.state

    def triple(grad: Tensor) -> Tensor:
        return 3 * grad

    def forward(x: Tensor) -> Any:
        y = 2 * x
        if way.name == "ours":
            return state.on_grad(y, triple).sum(), None
        handle = y.register_hook(triple)
        return y.sum(), handle

    with way.backward():
        loss, handle = way.compile(forward)(x)
        if way.name == "ours":
            state.remove(triple)
        else:
            handle.remove()
        loss.backward()
    expect(x.grad.tolist(), [2.0] * 3)  # type: ignore[union-attr]


@case("several hooks on one tensor, in order")
def _(way: Way) -> None:
    hook, x = way.hook, leaf()
    step(way, lambda x: hook(hook(2 * x, lambda grad: grad + 1), lambda grad: grad * 10).sum(), x)
    expect(x.grad.tolist(), [40.0] * 3)  # type: ignore[union-attr]


@case("a module's full backward hook")
def _(way: Way) -> None:
    model, seen = nn.Sequential(nn.Linear(3, 3), nn.Tanh()), []

    def note(module: nn.Module, grad_input: Any, grad_output: Any) -> None:
        seen.append((type(module).__name__, len(grad_input), len(grad_output)))

    if way.name == "ours":
        way.state.on_module(model[1], note)
    else:
        model[1].register_full_backward_hook(note)
    with way.backward():
        way.compile(model)(torch.ones(1, 3)).sum().backward()
    expect(seen, [("Tanh", 1, 1)])


@case("dynamic shapes, compiled once")
def _(way: Way) -> None:
    hook = way.hook
    with way.backward(), torch._dynamo.config.patch(error_on_recompile=True):
        compiled = way.compile(lambda x: hook(2 * x, lambda grad: 3 * grad).sum(), dynamic=True)
        for rows in (3, 5, 7):
            x = leaf(rows)
            compiled(x).backward()
            expect(x.grad.tolist(), [6.0] * rows)  # type: ignore[union-attr]


@case("Inductor: a gradient that the hook keeps stays what it was")
def _(way: Way) -> None:
    hook, kept = way.hook, []
    weights = [torch.randn(64, 64, requires_grad=True) for _ in range(3)]

    def keep(grad: Tensor) -> Tensor:
        kept.append((grad, grad.clone()))
        return grad

    def forward(x: Tensor) -> Tensor:
        for weight in weights:
            x = hook(hook(x @ weight, keep) @ weight, keep).cumsum(0).sin()
        return (x * x).sum()

    with way.backward():
        way.compile(forward, backend="inductor")(torch.randn(64, 64, requires_grad=True)).backward()
    expect([bool((grad == copy).all()) for grad, copy in kept], [True] * 6)


def outcome(way: Way, fn: Callable[[Way], None]) -> str:
    torch._dynamo.reset()
    torch.manual_seed(0)
    try:
        fn(way)
    except AssertionError as error:
        return f"wrong: {_short(error)}"
    except Exception as error:
        return f"{type(error).__name__}: {_short(error)}"
    return "works"


def _short(error: BaseException) -> str:
    """The most informative line of a message."""
    if isinstance(error, torch._dynamo.exc.RecompileError):
        return "compiled again"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    for line in lines:
        if "got RuntimeError(" in line:  # Dynamo's wrapping of an error
            return line.partition("got RuntimeError(")[2].strip('")').partition(" for argument")[0]
    return lines[0] if lines else "no message"


def run_column(name: str, skip: int) -> Iterator[str]:
    """The outcomes of one column's cases, from case ``skip`` on."""
    for fn in list(CASES.values())[skip:]:
        yield outcome(Way(name, BackwardState()), fn)


def column(name: str) -> list[str]:
    """One column, whatever becomes of the processes that run it."""
    found: list[str] = []
    while len(found) < len(CASES):
        command = [sys.executable, __file__, "--column", name, "--skip", str(len(found))]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        found += [json.loads(line) for line in done.stdout.splitlines() if line.startswith('"')]
        if len(found) < len(CASES):
            found.append(f"the process ends with {done.returncode}")
    return found


def table(columns: dict[str, list[str]]) -> str:
    lines = ["| case | " + " | ".join(COLUMNS.values()) + " |", "| --- " * (len(COLUMNS) + 1) + "|"]
    for index, words in enumerate(CASES):
        cells = [columns[name][index] for name in COLUMNS]
        marked = [cell if cell == "works" else f"*{cell.replace('|', '/')[:120]}*" for cell in cells]
        lines.append(f"| {words} | " + " | ".join(marked) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--column", choices=COLUMNS)
    parser.add_argument("--skip", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.column:
        warnings.simplefilter("ignore")
        for result in run_column(arguments.column, arguments.skip):
            sys.stdout.write(json.dumps(result) + "\n")
            sys.stdout.flush()
        return
    made = table({name: column(name) for name in COLUMNS})
    head, _, rest = PAGE.read_text().partition(BEGIN)
    note = f"torch {torch.__version__.partition('+')[0]}, `fullgraph=True`, backend `aot_eager` unless said otherwise."
    PAGE.write_text(f"{head}{BEGIN}\n{note}\n\n{made}\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
