"""Run as ``python -m sternway.atlas.run._measure_run FILE FUNCTION RESULT ROOT``: nothing else runs a tree's code."""

from __future__ import annotations

import datetime
import hashlib
import importlib.util
import inspect
import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sternway import graph, split
from sternway._tree import leaves, replace_leaves
from sternway.atlas._paths import safe
from sternway.errors import AtlasError

_ROUNDS = 5
_DRAWN = 12  # classes with a drawing of their own


def main(file: str, function: str, result: str, root: str) -> None:
    made = _load(Path(file), function)()
    first, *rest = made if isinstance(made, tuple) and made else (made,)
    if isinstance(first, nn.Module) and len(rest) == 1:
        model, sample = first, rest[0]
        arguments = sample if isinstance(sample, tuple | list) else (sample,)
        given = _calls(model)
        with graph.record(model):
            outputs = model(*arguments)
        times = _times(model, tuple(arguments), {})
        whole = "forward (F) {} ms, input gradients (I) {} ms, weight gradients (W) {} ms; ".format(*times)
    elif isinstance(first, Tensor) and len(rest) == 1 and isinstance(rest[0], nn.Module):
        model, outputs, given = rest[0], first, {}
        whole = "times are measured where the function returns a model and a sample; "
    else:
        raise AtlasError(
            "the function must return a model and a sample, or a loss and its model",
            got=f"a {type(made).__name__}",
            fix="return model, sample",
        )
    captured = graph.capture(outputs, model)
    kinds = ", ".join(f"{count} {kind}" for kind, count in _kinds(captured)[:6])
    whole += (
        f"{sum(parameter.numel() for parameter in model.parameters()):,} parameters; "
        f"{captured.saved_bytes:,} bytes kept for the backward; {len(captured.nodes):,} nodes in the backward graph "
        f"({kinds}); {_waits(captured)}"
    )
    rows = _rows(model, captured, Path(root), given)
    graphs = _graphs(model, rows, given)
    files = {row["path"] for row in rows} | {_inside(file, Path(root))} - {""}
    record = {
        "date": datetime.date.today().isoformat(),
        "machine": _machine(model),
        "whole": whole,
        "rows": rows,
        "pages": {"_site/backward.html": _page(captured, function), **graphs},
        "files": {path: hashlib.sha256((Path(root) / path).read_bytes()).hexdigest() for path in sorted(files)},
    }
    Path(result).write_text(json.dumps(record), "utf-8")


