"""One forward of the whole model, to find out which values its later parts use. Nothing of the model is changed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import nn

from sternway._torch.modes import uncompiled
from sternway._tree import tensor_places
from sternway.errors import PipelineError
from sternway.pipeline.forward._absent import tensors_in
from sternway.pipeline.forward._flow import Flow
from sternway.pipeline.forward._follow import Interceptor, check_replaced
from sternway.pipeline.forward._left import LeftValue, held_tensors
from sternway.pipeline.forward._recorder import Recorder
from sternway.pipeline.forward._untouched import untouched
from sternway.pipeline.transport._payload import pack, unpack


def record(model: nn.Module, pieces: Mapping[str, nn.Module], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Flow:
    """Run ``model`` in its mode, and follow its values; then in the other mode, to know what that one uses besides.

    Raises:
        PipelineError: if the forward fails.
    """
    with sample_runs():
        flow = _record(model, pieces, args, kwargs)
    modes = [(module, module.training) for module in model.modules()]
    model.train(not model.training)
    with suppress(Exception):  # a model may not be made for that mode, or that batch
        flow.add(_record(model, pieces, args, kwargs))
    for module, mode in modes:
        module.training = mode
    return flow


@contextmanager
def sample_runs() -> Iterator[None]:
    """A block that runs the sample: what the model raises is an error about the sample."""
    try:
        yield
    except PipelineError:
        raise
    except Exception as error:
        raise PipelineError(
            "the sample (without one, the first microbatch) must go through the model, forward and backward",
            got=f"{type(error).__name__}: {error}",
            fix="pass what the forward takes: a sample is a tensor, a tuple of arguments, or a dict of keyword ones",
        ) from error


def _record(model: nn.Module, pieces: Mapping[str, nn.Module], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Flow:
    try:
        return _recorded(model, pieces, args, kwargs, keep=False)
    except PipelineError as error:
        if not isinstance(error, _DroppedError):
            raise
    except Exception:  # torch.func takes no hooks
        pass
    return _recorded(model, pieces, args, kwargs, keep=True)


def _recorded(
    model: nn.Module, pieces: Mapping[str, nn.Module], args: tuple[Any, ...], kwargs: dict[str, Any], *, keep: bool
) -> Flow:
    with untouched(model), _as_if_training(model, keep), uncompiled():
        before = held_tensors(model)
        first = _follow(model, pieces, args, kwargs)
        left = first.left_behind(before, held_tensors(model))
        if left:
            with suppress(Exception):  # a forward may not be made to follow another of the same batch
                second = _follow(model, pieces, args, kwargs, left)
                if second.flow.calls == first.flow.calls:
                    first.flow.obstacles += second.uses_of_left
    return first.flow


def _follow(
    model: nn.Module,
    pieces: Mapping[str, nn.Module],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    left: Sequence[LeftValue] = (),
) -> Recorder:
    """Run the model, and follow its values."""
    spec, tensors = pack((args, kwargs))
    own = [tensor.clone() for tensor in tensors]  # the forward may change them
    twice = {id(tensor): copy for tensor, copy in zip(tensors, own, strict=True)}
    tensors = [twice[id(tensor)] for tensor in tensors]
    args, kwargs = unpack(spec, tensors)
    recorder = Recorder(model, pieces, tensors, left)
    with Interceptor(pieces).passing_to(recorder.call) as replaced, recorder:
        result = model(*args, **kwargs)
        recorder.note_replaced(model)
    check_replaced(replaced)
    recorder.finish(tensors_in(result))
    recorder.flow.batch = tensor_places(spec.tree)
    return recorder


class _DroppedError(PipelineError):
    """A backward came upon what the sample's run did not save: its own, or a later one through what is left of it."""


def _drop(_: Any) -> Any:
    return None


def _dropped(_: Any) -> Any:
    raise _DroppedError(
        "a step used a value that the run of the sample had made, which cannot be: it saved nothing for a backward",
        got="perhaps a cache of weights, such as torch.nn.utils.parametrize.cached()",
        fix="make the value in every forward",
    )


@contextmanager
def _as_if_training(model: nn.Module, keep: bool) -> Iterator[None]:
    """A block in which all parameters require gradients, as any of them may later.

    Nothing is saved for a backward, unless ``keep``.
    """
    frozen = [p for p in model.parameters() if not p.requires_grad and (p.is_floating_point() or p.is_complex())]
    saved = nullcontext() if keep else torch.autograd.graph.saved_tensors_hooks(_drop, _dropped)
    with torch.enable_grad(), saved:
        try:
            for parameter in frozen:
                parameter.requires_grad_(True)
            yield
        finally:
            for parameter in frozen:
                parameter.requires_grad_(False)
