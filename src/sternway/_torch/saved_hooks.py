"""Saved-tensor hooks, checkpoints, and what else comes between autograd and what it saves: modes, module calls."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import checkpoint

from sternway._torch.probe import probe


def push_saved_hooks(pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> None:
    """Make this pair the one that autograd calls in this thread; a ``RuntimeError`` where hooks are disabled."""
    torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)


def pop_saved_hooks() -> None:
    """Remove the innermost pair of hooks of this thread."""
    torch._C._autograd._pop_saved_tensors_default_hooks()


def top_saved_hooks() -> tuple[Callable[[Tensor], Any] | None, Callable[[Any], Tensor] | None]:
    """The pair that autograd calls in this thread; two times None if there is none."""
    pair: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)  # also while Dynamo traces
    return pair or (None, None)


def disabled_message() -> str | None:
    """What the error says where saved-tensor hooks are disabled; None where they are not."""
    return torch._C._autograd._saved_tensors_hooks_get_disabled_error_message()


def disable_saved_hooks(message: str) -> None:
    """Disable saved-tensor hooks in this thread; a ``RuntimeError`` if some are active, and disabled all the same."""
    torch._C._autograd._saved_tensors_hooks_disable(message)


def enable_saved_hooks() -> None:
    """Undo ``disable_saved_hooks``."""
    torch._C._autograd._saved_tensors_hooks_enable()


def checkpoint_holder() -> type[Any]:
    """The type of what stands for a tensor in a checkpointed region; its ``handles`` tell what was read."""
    return checkpoint._Holder


class CheckpointInputs(NamedTuple):
    """What a checkpointed region keeps in order to be computed again."""

    region: int
    """The same for every saved tensor of one region."""
    values: list[Any]
    """The region's arguments: a tensor, what a pack hook made of one, or any other value."""


def checkpoint_inputs(hook: Any) -> CheckpointInputs | None:
    """What is kept for the region that an unpack hook belongs to; None if the hook is not a checkpoint's."""
    frame = _frame(hook)
    if frame is None:
        return None
    saver = getattr(frame, "input_saver", None)
    # torch 2.11 keeps them on the node of a dummy tensor, after the dummy itself.
    kept = frame.saved_args if saver is None else saver.grad_fn._raw_saved_tensors[1:]
    saved: Any = torch._C._autograd.SavedTensor
    return CheckpointInputs(id(frame), [entry.data if isinstance(entry, saved) else entry for entry in kept])


def can_share_recomputation() -> bool:
    """Whether two backwards can share what checkpoints recompute: whether torch has ``GraphExecGroup``."""
    return hasattr(checkpoint, "GraphExecGroup")


def recomputation() -> Any:
    """What stands for one recomputation of each region, for ``sharing``: the user's own, if there is one."""
    return torch._C._get_graph_exec_group() or checkpoint.GraphExecGroup()


@contextmanager
def sharing(group: Any) -> Iterator[None]:
    """In all blocks with the same ``recomputation()``, a checkpointed region recomputes once; a tensor is read once."""
    before = torch._C._get_graph_exec_group()
    torch._C._set_graph_exec_group(group)
    try:
        yield
    finally:
        torch._C._set_graph_exec_group(before)


def recomputed(hook: Any, holder: Any) -> list[Tensor]:
    """The tensors that were recomputed for a holder, and not yet read; its unpack hook knows the region."""
    frame = _frame(hook)
    if frame is None:
        return []
    handles = [(group, handle) for group, handle in holder.handles.items() if handle is not None]
    return [frame.recomputed[group][handle] for group, handle in handles if handle in frame.recomputed[group]]


def _frame(hook: Any) -> Any:
    """The region that an unpack hook belongs to; None if the hook is not a checkpoint's."""
    return inspect.getclosurevars(hook).nonlocals.get("frame") if inspect.isfunction(hook) else None


Operation = Callable[[Any, Any, dict[str, Any]], Any]
"""Called with an operator, its arguments and its keyword arguments; its result is the operator's."""


@cache
def _mode_type() -> type[Any]:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Interception(TorchDispatchMode):
        def __init__(self, operation: Operation, entered: Callable[[], None] | None) -> None:
            super().__init__()
            self._operation, self._entered = operation, entered

        def __enter__(self) -> Any:
            if self._entered is not None:
                self._entered()
            return super().__enter__()

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return self._operation(function, args, kwargs or {})

    return Interception


def intercept(operation: Operation, entered: Callable[[], None] | None = None) -> AbstractContextManager[Any]:
    """A dispatch mode: in its block ``operation`` is called in place of every operator."""
    mode: AbstractContextManager[Any] = _mode_type()(operation, entered)
    return mode


def is_operator(value: Any) -> bool:
    """Whether a value is an operator with its overload, such as ``torch.ops.aten.mm.default``."""
    return isinstance(value, torch._ops.OpOverload)


def counting_writes() -> AbstractContextManager[Any]:
    """A block inside of ``intercept`` in which an alias that is made counts the writes to its tensor, as outside."""
    guard: Any = torch._C._SetExcludeDispatchKeyGuard
    alias: AbstractContextManager[Any] = guard(torch._C.DispatchKey.ADInplaceOrView, False)
    return alias


