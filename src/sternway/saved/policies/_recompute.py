"""Recompute most of a checkpointed region in the backward, and put what is kept of it under the policies.

``torch.utils.checkpoint`` saves the inputs of its region through the active saved-tensor hooks, so our policies move or
encode them already. What torch's selective contexts keep inside the region is kept in a dictionary of their own, where
no hook sees it. The contexts here keep the same, packed by the policies.

torch's contexts fail where the second run does something that the first did not: under autocast, the first found the
weights cast already. They also fail where a kept result is changed in place. Here only kept operators must be the same
in both runs, and a result that was changed is computed again, as all others are. Who changes it may have a tensor that
counts its changes apart, though it has the same memory: ``nn.Linear`` returns one (``aten::_unsafe_view``). So the
operators of the region are asked what memory they write to.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext

from sternway._storage import storage_sizes
from sternway._torch import require
from sternway._torch.saved_hooks import counting_writes, intercept, is_operator, written_arguments
from sternway._tree import leaves, replace_leaves
from sternway.errors import SavedError
from sternway.saved._pack import Packed, pack_under
from sternway.saved._policy import PolicyStack, active

Choice = Callable[..., CheckpointPolicy | bool]
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


@dataclass(slots=True)
class _Kept:
    """The result of an operator, packed, and whether the region has written to its memory since."""

    packed: Any
    is_written: bool = False

    @property
    def is_changed(self) -> bool:
        packed = (leaf for leaf in leaves(self.packed) if isinstance(leaf, Packed))
        return self.is_written or any(leaf.is_changed for leaf in packed)


class _Region:
    """One run of a checkpointed region: what its forward keeps for its backward."""

    def __init__(self, choose: Choice, stack: PolicyStack) -> None:
        self._choose, self._stack = choose, stack
        self._results: dict[Any, list[_Kept | None]] = defaultdict(list)  # by operator, in the order of its calls
        self._at: dict[int, list[_Kept]] = defaultdict(list)  # those in the memory of one storage
        self._calls: Counter[Any] = Counter()

    def contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """The modes for the forward and for the recomputation."""
        return intercept(self._keep), intercept(self._replay, self._begin_replay)

    def _begin_replay(self) -> None:
        self._calls.clear()
        self._at.clear()  # it would hold what is taken

    def _chosen(self, again: bool, operator: Any, args: Any, kwargs: Any) -> bool:
        context = SelectiveCheckpointContext(is_recompute=again)
        return self._choose(context, operator, *args, **kwargs) in _SAVED

    def _keep(self, operator: Any, args: Any, kwargs: Any) -> Any:
        """In the forward: keep chosen results."""
        out = operator(*args, **kwargs)
        for place, name in written_arguments(operator) if is_operator(operator) else ():
            for storage in _storages(args[place] if place < len(args) else kwargs.get(name)):
                for kept in self._at.get(storage, ()):
                    kept.is_written = True
        if self._chosen(False, operator, args, kwargs):
            kept = _Kept(replace_leaves(self._pack, out))
            self._results[operator].append(kept)
            for storage in _storages(out):
                self._at[storage].append(kept)
        return out

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
        if place >= len(kept) or (found := kept[place]) is None:
            raise SavedError(
                "a region that keeps some of its results must go through one backward only, and run the same each time",
                got=f"{operator} once more than in the forward",
                fix="run one backward, and make the region do the same each time",
            )
        kept[place] = None
        return operator(*args, **kwargs) if found.is_changed else replace_leaves(_unpack, found.packed)


def _storages(value: Any) -> Iterable[int]:
    return storage_sizes(leaf for leaf in leaves(value) if isinstance(leaf, Tensor))


def _unpack(value: Any) -> Any:
    return value.unpack() if isinstance(value, Packed) else value
