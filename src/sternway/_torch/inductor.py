"""Inductor: its settings, one graph compiled, and one of Dynamo's graphs compiled with a partitioner of ours.

Nothing of it is imported with this module: that takes seconds.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

from torch.fx import GraphModule

from sternway._torch.compile import Partition, without_cache
from sternway._torch.probe import probe


def report_output_strides() -> AbstractContextManager[list[tuple[int, ...] | None] | None]:
    """A block in which Inductor reports the strides of the results of a graph that it compiles."""
    from torch._guards import TracingContext

    return TracingContext.report_output_strides()


def cpp_compilers() -> tuple[str, ...]:
    """The names of C++ compilers that Inductor looks for."""
    from torch._inductor import config

    names = config.cpp.cxx
    return tuple(name for name in (names if isinstance(names, tuple | list) else (names,)) if name)


def inductor_options(mode: str | None) -> dict[str, Any]:
    """Inductor's settings for a mode of ``torch.compile``."""
    from torch._inductor import list_mode_options

    return list_mode_options(mode) if mode else {}


def compile_one(graph: GraphModule, examples: Sequence[Any], **options: Any) -> Callable[[list[Any]], Sequence[Any]]:
    """Compile one graph with Inductor; ``options`` as Inductor passes them to ``inner_compile``."""
    from torch._inductor.compile_fx import compile_fx_inner

    return compile_fx_inner(graph, examples, **options)


def compile_region(
    module: GraphModule,
    inputs: Sequence[Any],
    *,
    compile_graph: Callable[..., Any],
    partition: Partition,
    settings: Mapping[str, Any],
) -> Callable[..., Any]:
    """Compile one of Dynamo's graphs with Inductor, but split its joint graph, and compile each graph, in our way.

    Args:
        module: Dynamo's graph.
        inputs: examples of its inputs.
        compile_graph: called for each graph, with its examples and Inductor's options (``is_backward``, …).
        partition: called for the joint graph, as ``split_joint`` is.
        settings: Inductor's configuration.
    """
    from torch._inductor.compile_fx import compile_fx

    patches = {**settings, "triton.cudagraphs": False, "custom_partitioner_fn": make_partitioner(partition)}
    with without_cache():
        compiled: Any = compile_fx(module, list(inputs), inner_compile=compile_graph, config_patches=patches)
    return compiled


def make_partitioner(partition: Partition | None = None) -> Any:
    """A partitioner as Inductor takes it. Its cache pickles this; the graphs that result are keys enough."""
    return _partitioner_type()(partition)


@cache
def _partitioner_type() -> Any:
    from torch._inductor.custom_graph_pass import CustomPartitionerFn

    class Partitioner(CustomPartitionerFn):
        def __init__(self, partition: Partition | None) -> None:
            self._partition = partition

        def __call__(self, gm: GraphModule, joint_inputs: Sequence[object], **options: Any) -> Any:
            assert self._partition is not None, "a partitioner that was pickled only serves as a key"
            return self._partition(gm, joint_inputs, **options)

        def uuid(self) -> str:
            return "sternway"

        def __reduce__(self) -> tuple[Any, ...]:
            return make_partitioner, ()

    return Partitioner


@probe(
    "TracingContext.report_output_strides",
    expected="collects the strides that Inductor gives to results",
    features=("split.compiled",),
)
def _strides() -> bool:
    from torch._guards import TracingContext, tracing

    context = TracingContext(None)
    with tracing(context), report_output_strides() as strides:
        return strides == [] and context.output_strides is strides


@probe(
    "torch._inductor.compile_fx: compile_fx(inner_compile, config_patches), compile_fx_inner",
    expected="compile a region with our own function for each graph",
    features=("split.compiled",),
)
def _inductor() -> bool:
    from torch._inductor import config, graph
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    options = {"inner_compile", "config_patches"} <= set(inspect.signature(compile_fx).parameters)
    wrapped = inspect.unwrap(compile_fx_inner)
    named = {"static_input_idxs", "is_backward", "is_inference"}
    known = set(inspect.signature(wrapped).parameters) | set(_keywords())
    settings = hasattr(config, "custom_partitioner_fn") and hasattr(config.triton, "cudagraphs")
    pickled = make_partitioner().__reduce__()[0] is make_partitioner
    strides = "user_visible_output_idxs" in inspect.getsource(graph)
    return options and named <= known and settings and pickled and strides and bool(cpp_compilers())


def _keywords() -> set[str]:
    from torch._inductor.compile_fx import _CompileFxKwargs

    return set(_CompileFxKwargs.__annotations__)


@probe(
    "torch._inductor.list_mode_options",
    expected="gives the settings of a mode of torch.compile",
    features=("split.compiled",),
)
def _modes() -> bool:
    return isinstance(inductor_options("max-autotune-no-cudagraphs"), dict) and inductor_options(None) == {}
