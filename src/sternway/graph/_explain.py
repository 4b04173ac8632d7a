"""A failed backward, explained: torch's error is caught, the graph it failed in looked at, and the cause named.

The graph is found where the error came from: the frame of torch that called the engine holds the tensors it started
from.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from sternway.errors import BackwardError
from sternway.graph._capture import capture
from sternway.graph._record import Recording, Write, storage_of
from sternway.graph._saved import is_freed, slots
from sternway.graph._tags import tag_of
from sternway.graph._walk import forward_order

_INPLACE = "modified by an inplace operation"
_TWICE = "backward through the graph a second time"
_NO_GRAD = "does not require grad"
_UNUSED = "Expected to have finished reduction in the prior iteration"


@contextmanager
def explain(model: nn.Module | None = None) -> Iterator[None]:
    """Explain the usual failures of a backward inside the block, in a message one can act on.

    Example:
        >>> x = torch.ones(2, requires_grad=True)
        >>> try:
        ...     with explain():
        ...         with torch.no_grad():
        ...             loss = x.sum()
        ...         loss.backward()
        ... except RuntimeError as error:
        ...     print(error.rule)
        a backward starts from a tensor that requires a gradient

    It knows four: a saved tensor changed in place, a second backward, a loss that requires no gradient, and a
    parameter that DDP waits for in vain. Anything else passes through. Put the forward inside the block too: lines are
    known only of what runs there.

    Args:
        model: names parameters and modules.

    Raises:
        BackwardError: a ``RuntimeError`` too; torch's own error is its cause.
    """
    recording = _Explaining(model, values=False, writes=True)
    try:
        with recording:
            yield
    except RuntimeError as error:
        text = str(error)
        roots = _roots_of(error)
        if _INPLACE in text:
            raise _inplace(error, roots, recording, model) from error
        if _TWICE in text:
            raise _twice(roots, recording, model) from error
        if _NO_GRAD in text:
            raise _no_grad(roots, model) from error
        if _UNUSED in text:
            raise _unused(text, model) from error
        raise


@contextmanager
def explain_inplace(model: nn.Module | None = None) -> Iterator[None]:
    """Name the tensor that was changed in place, the line that saved it and the line that changed it.

    Example:
        >>> x = torch.ones(2, requires_grad=True)
        >>> try:
        ...     with explain_inplace():
        ...         y = x.exp()
        ...         _ = y.add_(1)
        ...         y.sum().backward()
        ... except RuntimeError as error:
        ...     print(error.rule)
        a tensor that the backward needs must not be changed in place

    ``explain`` does this and more; this one leaves other errors alone.
    """
    try:
        with explain(model):
            yield
    except BackwardError as error:
        if error.__cause__ is not None and _INPLACE not in str(error.__cause__):
            raise error.__cause__ from None
        raise


class _Explaining(Recording):
    """A recording that also looks, before each ``loss.backward()``, whether parts of the graph were used already.

    Afterwards it is too late: a backward that fails has freed what it came through.
    """

    used: tuple[int, bool] | None = None  # the topmost used node by its place, and whether nothing is left unused

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") == "backward" and args and isinstance(args[0], Tensor):
            with torch._C.DisableTorchFunction():
                self._look(args[0])
        return super().__torch_function__(func, types, args, kwargs)

    def _look(self, loss: Tensor) -> None:
        order = forward_order([loss.grad_fn] if loss.grad_fn is not None else [])
        freed = [is_freed(node) for node in order]
        top = max((index for index, gone in enumerate(freed) if gone), default=None)
        self.used = None if top is None else (top, not _fresh(order, freed))


def _frames(error: BaseException) -> Iterator[FrameType]:
    trace = error.__traceback__
    while trace is not None:
        yield trace.tb_frame
        trace = trace.tb_next


def _roots_of(error: BaseException) -> list[Tensor]:
    """The tensors that the failed backward started from."""
    roots: Any = ()
    for frame in _frames(error):
        if frame.f_code.co_name == "_engine_run_backward":
            roots = frame.f_locals.get("t_outputs", ())
    return [root for root in roots if isinstance(root, Tensor)]


def _inplace(error: RuntimeError, roots: list[Tensor], recording: Recording, model: nn.Module | None) -> BackwardError:
    numbers = re.search(r"is at version (\d+); expected version (\d+)", str(error))
    now, expected = (int(numbers[1]), int(numbers[2])) if numbers else (-1, -1)
    node, slot, tensor = _changed(roots, expected)
    tag = tag_of(node) if node is not None else None
    kind = type(node).__name__ if node is not None else "an operation"
    saver = f"{tag.op} ({kind}, slot {slot!r})" if tag else f"{kind} (slot {slot!r})"
    saver += f" at {tag.source}" if tag else ""
    what = "a tensor" if tensor is None else f"a {str(tensor.dtype)[6:]} tensor of shape {tuple(tensor.shape)}"
    name = "" if tensor is None else _name_of(tensor, error, model)
    writes = _writes(recording, tensor, expected)
    changer = "; then ".join(f"{write.op} at {write.source} (to version {write.version})" for write in writes)
    return BackwardError(
        "a tensor that the backward needs must not be changed in place",
        got=f"{what}{name}, saved by {saver} at version {expected} and "
        + (f"changed by {changer}" if changer else f"changed to version {now} outside the block, or by a kernel"),
        fix=f"use the out-of-place form ({_out_of_place(writes)}), change a copy (x = x.clone() first), or make the "
        "change after the backward",
    )


def _changed(roots: list[Tensor], expected: int) -> tuple[Any, str, Tensor | None]:
    """The node in whose backward it failed: the first in backward order whose saved tensor is of a later version."""
    for node in reversed(forward_order([root.grad_fn for root in roots if root.grad_fn is not None])):
        for attribute, name in slots(node.__class__):
            try:
                raw = getattr(node, attribute)
            except RuntimeError:
                continue
            for part in raw if isinstance(raw, tuple | list) else (raw,):
                if part is None or part.unpack_hook is not None or part.data is None:
                    continue
                if part.data._version > expected >= 0 and _refuses(node, attribute):
                    return node, name, part.data
    return None, "", None


def _refuses(node: Any, attribute: str) -> bool:
    """Whether unpacking fails for the version's sake; a plain tensor's unpacking has no effect."""
    try:
        getattr(node, attribute.removeprefix("_raw") if attribute != "_raw_saved_tensors" else "saved_tensors")
    except RuntimeError as error:
        return _INPLACE in str(error)
    return False


def _writes(recording: Recording, tensor: Tensor | None, expected: int) -> list[Write]:
    if tensor is None or (storage := storage_of(tensor)) is None:
        return []
    latest = {write.version: write for write in recording.writes if write.storage == storage}
    return [latest[version] for version in sorted(latest) if version > expected]


def _out_of_place(writes: list[Write]) -> str:
    name = writes[0].op if writes else "add_"
    plain = name.strip("_").removeprefix("i") if name.startswith("__i") else name.rstrip("_")
    return "torch.where or a new tensor" if "setitem" in name else f"{plain} for {name}"


def _name_of(tensor: Tensor, error: BaseException, model: nn.Module | None) -> str:
    """What the user calls it: a parameter's name, or a local variable in the frames of the error."""
    storage = storage_of(tensor)
    for name, parameter in model.named_parameters() if model is not None else ():
        if storage_of(parameter) == storage:
            return f" (parameter {name})"
    for frame in _frames(error):
        if "/torch/" in frame.f_code.co_filename or "/sternway/" in frame.f_code.co_filename:
            continue
        for name, value in frame.f_locals.items():
            if isinstance(value, Tensor) and storage_of(value) == storage:
                return f" (the variable {name!r} in {frame.f_code.co_name})"
    return ""


