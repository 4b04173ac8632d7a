"""The demo's report: what ran, how fast, whether the gradients are right, and the step as planned and as measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from sternway import viewer
from sternway.demo._train import DemoOptions, DemoOutcome
from sternway.errors import PipelineError, ViewerError
from sternway.schedule import Timeline
from sternway.schedule.formats import lane_run


def write_report(folder: Path, options: DemoOptions, outcome: DemoOutcome) -> Path:
    """Write ``report.html`` into a folder, and return its path.

    Raises:
        PipelineError: the folder cannot be written to.
    """
    title = f"{outcome.schedule_name} on {options.ranks} processes"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return viewer.write(folder / "report.html", title=title, sections=_sections(options, outcome))
    except (OSError, ViewerError) as error:
        raise PipelineError(
            "--out must be a folder that can be written to", got=str(error), fix="choose another"
        ) from None


def _sections(options: DemoOptions, outcome: DemoOutcome) -> list[viewer.PageSection]:
    names = [*outcome.seconds]
    ours = [name.startswith("sternway") for name in names]
    efficiency = outcome.efficiency(options.ranks)
    peaks = [outcome.peaks.get(name, 0) for name in names]
    error = f"largest relative difference {outcome.gradient_error:.1e}"
    sections: list[viewer.PageSection] = [
        _what_ran(options, outcome),
        viewer.Bars(
            "Time of a step",
            [
                viewer.Bar("one process", outcome.one_process),
                *(viewer.Bar(name, outcome.seconds[name], ours=mine) for name, mine in zip(names, ours, strict=True)),
            ],
            unit="s",
            note="The median of the steps that were timed, each way in turn.",
        ),
        viewer.Bars(
            "Efficiency",
            [
                viewer.Bar(name, efficiency[name], f"{efficiency[name]:.0%}", ours=mine)
                for name, mine in zip(names, ours, strict=True)
            ],
            full=1.0,
            note=f"One process's time over that of {options.ranks} processes together.",
        ),
    ]
    if all(peaks):
        sections.append(
            viewer.Bars(
                "Peak memory of a process",
                [viewer.Bar(*each) for each in zip(names, map(float, peaks), [""] * len(names), ours, strict=True)],
                unit="B",
                note="The largest of all ranks, with the program itself."
                if options.device == "cpu"
                else "The largest of all ranks.",
            )
        )
    equal = "are equal to" if outcome.gradients_equal else "differ from"
    sections += [
        viewer.Verdict(f"The first step's gradients {equal} those of one process: {error}.", outcome.gradients_equal),
        viewer.Curves("Loss", [viewer.Curve("loss", [*enumerate(outcome.losses)])], x="step", y="loss"),
        _step(outcome),
    ]
    return sections


def _what_ran(options: DemoOptions, outcome: DemoOutcome) -> viewer.Terms:
    where = "one CPU thread each" if options.device == "cpu" else "on GPUs"
    rows = [
        ("model", f"GPT, {options.layers} blocks of width {options.dim}, on the bytes of Python's own source"),
        ("batch", f"{options.microbatches} microbatches of {options.rows} × {options.length} bytes"),
        ("processes", f"{options.ranks}, {where}"),
        ("schedule", f"{outcome.schedule_name}, stages per rank: {outcome.planned.schedule.stages_per_rank}"),
        ("bubble", f"{outcome.planned_bubble:.1%} planned, {outcome.measured_bubble:.1%} measured"),
        ("loss", f"{outcome.losses[0]:.3f} to {outcome.losses[-1]:.3f} in {options.steps} steps"),
        ("torch", torch.__version__),
    ]
    return viewer.Terms("What ran", rows)


def _step(outcome: DemoOutcome) -> viewer.Lanes:
    """The step as planned and as measured; what each rank keeps in bytes, if the stages' were measured."""
    profile = outcome.profile

    def memory(timeline: Timeline) -> Sequence[Sequence[tuple[float, float]]]:
        return timeline.memory if profile is None else timeline.memory_of(profile.bytes_after_F, profile.bytes_after_I)

    runs = (("planned", outcome.planned), ("measured", outcome.measured))
    return viewer.Lanes(
        "One step",
        [lane_run(timeline, name, memory=memory(timeline)) for name, timeline in runs],
        unit="s",
        memory_unit="" if profile is None else "B",
        memory_title="activations that each rank keeps, "
        + ("in forwards of one microbatch" if profile is None else "as one microbatch's were measured"),
        note="Each row is a rank, each box an action. Planned from the costs of one microbatch; then as it ran.",
    )
