"""Makes the table of docs/models.md: ``make zoo-table``.

Each model goes through a pipeline of two ranks and four stages in this process, unmodified, and through a plain
backward.
"""

from __future__ import annotations

import copy
import warnings
from pathlib import Path

import torch

from zoo.deferred import measure
from zoo.entry import Entry, plain_step
from zoo.models import MODELS
from zoo.stage_like import step_with_inputs
from zoo.steps import MICROBATCHES, ROWS, in_one_process, step

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
BEGIN, END = "<!-- made by tests/zoo/table.py -->", "<!-- end -->"
HEAD = (
    "| model | kind | stages begin at | crosses the middle cut | largest error | waits for W |",
    "| --- | --- | --- | --- | --- | --- |",
)


def short(names: list[str], count: int = 3) -> str:
    """The ends of some names, so that numbers of layers keep what they count."""
    ends = list(dict.fromkeys(".".join(name.split(".")[-3:]) for name in names))
    return ", ".join(f"`{end}`" for end in ends[:count]) + (f" and {len(ends) - count} more" * (len(ends) > count))


def error(ours: torch.Tensor | None, theirs: torch.Tensor | None) -> float:
    """The largest difference between two gradients, relative to the largest entry."""
    if ours is None or theirs is None:
        return 0.0 if all(grad is None or not grad.any() for grad in (ours, theirs)) else float("inf")
    return float((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-12))


def row(entry: Entry) -> str:
    """One line of the table."""
    model = entry.make()
    reference = copy.deepcopy(model)
    pipe = in_one_process(entry, model, "zb-v")
    lines = [line.strip() for line in repr(pipe).splitlines()]
    cuts = next(line for line in lines if line.startswith("cuts")).removeprefix("cuts").strip().split(", ")
    crosses = [line.partition(": ")[2].split(", ") for line in lines if line.startswith("crosses")]
    step(entry, pipe)
    plain_step(entry, reference, ROWS, MICROBATCHES)
    plain = dict(reference.named_parameters(remove_duplicate=False))
    # Entries that are zero but for rounding (a key's bias, whose gradient cancels) have no relative error.
    scale = max(float(p.grad.abs().max()) for p in plain.values() if p.grad is not None)
    errors = [
        error(parameter.grad, plain[name].grad)
        for name, parameter in pipe.named_parameters()
        if plain[name].grad is None or float(plain[name].grad.abs().max()) > 1e-5 * scale
    ]
    share = measure(step_with_inputs(entry, entry.make())).share
    middle = crosses[len(crosses) // 2] if crosses else []
    return f"| {entry.name} | {entry.family} | {short(cuts)} | {short(middle)} | {max(errors):.0e} | {share:.1%} |"


def main() -> None:
    warnings.simplefilter("ignore")  # theirs
    rows = []
    for entry in MODELS.values():
        rows.append(row(entry))
        print(rows[-1], flush=True)  # noqa: T201
    text = PAGE.read_text()
    before, _, rest = text.partition(BEGIN)
    PAGE.write_text("\n".join([before + BEGIN, *HEAD, *rows, END]) + rest.partition(END)[2])


if __name__ == "__main__":
    main()