def _twice(roots: list[Tensor], recording: _Explaining, model: nn.Module | None) -> BackwardError:
    again = "call backward once on the sum of the losses, or pass retain_graph=True to every backward but the last"
    carried = (
        "detach() what is carried over from the earlier step (a hidden state, a cached activation), or pass "
        "retain_graph=True to the earlier backward"
    )
    if recording.used is None or not roots:
        got, fix = "a second backward through a part of it", f"{carried}; where it is the same loss, {again}"
    else:
        top, whole = recording.used
        part, fix = ("all of this graph", again) if whole else ("a part of this graph", carried)
        got = f"a second backward; {part} was used before, from {capture(roots, model).nodes[top]} down"
    return BackwardError("a graph is freed by its first backward", got=got, fix=fix)


def _fresh(order: list[Any], freed: list[bool]) -> bool:
    """Whether some node that saves tensors still has them."""
    return any(
        not gone
        and any(getattr(getattr(node, slot, None), "data", None) is not None for slot, _ in slots(node.__class__))
        for node, gone in zip(order, freed, strict=True)
    )


def _no_grad(roots: list[Tensor], model: nn.Module | None) -> BackwardError:
    root = next((root for root in roots if not root.requires_grad), None)
    if model is not None and not any(parameter.requires_grad for parameter in model.parameters()):
        got, fix = "a model all of whose parameters are frozen", "call model.requires_grad_(True) before the forward"
    elif root is not None and root.is_inference():
        got, fix = "a loss made under torch.inference_mode()", "run the forward outside it"
    elif root is not None and not (root.is_floating_point() or root.is_complex()):
        got = f"a loss of dtype {str(root.dtype)[6:]}"
        fix = "compute it with floating-point operations: argmax, comparisons and casts to integers stop gradients"
    else:
        got = "a loss that no operation on a tensor with requires_grad=True led to"
        fix = (
            "look for torch.no_grad(), .detach(), .item(), .data, torch.tensor(x) or numpy between the model and the "
            "loss, and for frozen parameters"
        )
    return BackwardError("a backward starts from a tensor that requires a gradient", got=got, fix=fix)


def _unused(text: str, model: nn.Module | None) -> BackwardError:
    listed = re.search(r"did not receive grad for rank \d+: ([\d ]+)", text)
    named = re.search(r"did not receive grad for rank \d+: ([\w.]+(?:, [\w.]+)*)", text)
    names: list[str] = []
    if listed and model is not None:
        every = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        names = [every[int(index)] for index in listed[1].split() if int(index) < len(every)]
    elif named and not listed:
        names = named[1].split(", ")
    return BackwardError(
        "DDP waits for a gradient from every parameter in every step",
        got=f"none for {', '.join(names)}" if names else "some parameters that the last loss did not use",
        fix="use them in the loss, freeze them (requires_grad_(False)), or pass find_unused_parameters=True to DDP; "
        "graph.capture(loss, model).unused_parameters() lists them",
    )
