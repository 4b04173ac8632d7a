"""DTensors: the part that a process holds, and what a compiled backward does with such parts.

A compiled graph takes and returns plain tensors. Of a DTensor it takes the part that the process holds; and of a tensor
that it returns as a DTensor's gradient, AOTAutograd makes a DTensor, which holds that very tensor.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sternway._torch.probe import probe
from sternway._torch.tensors import ORDINARY

LOCAL = "_local_tensor"
"""The attribute of a DTensor that is the part which the process holds."""


def is_dtensor(tensor: Any) -> bool:
    """Whether a tensor is a DTensor, and not of a class derived from that."""
    if type(tensor) in ORDINARY or not torch.distributed.is_available():
        return False
    from torch.distributed.tensor import DTensor

    return type(tensor) is DTensor


def local_part(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor: of a DTensor its shard, and of any other all. Both share memory."""
    if type(tensor) in ORDINARY:
        return tensor
    from torch.distributed.tensor import DTensor

    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def with_local_part(like: Tensor, part: Tensor) -> Tensor:
    """A DTensor laid out as ``like``, of which this process holds ``part``. No other process takes part."""
    dtensor: Any = like
    names, layout = dtensor.__tensor_flatten__()
    parts = {name: getattr(dtensor, name) for name in names} | {LOCAL: part}
    made: Tensor = type(dtensor).__tensor_unflatten__(parts, layout, like.size(), like.stride())
    return made


class _Whole(Tensor):
    """A tensor that is made of another, as a DTensor is."""

    _local_tensor: Tensor

    @staticmethod
    def __new__(cls, part: Tensor, requires_grad: bool = False) -> _Whole:
        made: _Whole = Tensor._make_wrapper_subclass(cls, part.shape, dtype=part.dtype, requires_grad=requires_grad)
        made._local_tensor = part
        return made

    def __repr__(self) -> str:  # type: ignore[override]  # torch's own takes a text, and computes
        return "_Whole()"

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return [LOCAL], None

    @staticmethod
    def __tensor_unflatten__(parts: dict[str, Tensor], layout: None, size: Any, stride: Any) -> _Whole:
        return _Whole(parts[LOCAL])

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares it as a static method
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> _Whole:
        parts = [each._local_tensor if isinstance(each, _Whole) else each for each in args]
        return _Whole(func(*parts, **(kwargs or {})))


@probe(
    "SubclassGetAttrAOTOutput.base, attr; SubclassCreationMeta.creation_fn",
    expected="name the gradient that a compiled graph returns a part of, and make it of that very tensor",
    features=("split.compiled.sharded",),
)
def _gradient() -> bool:
    from torch._guards import TracingContext, tracing
    from torch._subclasses import FakeTensorMode

    from sternway._torch.compile import aot_autograd, boxed, gradient_indices

    mark, indices = torch.zeros(()).expand(2, 3), []

    def compile_backward(graph: Any, examples: Any) -> Any:
        indices.extend(gradient_indices(graph))
        return boxed(lambda arguments: [mark])

    weight = _Whole(torch.ones(2, 3), requires_grad=True)
    compiler = aot_autograd(
        fw_compiler=lambda graph, examples: boxed(lambda arguments: graph(*arguments)), bw_compiler=compile_backward
    )
    with tracing(TracingContext(FakeTensorMode())):
        compiled = compiler(torch.fx.symbolic_trace(lambda weight: (weight.sin(),)), [weight])
    (output,) = compiled(weight)
    (grad,) = torch.autograd.grad(output, [weight], [output.detach()])
    return indices == [0] and type(grad) is _Whole and grad._local_tensor is mark


@probe(
    "DTensor: _local_tensor, __tensor_flatten__, __tensor_unflatten__",
    expected="take a DTensor apart, and make one of the very part that they are given",
    features=("split.compiled.sharded",),
)
def _parts() -> bool:
    if not torch.distributed.is_available():
        return True
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = DeviceMesh("cpu", [0], _init_backend=False, _rank=0)  # starts no process group
    like = DTensor.from_local(torch.ones(3, 2), mesh, [Shard(1)], run_check=False)
    part = torch.zeros(3, 2)
    made: Any = with_local_part(like, part)
    same = (made.device_mesh, made.placements, made.stride()) == (like.device_mesh, like.placements, like.stride())
    return is_dtensor(made) and local_part(made) is part and same
