"""The public surface of each room, pinned: a name added or removed is a decision, not an accident."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil
import subprocess
import sys
import textwrap

import pytest
import torch

import sternway
from sternway import split
from sternway.errors import SternwayError

SURFACE = {
    "sternway.schedule": [
        "Action",
        "Bottleneck",
        "Comparison",
        "Costs",
        "Event",
        "Op",
        "Overlap",
        "Row",
        "Schedule",
        "Share",
        "StageCosts",
        "Step",
        "Timeline",
        "Upkeep",
        "UpkeepOp",
        "candidates",
        "check",
        "compare",
        "from_csv",
        "from_json",
        "fuse",
        "lower_bound",
        "make",
        "measured_costs",
        "names",
        "offloaded",
        "recomputed",
        "search",
        "sharded",
        "simulate",
    ],
    "sternway.split": [
        "Captured",
        "CapturedStep",
        "CompiledGraph",
        "CompiledGraphs",
        "CompiledNode",
        "DeferredNode",
        "FunctionKind",
        "FunctionKinds",
        "Later",
        "PartTimes",
        "Pending",
        "Preview",
        "Product",
        "accelerate",
        "backward_input",
        "capture",
        "capture_step",
        "forward_begins",
        "inspect",
        "install",
        "kinds",
        "learn",
        "preview",
        "rule",
        "stage_backward",
        "stage_backward_input",
        "stage_backward_weight",
        "uninstall",
        "unlearn",
    ],
    "sternway.viewer": [
        "Bar",
        "Bars",
        "Cell",
        "Curve",
        "Curves",
        "LaneEvent",
        "LaneRun",
        "Lanes",
        "PageSection",
        "Sheet",
        "Terms",
        "Verdict",
        "render",
        "write",
    ],
    "sternway.hooks": ["Collected", "Handle", "collect", "on_grads"],
    "sternway.saved": [
        "Attached",
        "Compress",
        "Hooks",
        "ModuleRow",
        "Mutable",
        "Offload",
        "Packed",
        "Policy",
        "Report",
        "compress",
        "forbid",
        "keep",
        "mutable",
        "offload",
        "recompute",
    ],
    "sternway.state": ["BackwardState"],
    "sternway.graph": [
        "Change",
        "Diff",
        "Edge",
        "FrozenUse",
        "Graph",
        "Kept",
        "ModuleSummary",
        "Node",
        "Nonfinite",
        "Owners",
        "Parameter",
        "Recording",
        "Saved",
        "SplitPreview",
        "TensorInfo",
        "Waiting",
        "capture",
        "explain",
        "explain_inplace",
        "find_nonfinite",
        "from_json",
        "record",
        "why_alive",
    ],
    "sternway.pipeline": [
        "CheckpointWarning",
        "Chunk",
        "DistTransport",
        "Fit",
        "GradScaler",
        "LargeTensor",
        "LocalTransport",
        "Pipeline",
        "Presplit",
        "Profile",
        "RankBytes",
        "Replicate",
        "Resumed",
        "Saving",
        "StepResult",
        "Transport",
        "TriedPlan",
        "Way",
        "WithSkips",
        "fit",
        "from_pretrained",
        "make_weights",
        "partition",
        "profile",
        "read_weights",
    ],
    "sternway.atlas": ["BrokenLink", "BuildReport", "FileProblem", "build", "check"],
    "sternway.demo": [
        "ChaosLog",
        "ChaosOptions",
        "DemoOptions",
        "DemoOutcome",
        "GPT",
        "GPTBlock",
        "SHARED_GPU",
        "SplitTimes",
        "ThreeWays",
        "batches",
        "choose_device",
        "next_byte_loss",
        "standard_library",
        "train",
        "train_with_kills",
        "write_report",
    ],
    "sternway.cli": ["app", "main"],
}


@pytest.mark.parametrize("room", SURFACE)
def test_names(room: str) -> None:
    module = importlib.import_module(room)
    assert sorted(module.__all__) == SURFACE[room]
    assert all(hasattr(module, name) for name in module.__all__)


DROP_INS = {
    "sternway.dropin.autograd_graph": (
        "torch.autograd.graph",
        {
            "allow_mutation_on_saved_tensors",
            "register_multi_grad_hook",
            "save_on_cpu",
            "saved_tensors_hooks",
        },
    ),
    "sternway.dropin.pipelining_backward": (
        "torch.distributed.pipelining._backward",
        {"stage_backward", "stage_backward_input", "stage_backward_weight"},
    ),
}


def _parameters(function: object) -> list[tuple[str, object, object]]:
    return [(each.name, each.kind, each.default) for each in inspect.signature(function).parameters.values()]  # type: ignore[arg-type]


@pytest.mark.parametrize("name", DROP_INS)
def test_a_drop_in_has_the_names_and_signatures_of_torch(name: str) -> None:
    """A star import gives all that torch's gives; what is ours takes the same parameters; the rest is torch's own."""
    original, ours = DROP_INS[name]
    theirs = vars(importlib.import_module(original))
    names: dict[str, object] = {}
    exec(f"from {name} import *", names)
    del names["__builtins__"]
    assert set(names) == set(theirs.get("__all__", ours))
    assert {each for each, value in names.items() if value is not theirs[each]} == ours
    for each in ours:
        assert _parameters(names[each]) == _parameters(theirs[each]), each


def test_a_drop_in_has_no_other_names() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        importlib.import_module("sternway.dropin.autograd_graph").nonsense  # noqa: B018


@pytest.mark.parametrize(
    "absent",
    [
        {"sternway": "torch", "schedule": "torch", "viewer": "torch", "atlas": "torch", "cli": "torch"},
        {"split": "typer", "saved": "rich", "demo": "sternway.pipeline"},
    ],
    ids=["without torch", "with torch"],
)
def test_importing_stays_light(absent: dict[str, str]) -> None:
    """In one process, a module after another: what none of them imports, each alone does not import either."""
    code = f"""
        import importlib, sys
        for room, absent in {absent}.items():
            importlib.import_module(room if room == "sternway" else f"sternway.{{room}}")
            assert absent not in sys.modules, f"{{room}} imports {{absent}}"
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_errors_say_rule_got_and_fix() -> None:
    error = SternwayError("a rule", got="what broke it", fix="how to mend it")
    assert str(error) == "a rule; got what broke it. Fix: how to mend it"
    assert (error.rule, error.got, error.fix) == ("a rule", "what broke it", "how to mend it")
    assert str(SternwayError("a rule")) == "a rule"


def _modules() -> list[str]:
    def without_its_extra(name: str) -> None:
        """A room whose libraries are not installed is named all the same."""

    return [module.name for module in pkgutil.walk_packages(sternway.__path__, "sternway.", without_its_extra)]


@pytest.mark.parametrize("name", _modules())
def test_examples_in_docstrings(name: str) -> None:
    from sternway.split._rules import RULES

    known = dict(RULES)
    names = {"torch": torch, "Later": split.Later, "Product": split.Product, "schedule": None}
    try:
        assert doctest.testmod(importlib.import_module(name), extraglobs=names).failed == 0
    finally:
        RULES.clear()
        RULES.update(known)
