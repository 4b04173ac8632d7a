"""F, I and W compiled by Inductor.

Inductor runs its own passes, makes its own joint graph and asks for two things: where to cut it (``Partitioner``) and
how to compile a graph (``inner_compile``). We answer the second for a backward by compiling its halves, one by one.
What is cached is each compiled graph, by Inductor; AOTAutograd's cache of whole functions knows of two graphs only, and
is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._guards import TracingContext
from torch._inductor import list_mode_options
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch.fx import GraphModule
from torch.nn import Parameter

from sternway.split._compiled._block import Boxed
from sternway.split._compiled._build import Half, Source, Strides, build, forbid_donation
from sternway.split._compiled._partition import partition


class Partitioner(CustomPartitionerFn):
    """Cuts where we say. Inductor's cache asks for a name, and pickles this; the graphs that result are keys enough."""

    def __init__(self, parameters: frozenset[int] = frozenset()) -> None:
        self._parameters = parameters

    def __call__(
        self, gm: GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[GraphModule, GraphModule]:
        return partition(gm, joint_inputs, self._parameters, fuses=True, **kwargs)

    def uuid(self) -> str:
        return "sternway"

    def __reduce__(self) -> tuple[Any, ...]:
        return Partitioner, ()


def compile_with_inductor(
    module: GraphModule,
    inputs: Sequence[Any],
    parameters: dict[int, Parameter],
    mode: str | None,
    settings: dict[str, Any],
) -> Callable[..., Any]:
    """Compile one of Dynamo's graphs."""
    source: list[Source] = []

    def inner_compile(graph: GraphModule, examples: Sequence[Any], **kwargs: Any) -> Any:
        if not kwargs.get("is_backward"):
            if not kwargs.get("is_inference"):
                source[:] = [Source.of(graph, parameters)]
            return compile_fx_inner(graph, examples, **kwargs)
        forbid_donation()
        static = set(kwargs.pop("static_input_idxs", ()))

        def compile_half(half: Half) -> Boxed:
            fixed = [index for index, place in enumerate(half.places) if place is None or place in static]
            return compile_fx_inner(half.module, half.inputs, static_input_idxs=fixed, **kwargs)

        def compile_i(half: Half) -> tuple[Boxed, Strides]:
            with TracingContext.report_output_strides() as strides:
                compiled = compile_half(half)
            return compiled, list(strides or [])

        return build(graph, examples, source[0], compile_i, compile_half)

    modes = list_mode_options(mode) if mode else {}
    config = {
        **modes,
        **settings,
        "triton.cudagraphs": False,
        "custom_partitioner_fn": Partitioner(frozenset(parameters)),
    }
    with torch._functorch.config.patch(enable_autograd_cache=False):
        compiled: Any = compile_fx(module, list(inputs), inner_compile=inner_compile, config_patches=config)
    return compiled  # type: ignore[no-any-return]
