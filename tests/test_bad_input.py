"""What is passed wrongly to a public function is refused with a SternwayError that says rule, what was got, and fix."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from typer.testing import CliRunner

from sternway import graph, hooks, pipeline, schedule, split, viewer
from sternway.cli import app
from sternway.errors import CheckpointError, SternwayError
from sternway.pipeline.checkpoint import _files as files
from sternway.pipeline.checkpoint._tensors import read_description

JUNK: dict[str, Any] = {
    "None": None,
    "-1": -1,
    "0": 0,
    "1.5": 1.5,
    "nan": float("nan"),
    "inf": float("inf"),
    "text": "x",
    "empty text": "",
    "bytes": b"x",
    "object": object(),
    "list": [],
    "dict": {"a": 1},
    "tuple": (1, "a"),
    "list of None": [None],
    "bool": True,
    "function": lambda: 1,
    "module": nn.Linear(2, 2),
    "tensor": torch.ones(2),
    "huge": 10**30,
    "type": int,
}
COSTS = schedule.Costs()
PLAN = schedule.make("1f1b", ranks=2, microbatches=2)


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))


def loss_and_input() -> tuple[Tensor, Tensor]:
    x = torch.randn(2, 4, requires_grad=True)
    return model()(x).sum(), x


def leaf() -> Tensor:
    return torch.ones(2, requires_grad=True)


X = torch.randn(4, 4)


def pipe(**options: Any) -> pipeline.Pipeline:
    known = {"schedule": "1f1b", "n_microbatches": 2, "ranks": 2, "loss_fn": F.mse_loss}
    arguments = known | {"stages": model(), "transport": pipeline.LocalTransport()} | options
    return pipeline.Pipeline(arguments.pop("stages"), **arguments)


CALLS: dict[str, Callable[[Any], Any]] = {
    "make name": lambda v: schedule.make(v, ranks=2, microbatches=2),
    "make ranks": lambda v: schedule.make("1f1b", ranks=v, microbatches=2),
    "make microbatches": lambda v: schedule.make("zb-v", ranks=2, microbatches=v),
    "make stages": lambda v: schedule.make("interleaved-zb", ranks=2, microbatches=2, stages_per_rank=v),
    **{
        f"Costs {name}": lambda v, name=name: schedule.Costs(**{name: v})
        for name in ("F", "I", "W", "comm", "memory_after_I")
    },
    "search costs": lambda v: schedule.search(v, ranks=2, microbatches=2, memory_limit=2),
    "search ranks": lambda v: schedule.search(COSTS, ranks=v, microbatches=2, memory_limit=2),
    "search microbatches": lambda v: schedule.search(COSTS, ranks=2, microbatches=v, memory_limit=2),
    "search limit": lambda v: schedule.search(COSTS, ranks=2, microbatches=2, memory_limit=v),
    "search stages": lambda v: schedule.search(COSTS, ranks=2, microbatches=2, memory_limit=2, stages_per_rank=v),
    "compare costs": lambda v: schedule.compare(v, ranks=2, microbatches=2, memory_limit=2),
    "lower_bound ranks": lambda v: schedule.lower_bound(COSTS, ranks=v, microbatches=2, memory_limit=2),
    "from_csv": schedule.from_csv,
    "from_json": schedule.from_json,
    "check": schedule.check,
    "check limit": lambda v: PLAN.check(memory_limit=v),
    "simulate": schedule.simulate,
    "simulate costs": PLAN.simulate,
    "to_csv": PLAN.to_csv,
    "draw": lambda v: PLAN.simulate().draw(width=v),
    "Action.parse": schedule.Action.parse,
    "Action stage": lambda v: schedule.Action(v, "F", 0),
    "Action op": lambda v: schedule.Action(0, v, 0),
    "split outputs": lambda v: split.backward_input(v, None, loss_and_input()[1]),
    "split grads": lambda v: split.backward_input(loss_and_input()[0], v, leaf()),
    "split inputs": lambda v: split.backward_input(loss_and_input()[0], None, v),
    "on_grads places": lambda v: hooks.on_grads(v, lambda grads: None),
    "on_grads fn": lambda v: hooks.on_grads([leaf()], v),
    "on_grads mode": lambda v: hooks.on_grads([leaf()], lambda grads: None, mode=v),
    "hooks.collect": lambda v: hooks.collect(v).__enter__(),
    "graph.capture": graph.capture,
    "graph.capture model": lambda v: graph.capture(loss_and_input()[0], model=v),
    "graph.record": graph.record,
    "graph.from_json": graph.from_json,
    "find_nonfinite": graph.find_nonfinite,
    "why_alive": graph.why_alive,
    "viewer title": lambda v: viewer.render(title=v, sections=[viewer.Curves("", [])]),
    "viewer sections": lambda v: viewer.render(title="t", sections=v),
    "viewer section": lambda v: viewer.render(title="t", sections=[v]),
    "viewer graph": lambda v: viewer.render(title="t", graph=v),
    "stages": lambda v: pipe(stages=v),
    **{
        f"Pipeline {name}": lambda v, name=name: pipe(**{name: v})
        for name in (
            *("schedule", "n_microbatches", "ranks", "loss_fn", "cuts", "sample", "tied", "skips", "mesh", "chunk"),
            "reports",
        )
    },
    "Pipeline memory_limit": lambda v: pipe(schedule="auto", sample=X[:2], memory_limit=v),
    "transport": lambda v: pipe(transport=v),
    "step inputs": lambda v: pipe().step(v, target=X),
    "step target": lambda v: pipe().step(X, target=v),
    "step stage_kwargs": lambda v: pipe().step(X, target=X, stage_kwargs=v),
    "step nonfinite": lambda v: pipe().step(X, target=X, nonfinite=v),
    "clip_grad_norm_": lambda v: pipe().clip_grad_norm_(v),
    "load_state_dict": lambda v: pipe().load_state_dict(v),
    "optimizer_step": lambda v: pipe().optimizer_step(v),
    "resume optimizer": lambda v: pipe().resume("/nowhere", v),
    "resume step": lambda v: pipe().resume("/nowhere", step=v),
    "resume": lambda v: pipe().resume(v),
    "partition": lambda v: pipeline.partition(v, ranks=2),
    "partition ranks": lambda v: pipeline.partition(model(), ranks=v),
    "partition stages": lambda v: pipeline.partition(model(), ranks=1, stages_per_rank=v),
    "partition costs": lambda v: pipeline.partition(model(), ranks=2, costs=v),
    "profile": lambda v: pipeline.profile(v, X),
    "profile sample": lambda v: pipeline.profile(model(), v, repeats=1),
    "profile repeats": lambda v: pipeline.profile(model(), X, repeats=v),
    "fit": lambda v: pipeline.fit(v, X, ranks=2, n_microbatches=2),
    "fit sample": lambda v: pipeline.fit(model(), v, ranks=2, n_microbatches=2),
    "fit ranks": lambda v: pipeline.fit(model(), X, ranks=v, n_microbatches=2),
    "fit microbatches": lambda v: pipeline.fit(model(), X, ranks=2, n_microbatches=v),
    "fit memory": lambda v: pipeline.fit(model(), X, ranks=2, n_microbatches=2, memory=v, schedule="1f1b"),
    "fit schedule": lambda v: pipeline.fit(model(), X, ranks=2, n_microbatches=2, schedule=v),
    "fit optimizer": lambda v: pipeline.fit(model(), X, ranks=2, n_microbatches=2, optimizer=v),
    "Chunk": lambda v: pipe(chunk=pipeline.Chunk(v)).step(X, target=X),
    "LocalTransport": pipeline.LocalTransport,
}


# The values of JUNK that are no mistake there. Every other one is refused.
VALID: dict[str, set[str]] = {
    **{f"Costs {name}": {"0", "1.5", "huge"} for name in ("F", "I", "W", "comm", "memory_after_I")},
    "make stages": {"None"},
    "search limit": {"1.5", "inf", "huge"},
    "check limit": {"None", "inf", "huge"},
    "draw": {"None", "huge"},
    "Action stage": {"0", "huge"},
    "split grads": {"None"},
    "fit memory": {"None", "0", "huge"},
    "fit schedule": {"None"},
    "split inputs": set(JUNK) - {"tensor"},  # any nesting of anything; but one tensor alone must need a gradient
    "on_grads fn": {"function", "module", "type"},
    "graph.capture model": {"None", "module"},
    "graph.record": {"None", "module"},
    "why_alive": {"tensor"},
    "viewer title": {"text", "empty text"},
    "Pipeline loss_fn": {"None", "function", "module", "type"},
    **{f"Pipeline {name}": {"None"} for name in ("sample", "skips", "mesh")},
    "Pipeline memory_limit": {"None", "1.5", "inf", "huge"},
    "Pipeline tied": {"list"},
    "LocalTransport": {"0"} if torch.version.cuda else set(),  # a CUDA build knows devices by number
    "Pipeline reports": {"None", "text", "empty text"},
    **{name: {"None"} for name in ("step stage_kwargs", "step nonfinite", "resume optimizer", "resume step")},
    "clip_grad_norm_": {"1.5", "huge"},
    "resume": {"text"},  # a folder that is not there yet
    "partition costs": {"None"},
    "Chunk": {"0"},
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.filterwarnings("ignore")  # torch's own, on the way to the error
def test_wrong_types_and_values(call: str) -> None:
    accepted = set()
    for name, value in JUNK.items():
        try:
            CALLS[call](value)
            accepted.add(name)
        except SternwayError:
            pass
        except Exception as error:
            raise AssertionError(f"{call} given {name}: {type(error).__name__}: {error}") from error
    assert accepted == VALID.get(call, set())


def test_what_is_valid_is_listed_for_a_call_that_exists() -> None:
    assert VALID.keys() <= CALLS.keys()


def test_a_report_that_cannot_be_written(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "no" / "folder.html", "", "\0", None):
        with pytest.raises(SternwayError, match=r"a report must have a path|the report cannot be written"):
            viewer.write(path, title="t", sections=[viewer.Curves("", [])])


# Text from anywhere

CELLS = st.text(alphabet="0123456789FIWB,;()OVERLAP_SENDRECV \n-", max_size=60)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None)
@given(CELLS | st.text(max_size=60))
def test_csv(text: str) -> None:
    with suppress(SternwayError):
        schedule.from_csv(text).check()


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 400), st.integers(0, 255))
def test_a_json_schedule_with_one_other_byte(place: int, byte: int) -> None:
    text = bytearray(PLAN.to_json().encode())
    text[place % len(text)] = byte
    with suppress(SternwayError):
        schedule.from_json(text.decode("latin-1")).check()


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.sampled_from(sorted(json.loads(PLAN.to_json()))), VALUES) | VALUES)
def test_json(value: Any) -> None:
    whole = json.loads(PLAN.to_json())
    for content in (value, whole | value if isinstance(value, dict) else value):
        with suppress(SternwayError):
            schedule.from_json(json.dumps(content)).check()


GRAPH = json.loads(graph.capture(model()(X).sum()).to_json())


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.sampled_from(sorted(GRAPH)), VALUES))
def test_graph_json(changes: dict[str, Any]) -> None:
    with suppress(SternwayError):
        graph.from_json(json.dumps(GRAPH | changes))


def test_json_without_end() -> None:
    for text in ("[" * 100_000, "9" * 10_000, '{"format": ' * 5_000):
        for read in (schedule.from_json, graph.from_json):
            with pytest.raises(SternwayError, match="got"):
                read(text)


# Checkpoints' files

MANIFEST = {"format": 1, "step": 3, "files": {"run.pt": {"bytes": 1, "sha256": "x"}}, "made_with": {}}


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.sampled_from(sorted(MANIFEST)), VALUES) | st.text(max_size=30))
def test_manifests(tmp_path_factory: pytest.TempPathFactory, changes: Any) -> None:
    folder = tmp_path_factory.mktemp("checkpoint") / "step-00000003"
    folder.mkdir()
    text = json.dumps(MANIFEST | changes) if isinstance(changes, dict) else changes
    (folder / files.MANIFEST).write_text(text)
    with suppress(CheckpointError):
        files.verify(folder, files.read_manifest(folder))


@pytest.fixture(scope="module")
def described(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = pipe().save(tmp_path_factory.mktemp("saved")).wait()
    return (path / ".metadata").read_bytes()


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=4), st.integers(0, 10**6))
def test_descriptions(
    tmp_path_factory: pytest.TempPathFactory, described: bytes, changes: list[tuple[int, int]], length: int
) -> None:
    content = bytearray(described)
    for place, byte in changes:
        content[place % len(content)] = byte
    path = tmp_path_factory.getbasetemp() / "metadata"
    path.write_bytes(content[: max(1, length % (2 * len(content)))])
    with suppress(CheckpointError):
        read_description(path, {"__0_0.distcp": None})


# The command line


@pytest.mark.parametrize(
    "arguments",
    [
        ["plan"],
        ["plan", "--ranks", "x"],
        ["plan", "--ranks", "0", "--microbatches", "2"],
        ["plan", "--ranks", "2", "--microbatches", "-3"],
        ["plan", "--ranks", "2", "--microbatches", "2", "--costs", "F=x"],
        ["plan", "--ranks", "2", "--microbatches", "2", "--costs", "Q=1"],
        ["plan", "--ranks", "2", "--microbatches", "2", "--memory", "0"],
        ["plan", "--ranks", "2", "--microbatches", "2", "--memory", "nan"],
        ["plan", "--ranks", "2", "--microbatches", "2", "--out", "{file}"],
        ["plan", "--check", "{missing}"],
        ["plan", "--check", "{folder}"],
        ["plan", "--check", "{binary}"],
        ["plan", "--check", "{binary}.json"],
        ["graph", "{missing}:loss"],
        ["graph", "{file}:loss"],
        ["graph", "{python}:nothing"],
        ["graph", "{python}:wrong"],
        ["graph", "{python}:fails"],
        ["graph", "{broken}:loss"],
        ["graph", "no colon"],
        ["graph", "--html", "{folder}"],
        ["saved", "{missing}:step"],
        ["saved", "{file}:step"],
        ["saved", "{python}:wrong"],
        ["saved", "{python}:fails"],
        ["saved", "{broken}:step"],
        ["saved", "{python}:wrong", "--codec", "none such"],
        ["atlas", "{missing}", "--out", "{folder}/out"],
        ["atlas", "{folder}", "--out", "{file}"],
        ["atlas", "{folder}", "--out", "{folder}/out", "--measure", "no colon"],
        ["demo", "--dim", "7"],
        ["demo", "--ranks", "0"],
        ["demo", "--chaos", "--out", "{file}/x"],
        ["split", "--dim", "6"],
        ["split", "--rounds", "0"],
        ["nothing"],
    ],
)
def test_commands(arguments: list[str], tmp_path: Path) -> None:
    """A mistake on the command line is one line and a status, never a traceback."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("text")
    (tmp_path / "binary").write_bytes(bytes(range(256)))
    (tmp_path / "binary.json").write_bytes(bytes(range(256)))
    (tmp_path / "broken.py").write_text("this is no Python")
    (tmp_path / "python.py").write_text("def wrong(): return 3\ndef fails(): return 1 / 0\n")
    names = ("folder", "file", "binary", "missing")
    places = {name: tmp_path / name for name in names} | {
        "python": tmp_path / "python.py",
        "broken": tmp_path / "broken.py",
    }
    result = CliRunner().invoke(app, [argument.format(**places) for argument in arguments])
    assert isinstance(result.exception, SystemExit), (result.output, result.exception)
    assert result.exit_code in (1, 2)
    assert "Traceback" not in result.output
