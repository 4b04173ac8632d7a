"""Recompute most of a region in the backward, keep some of it, and let the policies have what is kept.

``torch.utils.checkpoint`` saves its region's inputs by the hooks of the moment, so a checkpoint in a block of ours has
its inputs moved or encoded without any help. What torch's selective contexts keep inside the region is kept in a
dictionary of their own, where no hook sees it. These contexts keep the same, packed.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext

from sternway.errors import SavedError
from sternway.saved._pack import Packed, pack_under
from sternway.saved._policy import Block, active

Choice = Callable[..., CheckpointPolicy | bool]
_SAVED = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE, True)


def recompute(keep: Iterable[Any] | Choice = ()) -> Callable[[], tuple[TorchDispatchMode, TorchDispatchMode]]:
    """What ``torch.utils.checkpoint.checkpoint`` takes as ``context_fn``: the kept goes through the active policies.

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
        keep: operations (``torch.ops.aten.mm.default``) whose results are kept, all others being recomputed; or a
            function as ``torch.utils.checkpoint.create_selective_checkpoint_contexts`` takes.
    """
    if callable(keep):
        choose: Choice = keep
    else:
        kept = frozenset(keep)
        for operation in kept:
            if not hasattr(operation, "_schema"):
                raise SavedError(
                    "what to keep is named by operations with their overload",
                    got=repr(operation),
                    fix="such as torch.ops.aten.mm.default",
                )

        def choose(context: Any, operation: Any, *args: Any, **kwargs: Any) -> bool:
            return operation in kept

    def contexts() -> tuple[TorchDispatchMode, TorchDispatchMode]:
        results: dict[Any, list[Any]] = defaultdict(list)
        block = active()
        return _Keeping(choose, results, block), _Replaying(choose, results)

    return contexts


def _decided(choose: Choice, again: bool, operation: Any, args: Any, kwargs: Any) -> bool:
    context = SelectiveCheckpointContext(is_recompute=again)
    return choose(context, operation, *args, **kwargs) in _SAVED


class _Keeping(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """In the forward: keep results."""

    def __init__(self, choose: Choice, results: dict[Any, list[Any]], block: Block) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._choose, self._results, self._block = choose, results, block

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = function(*args, **kwargs)
        if _decided(self._choose, False, function, args, kwargs):
            self._results[function].append(tree_map(self._pack, out))
        return out

    def _pack(self, value: Any) -> Any:
        return pack_under(self._block, value) if isinstance(value, Tensor) else value


class _Replaying(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """In the backward: take results, or compute them again."""

    def __init__(self, choose: Choice, results: dict[Any, list[Any]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._choose, self._results = choose, results
        self._calls: Counter[Any] = Counter()

    def __enter__(self) -> Any:
        self._calls.clear()
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not _decided(self._choose, True, function, args, kwargs):
            return function(*args, **kwargs)
        kept, place = self._results[function], self._calls[function]
        self._calls[function] += 1
        if place >= len(kept) or kept[place] is None:
            raise SavedError(
                "a region that keeps some of its results goes through one backward",
                got=f"{function} once more, in a second backward or a region that runs differently each time",
                fix="run one backward, and make the region do the same each time",
            )
        result, kept[place] = kept[place], None
        return tree_map(_unpack, result)


def _unpack(value: Any) -> Any:
    return value.unpack() if isinstance(value, Packed) else value