def _load(file: Path, function: str) -> Callable[[], Any]:
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None:
        raise AtlasError("--measure must name a Python file", got=str(file), fix="give it a name that ends in .py")
    sys.path.insert(0, str(file.parent.resolve()))
    module = sys.modules[file.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = getattr(module, function, None)
    if not callable(found):
        raise AtlasError(f"--measure must name a function in {file.name}", got=repr(function), fix="check its name")
    return found  # type: ignore[no-any-return]  # callable: just looked


Given = dict[str, tuple[tuple[Any, ...], dict[str, Any]]]  # what each module was first called with


def _calls(model: nn.Module) -> Given:
    """The arguments that each module is first called with, filled in as the modules run."""
    given: Given = {}

    def note(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given.setdefault(name, (args, kwargs))

        return hook

    for name, module in model.named_modules():
        module.register_forward_pre_hook(note(name), with_kwargs=True)
    return given


def _times(model: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[str, str, str]:
    """Medians of F, I and W over a few rounds, in milliseconds."""
    rounds = []
    for _ in range(_ROUNDS + 1):
        model.zero_grad(set_to_none=True)
        inputs, words = replace_leaves(_fresh, arguments), replace_leaves(_fresh, named)
        start = _now()
        outputs = [leaf for leaf in leaves(model(*inputs, **words)) if isinstance(leaf, Tensor) and leaf.requires_grad]
        forward = _now()
        wanted = [leaf for leaf in leaves((inputs, words)) if isinstance(leaf, Tensor) and leaf.requires_grad]
        _, pending = split.backward_input(outputs, [torch.ones_like(leaf) for leaf in outputs], wanted)
        middle = _now()
        pending.run()
        rounds.append((forward - start, middle - forward, _now() - middle))
    model.zero_grad(set_to_none=True)
    f, i, w = (f"{1e3 * statistics.median(column):.2f}" for column in zip(*rounds[1:], strict=True))
    return f, i, w


def _times_alone(module: nn.Module, given: tuple[tuple[Any, ...], dict[str, Any]] | None) -> tuple[str, str, str]:
    """F, I and W of one module, with the arguments it was called with; empty if it cannot run alone."""
    try:
        return _times(module, *given) if given is not None else ("", "", "")
    except Exception:  # whatever a module raises, its row has the other numbers
        return "", "", ""


def _page(captured: graph.Graph, function: str) -> str:
    """The backward graph, as a page of the viewer."""
    with tempfile.TemporaryDirectory() as folder:
        return captured.to_html(Path(folder) / "graph.html", title=f"Backward of {function}").read_text("utf-8")


def _fresh(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone().requires_grad_(value.is_floating_point())
    return value


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def _kinds(captured: graph.Graph) -> list[tuple[str, int]]:
    counts: dict[str, int] = {}
    for node in captured.nodes:
        counts[node.kind] = counts.get(node.kind, 0) + 1
    return sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))


def _waits(captured: graph.Graph) -> str:
    if captured.split.refused:
        return f"the backward cannot be split: {captured.split.refused}"
    waiting = sum(len(wait.parameters) for wait in captured.split.waits)
    return f"of the parameters, {waiting} can wait for W and {len(captured.split.ready)} are computed in I"


def _rows(model: nn.Module, captured: graph.Graph, root: Path, given: Given) -> list[dict[str, Any]]:
    """One row for each module whose class is defined in the tree."""
    shares = captured.by_module()
    rows = []
    for name, module in model.named_modules():
        try:
            path = _inside(inspect.getsourcefile(type(module)) or "", root)
            line = inspect.getsourcelines(type(module))[1]
        except (OSError, TypeError):
            continue
        if not path:
            continue
        inside = [row for key, row in shares.items() if not name or key == name or key.startswith(f"{name}.")]
        rows.append(
            {
                "path": path,
                "line": line,
                "module": type(module).__qualname__,
                "name": name or "the whole model",
                "parameters": sum(parameter.numel() for parameter in module.parameters()),
                "saved_bytes": sum(row.saved_bytes for row in inside),
                "nodes": sum(row.nodes for row in inside),
                "times": _times_alone(module, given.get(name)),
            }
        )
    return rows


def _graphs(model: nn.Module, rows: list[dict[str, Any]], given: Given) -> dict[str, str]:
    """A drawing of the backward graph of each class, from its first module that runs alone; its row names the page."""
    pages: dict[str, str] = {}
    done: set[str] = set()
    modules = dict(model.named_modules())
    for row in rows:
        key = "" if row["name"] == "the whole model" else row["name"]
        if row["module"] in done or key not in given or len(done) >= _DRAWN:
            continue
        args, kwargs = given[key]
        try:
            with graph.record(modules[key]):
                outputs = modules[key](*replace_leaves(_fresh, args), **replace_leaves(_fresh, kwargs))
            captured = graph.capture(outputs, modules[key])
        except Exception:  # whatever a module raises when it runs alone: it has no drawing
            continue
        done.add(row["module"])
        row["graph"] = f"_site/backward_{safe(row['module'])}"
        pages[f"{row['graph']}.html"] = _page(captured, row["module"])
    return pages


def _inside(file: str, root: Path) -> str:
    path = Path(file).resolve()
    return path.relative_to(root).as_posix() if file and path.is_relative_to(root) else ""


def _machine(model: nn.Module) -> str:
    threads = torch.get_num_threads()
    return f"{platform.machine()}, {threads} threads, torch {torch.__version__}, {_device(model)}"


def _device(model: nn.Module) -> str:
    parameter = next(model.parameters(), None)
    if parameter is None or parameter.device.type != "cuda":
        return "CPU"
    return torch.cuda.get_device_name(parameter.device)


if __name__ == "__main__":
    main(*sys.argv[1:])
