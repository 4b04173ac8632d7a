"""``explain``: catch torch's error for a failed backward, inspect the graph, and raise an error that names the cause.

The graph is found through the error's traceback: the frame of torch that called the autograd engine holds the tensors
that the backward started from.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from torch import Tensor, nn

from sternway._torch import require
from sternway._torch.failures import changed_versions, failed_roots, failure_of, unused_parameters
from sternway._torch.nodes import read_saved, saved_parts
from sternway._torch.tensors import version_of
from sternway.errors import BackwardError
from sternway.graph._capture import capture
from sternway.graph._record import Recording, Write
from sternway.graph._saved import is_freed, storage_of
from sternway.graph._tags import tag_of
from sternway.graph._walk import forward_order


@contextmanager
def explain(model: nn.Module | None = None) -> Iterator[None]:
    """Explain the usual failures of a backward inside the block.

    Example:
        >>> x = torch.ones(2, requires_grad=True)
        >>> try:
        ...     with explain():
        ...         with torch.no_grad():
        ...             loss = x.sum()
        ...         loss.backward()
        ... except RuntimeError as error:
        ...     print(error.rule)
        a backward must start from a tensor that requires a gradient

    It explains four errors: a saved tensor changed in place, a second backward, a loss that requires no gradient, and
    a parameter without a gradient under DDP. Other errors pass through unchanged. Put the forward inside the block
    too: source lines are known only for operations that run there.

    Args:
        model: names parameters and modules.

    Raises:
        BackwardError: a ``RuntimeError`` too; torch's own error is its cause.
    """
    require("graph")
    used = _UsedParts()
    recording = Recording(model, writes=True, before_backward=used.look)
    try:
        with recording:
            yield
    except RuntimeError as error:
        roots = failed_roots(error)
        match failure_of(error):
            case "inplace":
                raise _inplace(error, roots, recording, model) from error
            case "twice":
                raise _twice(roots, used, model) from error
            case "no_grad":
                raise _no_grad(roots, model) from error
            case "unused":
                raise _unused(error, model) from error
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
        a tensor saved for the backward must not be changed in place

    ``explain`` explains this and other errors; ``explain_inplace`` lets the others pass through unchanged.
    """
    try:
        with explain(model):
            yield
    except BackwardError as error:
        if error.__cause__ is not None and failure_of(error.__cause__) != "inplace":
            raise error.__cause__ from None
        raise


class _UsedParts:
    """Which part of a loss's graph an earlier backward has freed, found before each ``loss.backward()``.

    It cannot be found afterwards: a backward that fails has freed the nodes that it ran.
    """

    top: int | None = None  # the index of the freed node nearest to the loss
    whole = False  # whether every node that saves tensors is freed

    def look(self, loss: Tensor) -> None:
        order = forward_order([loss.grad_fn] if loss.grad_fn is not None else [])
        freed = [is_freed(node) for node in order]
        self.top = max((index for index, gone in enumerate(freed) if gone), default=None)
        self.whole = not any(
            not gone and next(saved_parts(node), None) for node, gone in zip(order, freed, strict=True)
        )


def _frames(error: BaseException) -> Iterator[FrameType]:
    trace = error.__traceback__
    while trace is not None:
        yield trace.tb_frame
        trace = trace.tb_next


def _inplace(error: RuntimeError, roots: list[Tensor], recording: Recording, model: nn.Module | None) -> BackwardError:
    now, expected = changed_versions(error)
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
        "a tensor saved for the backward must not be changed in place",
        got=f"{what}{name}, saved by {saver} at version {expected} and "
        + (f"changed by {changer}" if changer else f"changed to version {now} outside the block, or by a kernel"),
        fix=f"use the out-of-place form ({_out_of_place(writes)}), change a copy (x = x.clone() first), or make the "
        "change after the backward",
    )


def _changed(roots: list[Tensor], expected: int) -> tuple[Any, str, Tensor | None]:
    """The node whose backward failed: the first in backward order whose saved tensor has a later version."""
    for node in reversed(forward_order([root.grad_fn for root in roots if root.grad_fn is not None])):
        for name, part in saved_parts(node):
            if part.unpack_hook is None and version_of(part.data) > expected >= 0 and _is_changed(node, name):
                return node, name, part.data
    return None, "", None


def _is_changed(node: Any, name: str) -> bool:
    """Whether unpacking fails because of the version; without hooks, unpacking has no effect."""
    try:
        read_saved(node, name)
    except RuntimeError as error:
        return failure_of(error) == "inplace"
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
    """The tensor's name in the user's code: a parameter's name, or a local variable in the traceback."""
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


def _twice(roots: list[Tensor], used: _UsedParts, model: nn.Module | None) -> BackwardError:
    again = "call backward once on the sum of the losses, or pass retain_graph=True to every backward but the last"
    carried = (
        "detach() what is carried over from the earlier step (a hidden state, a cached activation), or pass "
        "retain_graph=True to the earlier backward"
    )
    if used.top is None or not roots:
        got, fix = "a second backward through a part of it", f"{carried}; where it is the same loss, {again}"
    else:
        part, fix = ("all of this graph", again) if used.whole else ("a part of this graph", carried)
        got = f"a second backward; {part} was used before, from {capture(roots, model).nodes[used.top]} down"
    return BackwardError("a graph cannot run backward twice: the first backward frees it", got=got, fix=fix)


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
    return BackwardError("a backward must start from a tensor that requires a gradient", got=got, fix=fix)


def _unused(error: RuntimeError, model: nn.Module | None) -> BackwardError:
    indices, names = unused_parameters(error)
    if model is not None:
        every = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        names += [every[index] for index in indices if index < len(every)]
    return BackwardError(
        "under DDP every parameter must get a gradient in every step",
        got=f"none for {', '.join(names)}" if names else "some parameters that the last loss did not use",
        fix="use them in the loss, freeze them (requires_grad_(False)), or pass find_unused_parameters=True to DDP; "
        "graph.capture(loss, model).unused_parameters() lists them",
    )
