"""Recompute most of a checkpointed region in the backward, and put what is kept of it under the policies.

``torch.utils.checkpoint`` saves the inputs of its region through the active saved-tensor hooks, so our policies move or
encode them already. What torch's selective contexts keep inside the region is kept in a dictionary of their own, where
no hook sees it. The contexts here keep the same, packed by the policies.

torch's contexts fail where the second run does something that the first did not: under autocast, the first found the
weights cast already. They also fail where a kept result is changed in place. Here only kept operators must be the same
in both runs, and a result that was changed is computed again, as all others are. torch does not count all changes: the
result of a product is often seen through ``_unsafe_view``, which has a count of its own. So writes are looked for by
memory while the region runs, and such views are watched afterwards.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext

from sternway._torch import require
from sternway._torch.saved_hooks import counting_writes, intercept, is_operator, written_arguments
from sternway._torch.tensors import storage_id
from sternway._tree import leaves, replace_leaves
from sternway.errors import SavedError
from sternway.saved._pack import Packed, pack_under
from sternway.saved._policy import PolicyStack, active

Choice = Callable[..., CheckpointPolicy | bool]
_CHANGED: Any = object()  # in the place of a result that was changed
_SAVED = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE, True)


def recompute(
    keep: Iterable[Any] | Choice = (),
) -> Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]:
    """A ``context_fn`` for ``torch.utils.checkpoint.checkpoint``: what it keeps goes through the active policies.

    Example:
        >>> from torch.utils.checkpoint import checkpoint
        >>> from sternway import saved
        >>> layer, x = torch.nn.Linear(64, 64), torch.randn(32, 64, requires_grad=True)
        >>> kept = saved.recompute(keep=[torch.ops.aten.addmm.default])
        >>> with saved.compress("bf16") as report:
        ...     y = checkpoint(lambda x: layer(x).relu(), x, use_reentrant=False, context_fn=kept)
        >>> y.sum().backward()
        >>> report.total.encoded_from    # the product's result
        8192

    Args:
        keep: operators (``torch.ops.aten.mm.default``) whose results are kept, all others being recomputed; or a
            function as ``torch.utils.checkpoint.create_selective_checkpoint_contexts`` takes.
    """
    require("saved")
    require("saved.mutable")
    if callable(keep):
        choose: Choice = keep
    else:
        kept = frozenset(keep)
        for operation in kept:
            if not is_operator(operation):
                raise SavedError(
                    "keep must name operators with their overload",
                    got=repr(operation),
                    fix="pass such as torch.ops.aten.mm.default",
                )

        def choose(context: Any, operation: Any, *args: Any, **kwargs: Any) -> bool:
            return operation in kept

    return lambda: _Region(choose, active() or PolicyStack()).contexts()


class _Region:
    """One run of a checkpointed region: what its forward keeps for its backward."""

    def __init__(self, choose: Choice, stack: PolicyStack) -> None:
        self._choose, self._stack = choose, stack
        self._results: dict[Any, list[Any]] = defaultdict(list)  # by operator, in the order of its calls
        self._calls: Counter[Any] = Counter()
        self._kept_in: dict[int, list[tuple[Any, int]]] = {}  # by memory: operators and places of results

    def contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """The modes for the forward and for the recomputation."""
        return intercept(self._keep), intercept(self._replay, self._calls.clear)

    def _chosen(self, again: bool, operator: Any, args: Any, kwargs: Any) -> bool:
        if written_arguments(operator):  # by mm(out=…): if it were not run again, nothing would be written
            return False
        context = SelectiveCheckpointContext(is_recompute=again)
        return self._choose(context, operator, *args, **kwargs) in _SAVED

    def _keep(self, operator: Any, args: Any, kwargs: Any) -> Any:
        """In the forward: keep chosen results, unless they are changed."""
        for position, name in written_arguments(operator):
            self._drop_changed(args[position] if position < len(args) else kwargs.get(name))
        out = operator(*args, **kwargs)
        if self._chosen(False, operator, args, kwargs):
            results = self._results[operator]
            for memory in map(storage_id, _plain(out)):
                self._kept_in.setdefault(memory, []).append((operator, len(results)))
            results.append(replace_leaves(self._pack, out))
        elif self._kept_in:
            self._watch(out)
        return out

    def _drop_changed(self, written: Any) -> None:
        for memory in map(storage_id, _plain(written)):
            for operator, place in self._kept_in.pop(memory, ()):
                self._results[operator][place] = _CHANGED

    def _watch(self, out: Any) -> None:
        """Look after tensors in the memory of what is kept: who writes to them later is counted there, if anywhere."""
        for tensor in _plain(out):
            for operator, place in self._kept_in.get(storage_id(tensor), ()):
                with counting_writes():
                    alias = tensor.detach()
                for each in leaves(self._results[operator][place]):
                    if isinstance(each, Packed):
                        each.watch(alias)

    def _pack(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        with counting_writes():
            return pack_under(self._stack, value)

    def _replay(self, operator: Any, args: Any, kwargs: Any) -> Any:
        """In the backward: take the results that were kept, and compute the others again."""
        if not self._chosen(True, operator, args, kwargs):
            return operator(*args, **kwargs)
        kept, place = self._results[operator], self._calls[operator]
        self._calls[operator] += 1
        if place >= len(kept) or kept[place] is None:
            raise SavedError(
                "a region that keeps some of its results must go through one backward only, and run the same each time",
                got=f"{operator} once more than in the forward",
                fix="run one backward, and make the region do the same each time",
            )
        result, kept[place] = kept[place], None
        if result is _CHANGED or any(isinstance(leaf, Packed) and leaf.is_changed for leaf in leaves(result)):
            return operator(*args, **kwargs)
        return replace_leaves(_unpack, result)


def _plain(tree: Any) -> list[Tensor]:
    """The tensors of a tree that have memory of their own."""
    return [leaf for leaf in leaves(tree) if type(leaf) is Tensor and leaf.layout is torch.strided]


def _unpack(value: Any) -> Any:
    return value.unpack() if isinstance(value, Packed) else value
