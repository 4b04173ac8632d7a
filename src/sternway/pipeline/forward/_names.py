"""Functions of torch by name: those that only look at a tensor's shape or kind, those that read its values, and those
that draw random numbers."""

from __future__ import annotations

import functools
import pickle
import random
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sternway._tree import leaves


@functools.lru_cache(maxsize=4096)
def function_name(function: Any) -> str:
    """The name of a function that a function mode sees; an attribute ``x`` is "x.get" when read, "x.set" when set."""
    name = getattr(function, "__name__", type(function).__name__)
    if name in ("__get__", "__set__", "__delete__"):
        owner = getattr(function, "__self__", None)
        return f"{getattr(owner, '__name__', 'attribute')}.{name.strip('_')}"
    return str(name)


_ATTRIBUTES = (
    "shape dtype device ndim requires_grad is_leaf layout names grad_fn output_nr nbytes itemsize name "
    "is_cpu is_cuda is_meta is_mps is_xla is_xpu is_mkldnn is_nested is_quantized is_sparse is_sparse_csr _version"
)
_METHODS = (
    "size dim ndimension numel nelement stride storage_offset element_size get_device is_floating_point is_complex "
    "is_signed is_contiguous is_same_size is_inference is_conj is_neg is_shared is_pinned has_names dim_order "
    "__len__ __hash__ untyped_storage data_ptr result_type can_cast promote_types is_tensor sym_size sym_stride"
)
LOOKS = frozenset(f"{name}.get" for name in _ATTRIBUTES.split()) | frozenset(_METHODS.split())
"""Functions that look at a tensor, but not at its values."""

_READS = (
    "item tolist numpy __bool__ __int__ __float__ __complex__ __index__ __contains__ __array__ __dlpack__ equal "
    "allclose is_nonzero"
)
READS = frozenset(_READS.split())
"""Functions that bring a tensor's values into Python."""

_RANDOM = (
    "rand randn randint randperm rand_like randn_like randint_like normal bernoulli multinomial poisson binomial "
    "normal_ uniform_ random_ exponential_ geometric_ cauchy_ log_normal_ bernoulli_ dropout dropout_ dropout1d "
    "dropout2d dropout3d alpha_dropout feature_alpha_dropout feature_dropout native_dropout rrelu rrelu_ "
    "gumbel_softmax fractional_max_pool2d fractional_max_pool3d kaiming_uniform_ kaiming_normal_ xavier_uniform_ "
    "xavier_normal_ trunc_normal_"
)
RANDOM = frozenset(_RANDOM.split())
"""Functions that draw random numbers, so that two ranks would not get the same."""

FROM_PYTHON = frozenset(("tensor", "as_tensor"))
"""Functions that make tensors of what Python or numpy have, which may have drawn random numbers."""


def python_random_state() -> tuple[Any, ...]:
    """Changes when Python or numpy draw random numbers."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return (random.getstate(),)
    kind, keys, *rest = numpy.random.get_state()
    return random.getstate(), kind, keys.tobytes(), *rest


def own_generators(model: nn.Module) -> dict[str, Any]:
    """The generators of Python or numpy that modules have as attributes, by name."""
    numpy = sys.modules.get("numpy")
    kinds = (random.Random,) if numpy is None else (random.Random, numpy.random.Generator, numpy.random.RandomState)
    return {
        f"{path}.{name}" if path else name: value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, kinds) and not isinstance(value, random.SystemRandom)  # which is nowhere
    }


def generator_state(generator: Any) -> bytes:
    """Changes when a generator of Python or numpy draws."""
    if isinstance(generator, random.Random):
        return pickle.dumps(generator.getstate())
    return pickle.dumps(getattr(generator, "bit_generator", generator))


def backward_inputs(function: Any, args: Any, kwargs: Any) -> list[Tensor] | None:
    """The tensors that a backward is for; none are all that need a gradient. None if the function runs no backward."""
    name = function_name(function)
    if name not in ("grad", "backward"):  # torch.autograd.grad, Tensor.backward
        return None
    inputs = args[1] if len(args) > 1 and name == "grad" else kwargs.get("inputs")
    return [leaf for leaf in leaves(inputs) if isinstance(leaf, Tensor)]


_OURS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]))


def user_line() -> str:
    """The line of the model's own code that is being run, as "file:number: text"."""
    for frame in reversed(traceback.extract_stack()):
        if not frame.filename.startswith((*_OURS, "<")):
            return f"{frame.filename}:{frame.lineno}: {frame.line}"
    return "an unknown line"
