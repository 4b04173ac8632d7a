"""The backend that ``torch.compile(module, backend="sternway")`` calls, found by its entry point.

AOTAutograd makes the joint graph, torch's partitioner the forward and the backward. The backward is cut in two
(``_cut``), and each graph is compiled by the inner compiler: Inductor, or none. Inductor runs its own passes and makes
its own joint graph; it is given two functions, for where to cut that and how to compile a graph.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule
from torch.nn import Parameter

from sternway._torch import compile as aot
from sternway._torch import inductor, require
from sternway._torch.async_tensors import with_arrived
from sternway._torch.dtensors import is_dtensor
from sternway._torch.tracing import static_inputs
from sternway.errors import SplitError
from sternway.split.compiled._build import Half, Region, Strides, build
from sternway.split.compiled._partition import partition
from sternway.split.compiled._replayed import replayed
from sternway.split.compiled._work import Boxed


def sternway(
    module: GraphModule, inputs: Sequence[Any], *, mode: str | None = None, options: dict[str, Any] | None = None
) -> Callable[..., Any]:
    """Compile one of Dynamo's graphs into F, I and W.

    Args:
        module: Dynamo's graph.
        inputs: examples of its inputs; parameters are among them.
        mode: Inductor's mode, as for ``torch.compile``. "reduce-overhead" and "max-autotune" make CUDA graphs on a GPU.
        options: ``inner``: "inductor" or "eager"; all others are Inductor's own settings.
    """
    settings = dict(options or {})
    inner = settings.pop("inner", None)
    if inner not in (None, "inductor", "eager"):
        raise SplitError(
            'options["inner"] must be "inductor" or "eager"', got=repr(inner), fix="pass one of them, or none"
        )
    require("split.compiled")
    if inner is None:
        inner = "inductor" if _has_compiler(inputs) else "eager"
        if inner == "eager":
            warnings.warn(
                "backend 'sternway' found no C++ compiler for Inductor; F, I and W run operation by operation. "
                'Install g++, or pass options={"inner": "eager"} to say that this is meant.',
                stacklevel=2,
            )
    parameters = {index: value for index, value in enumerate(inputs) if isinstance(value, Parameter)}
    if any(is_dtensor(parameter) for parameter in parameters.values()):
        require("split.compiled.sharded")
    if inner == "inductor":
        settings = {**inductor.inductor_options(mode), **settings}
        graphs = settings.pop("triton.cudagraphs", False) and _on_gpu(inputs)
        fixed = sorted({*parameters, *static_inputs(module)})

        def compile_for(given: Sequence[Any]) -> Callable[..., Any]:
            compiled = _with_inductor(module, given, parameters, settings)
            return replayed(compiled, fixed, len(inputs)) if graphs else compiled

        return with_arrived(compile_for, module, inputs)
    if mode not in (None, "default") or settings:
        raise SplitError(
            'inner="eager" cannot take a mode or other options, which are for Inductor',
            got=f"mode={mode!r}, options={settings!r}",
            fix='leave them out, or pass options={"inner": "inductor"}',
        )
    return with_arrived(lambda given: _with_none(module, given, parameters), module, inputs)


def _on_gpu(inputs: Sequence[Any]) -> bool:
    return any(isinstance(value, torch.Tensor) and value.is_cuda for value in inputs)


def _has_compiler(inputs: Sequence[Any]) -> bool:
    if any(isinstance(value, torch.Tensor) and value.device.type != "cpu" for value in inputs):
        return True  # Triton has its own
    return any(shutil.which(name) for name in inductor.cpp_compilers())


def _with_none(module: GraphModule, inputs: Sequence[Any], parameters: dict[int, Parameter]) -> Callable[..., Any]:
    region: list[Region] = []

    def compile_forward(graph: GraphModule, examples: Sequence[Any]) -> Any:
        region[:] = [Region.of(graph, parameters)]
        return _run_by_operation(graph)

    def compile_backward(graph: GraphModule, examples: Sequence[Any]) -> Any:
        aot.forbid_donation()
        return build(
            graph,
            examples,
            region[0],
            lambda half: (_run_by_operation(half.module), []),
            lambda half: _run_by_operation(half.module),
        )

    compiler = aot.aot_autograd(
        fw_compiler=compile_forward,
        bw_compiler=compile_backward,
        inference_compiler=lambda graph, examples: _run_by_operation(graph),
        partition_fn=lambda joint, examples, **options: partition(joint, examples, parameters, fuses=False, **options),
        keep_inference_input_mutations=True,
    )
    return compiler(module, inputs)


def _run_by_operation(graph: GraphModule) -> Boxed:
    forward = graph.forward
    return aot.boxed(lambda arguments: forward(*arguments))


def _with_inductor(
    module: GraphModule, inputs: Sequence[Any], parameters: dict[int, Parameter], settings: dict[str, Any]
) -> Callable[..., Any]:
    region: list[Region] = []

    def compile_graph(graph: GraphModule, examples: Sequence[Any], **options: Any) -> Any:
        if not options.get("is_backward"):
            if not options.get("is_inference"):
                region[:] = [Region.of(graph, parameters)]
            return inductor.compile_one(graph, examples, **options)
        aot.forbid_donation()
        static = set(options.pop("static_input_idxs", ()))

        def compile_half(half: Half) -> Boxed:
            fixed = [index for index, place in enumerate(half.places) if place is None or place in static]
            return inductor.compile_one(half.module, half.inputs, static_input_idxs=fixed, **options)

        def compile_i(half: Half) -> tuple[Boxed, Strides]:
            with inductor.report_output_strides() as strides:
                compiled = compile_half(half)
            return compiled, list(strides or [])

        return build(graph, examples, region[0], compile_i, compile_half)

    return inductor.compile_region(
        module,
        inputs,
        compile_graph=compile_graph,
        partition=lambda joint, examples, **options: partition(joint, examples, parameters, fuses=True, **options),
        settings=settings,
    )
