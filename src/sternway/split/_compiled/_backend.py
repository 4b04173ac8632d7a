"""The backend that ``torch.compile(module, backend="sternway")`` calls, found by its entry point.

AOTAutograd makes the joint graph, torch's partitioner the forward and the backward; the backward is cut in two
(``_cut``) and each graph is compiled by the inner compiler: Inductor, or none.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from functorch.compile import make_boxed_func  # type: ignore[import-untyped]
from torch._dynamo.backends.common import aot_autograd
from torch.fx import GraphModule
from torch.nn import Parameter

from sternway.errors import SplitError
from sternway.split._compiled._build import Source, build, forbid_donation
from sternway.split._compiled._partition import partition


def sternway(
    module: GraphModule, inputs: Sequence[Any], *, mode: str | None = None, options: dict[str, Any] | None = None
) -> Callable[..., Any]:
    """Compile one of Dynamo's graphs into F, I and W.

    Args:
        module: Dynamo's graph.
        inputs: examples of its inputs; parameters are among them.
        mode: Inductor's mode, as for ``torch.compile``.
        options: ``inner``: "inductor" or "eager"; anything else is for Inductor's own configuration.
    """
    settings = dict(options or {})
    inner = settings.pop("inner", None)
    if inner not in (None, "inductor", "eager"):
        raise SplitError('options["inner"] is "inductor" or "eager"', got=repr(inner), fix="pass one of them, or none")
    if inner is None:
        inner = "inductor" if _has_compiler(inputs) else "eager"
        if inner == "eager":
            warnings.warn(
                "backend 'sternway' found no C++ compiler for Inductor; F, I and W run operation by operation. "
                'Install g++, or pass options={"inner": "eager"} to say that this is meant.',
                stacklevel=2,
            )
    parameters = {place: value for place, value in enumerate(inputs) if isinstance(value, Parameter)}
    if mode == "reduce-overhead" or settings.get("triton.cudagraphs"):
        raise SplitError(
            "CUDA graphs keep one call's memory, while a split keeps several calls in flight",
            got=f"mode={mode!r}" if mode else "triton.cudagraphs",
            fix='pass mode="max-autotune-no-cudagraphs", or none',
        )
    if inner == "inductor":
        from sternway.split._compiled._inductor import compile_with_inductor  # imported where there is a compiler

        return compile_with_inductor(module, inputs, parameters, mode, settings)
    if mode not in (None, "default") or settings:
        raise SplitError(
            'modes and other options are for Inductor; inner="eager" has none',
            got=f"mode={mode!r}, options={settings!r}",
            fix='leave them out, or pass options={"inner": "inductor"}',
        )
    return _with_nothing(module, inputs, parameters)


def _has_compiler(inputs: Sequence[Any]) -> bool:
    from torch._inductor import config

    if any(isinstance(value, torch.Tensor) and value.device.type != "cpu" for value in inputs):
        return True  # Triton's own
    names = config.cpp.cxx
    return any(shutil.which(name) for name in (names if isinstance(names, tuple | list) else (names,)) if name)


def _with_nothing(module: GraphModule, inputs: Sequence[Any], parameters: dict[int, Parameter]) -> Callable[..., Any]:
    source: list[Source] = []

    def compile_forward(graph: GraphModule, examples: Sequence[Any]) -> Any:
        source[:] = [Source.of(graph, parameters)]
        return make_boxed_func(graph.forward)

    def compile_backward(graph: GraphModule, examples: Sequence[Any]) -> Any:
        forbid_donation()
        return build(
            graph,
            examples,
            source[0],
            lambda half: (make_boxed_func(half.module.forward), []),
            lambda half: make_boxed_func(half.module.forward),
        )

    compiler = aot_autograd(
        fw_compiler=compile_forward,
        bw_compiler=compile_backward,
        inference_compiler=lambda graph, examples: make_boxed_func(graph.forward),
        partition_fn=lambda joint, examples, **options: partition(joint, examples, parameters, fuses=False, **options),
        keep_inference_input_mutations=True,
    )
    with torch._functorch.config.patch(enable_autograd_cache=False):
        return compiler(module, inputs)