@cache
def written_arguments(operator: Any) -> tuple[tuple[int, str], ...]:
    """The arguments that an operator writes to: position and name. Of a higher-order one it is not known."""
    if not is_operator(operator):
        return ()
    return tuple(
        (position, argument.name)
        for position, argument in enumerate(operator._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def module_call_code() -> CodeType:
    """The code of the frame that every call of an ``nn.Module`` has; its local ``self`` is the module."""
    return torch.nn.Module._wrapped_call_impl.__code__


@probe(
    "torch._C._autograd._push_saved_tensors_default_hooks, _pop_saved_tensors_default_hooks, "
    "_top_saved_tensors_default_hooks",
    expected="pass what autograd saves through a pair of hooks, and say which",
    features=("saved",),
)
def _stack() -> bool:
    packed: list[Tensor] = []
    x = torch.full((1,), 3.0, requires_grad=True)

    def pack(tensor: Tensor) -> int:
        packed.append(tensor.detach())
        return len(packed) - 1

    push_saved_hooks(pack, packed.__getitem__)
    try:
        y = x * x
        top = top_saved_hooks()[0]
    finally:
        pop_saved_hooks()
    if top is not pack or top_saved_hooks() != (None, None):
        return False
    z = y.exp()  # saves a tensor that no hook sees
    return len(packed) == 2 and z.requires_grad and torch.autograd.grad(y, x)[0].item() == 6.0


@probe(
    "torch._C._autograd._saved_tensors_hooks_disable, _saved_tensors_hooks_enable, "
    "_saved_tensors_hooks_get_disabled_error_message",
    expected="refuse hooks with a message, until they are enabled again",
    features=("saved",),
)
def _disabled() -> bool:
    disable_saved_hooks("not here")
    try:
        found = disabled_message()
        try:
            push_saved_hooks(lambda tensor: tensor, lambda tensor: tensor)
        except RuntimeError as error:
            refused = str(error)
        else:
            pop_saved_hooks()
            return False
    finally:
        enable_saved_hooks()
    return found == refused == "not here" and disabled_message() is None


@probe(
    "torch.utils.checkpoint._Holder, _CheckpointFrame",
    expected="stand for the tensors of a checkpointed region, and keep its inputs",
    features=("split", "graph"),
)
def _checkpoints() -> bool:
    x = torch.ones(2, requires_grad=True)
    run: Any = inspect.unwrap(checkpoint.checkpoint)  # what is around it imports Dynamo, for seconds
    y = run(lambda x, number: x.exp() * number, x, 3, use_reentrant=False)
    node: Any = y.grad_fn.next_functions[0][0]
    raw = node._raw_saved_result
    inputs = checkpoint_inputs(raw.unpack_hook)
    kept = [value for value in inputs.values if isinstance(value, Tensor)] if inputs is not None else []
    holds = isinstance(raw.data, checkpoint_holder()) and isinstance(raw.data.handles, dict)
    return holds and len(kept) == 1 and kept[0].untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


@probe(
    "torch.utils.checkpoint.GraphExecGroup, torch._C._get_graph_exec_group, _set_graph_exec_group",
    expected="let two backwards share what a checkpoint recomputes",
    features=("split.checkpoint",),
)
def _shared_recomputation() -> bool:
    if not can_share_recomputation():
        return True  # then W goes through no checkpointed region
    runs: list[int] = []

    def region(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        runs.append(1)
        return x.exp(), weight.exp()

    x, weight = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    run: Any = inspect.unwrap(checkpoint.checkpoint)
    outputs = run(region, x, weight, use_reentrant=False, preserve_rng_state=False)
    group, node = recomputation(), outputs[1].grad_fn
    with sharing(group):
        torch.autograd.grad(outputs[0].sum(), x)
    saved = node._raw_saved_result
    kept = recomputed(saved.unpack_hook, saved.data)
    with sharing(group):
        (grad,) = torch.autograd.grad(outputs[1].sum(), weight)
    return len(runs) == 2 and len(kept) == 1 and torch.equal(grad, kept[0]) and torch._C._get_graph_exec_group() is None


@probe(
    "torch.utils._python_dispatch.TorchDispatchMode, OpOverload._schema",
    expected="show every operator before it runs, and say what it writes to",
    features=("saved.mutable",),  # apart: a dispatch mode imports Dynamo, which takes seconds
)
def _dispatch() -> bool:
    seen: list[tuple[bool, tuple[tuple[int, str], ...]]] = []

    def look(operator: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        seen.append((is_operator(operator), written_arguments(operator)))
        return operator(*args, **kwargs)

    tensor, out = torch.ones(2), torch.empty(2)
    with intercept(look):
        tensor.add_(1)
        torch.exp(tensor, out=out)
        tensor.exp()
    return seen == [(True, ((0, "self"),)), (True, ((1, "out"),)), (True, ())] and tensor.tolist() == [2.0, 2.0]


@probe(
    "torch._C._SetExcludeDispatchKeyGuard, torch._C.DispatchKey.ADInplaceOrView",
    expected="let an alias that is made inside of a dispatch mode count the writes to its tensor",
    features=("saved.mutable",),
)
def _aliases() -> bool:
    made: list[Tensor] = []

    def keep(operator: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        out = operator(*args, **kwargs)
        with counting_writes():
            made.append(out.detach())
        return out

    tensor = torch.ones(2)
    with intercept(keep):
        tensor = tensor.exp()
    before = made[0]._version
    tensor.mul_(2)
    return made[0]._version == before + 1


@probe(
    "torch.nn.Module._wrapped_call_impl",
    expected="is the frame of every call of a module, with the module as `self`",
    features=("saved",),
)
def _module_frames() -> bool:
    found: list[Any] = []

    class Looks(torch.nn.Module):
        def forward(self) -> None:
            frame = inspect.currentframe()
            while frame is not None:
                if frame.f_code is module_call_code():
                    found.append(frame.f_locals["self"])
                frame = frame.f_back

    module = Looks()
    module()
    return len(found) == 1 and found[0] is module
