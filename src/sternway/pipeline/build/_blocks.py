"""The blocks that a model repeats, of which a stage may compute all or some again in the backward, or what is cheap.

Of a stage that recomputes some, these are the first: in the backward they come last, when what the others kept is
already freed. Those that are recomputed selectively come after those that are recomputed whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch import nn

from sternway.errors import PipelineError, SavedError
from sternway.pipeline.build._partition import Layout
from sternway.pipeline.build._weigh import StageWeight
from sternway.pipeline.step._again import RecomputedForward
from sternway.schedule import Share

STATEFUL = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm
"""What changes a buffer in its forward: to run it again would change that twice."""

Count = tuple[int, int]
"""How many blocks of a stage are recomputed, whole and selectively."""

Levels = Sequence[Mapping[Count, StageWeight]]
"""For each stage, what it takes if so many of its blocks are recomputed; nothing if it has none that can be."""


def blocks_of(model: nn.Module, layout: Layout, starts: Sequence[int]) -> list[list[nn.Module]]:
    """For each stage, of those that begin at ``starts``, the blocks that can be recomputed, in the order of calls."""
    kinds = Counter(type(model.get_submodule(name)) for name in {name for name, _ in layout.calls})
    found: list[list[nn.Module]] = [[] for _ in starts]
    for (name, _), stage in layout.stage_of_call(starts).items():
        block = model.get_submodule(name)
        can = kinds[type(block)] > 1 and not any(isinstance(module, STATEFUL) for module in block.modules())
        if can and not any(block is other for other in found[stage]):
            found[stage].append(block)
    return found


def recompute_stages(
    model: nn.Module, layout: Layout, starts: Sequence[int], much: Mapping[int, Share], *, randomly: bool = True
) -> None:
    """Recompute such shares of the blocks of some stages, of those that begin at ``starts``.

    Args:
        model: the model.
        layout: where it can be cut.
        starts: where its stages begin.
        much: the share of each stage, of those of which something is recomputed.
        randomly: whether random numbers are the same again, as dropout needs.

    Raises:
        PipelineError: if one of them has no block that can be recomputed.
    """
    blocks = blocks_of(model, layout, starts) if much else []
    for stage, share in much.items():
        if not blocks[stage]:
            names = {name for (name, _), holder in layout.stage_of_call(starts).items() if holder == stage}
            raise PipelineError(
                "a stage that is recomputed must have a block that the model repeats, without batch norms",
                got=f"stage {stage} of {', '.join(sorted(names))}",
                fix="leave it out of the schedule's recompute, or use torch.utils.checkpoint in the model",
            )
        whole, some = counted(share, len(blocks[stage]))
        for place, block in enumerate(blocks[stage][: whole + some]):
            if not isinstance(vars(block).get("forward"), RecomputedForward):  # of an earlier stage, too
                block.forward = RecomputedForward(block, block.forward, randomly=randomly, selective=place >= whole)


def counted(share: Share, blocks: int) -> Count:
    """How many of so many blocks a share is: one at least."""
    whole = max(round(share.whole * blocks), 0 if share.selective else min(1, blocks))
    some = max(round(share.selective * blocks), 0 if whole else 1) if share.selective else 0
    return whole, min(some, blocks - whole)


@contextmanager
def recomputing(
    model: nn.Module, layout: Layout, starts: Sequence[int], much: Mapping[int, Share], *, randomly: bool = True
) -> Iterator[None]:
    """A block in which ``recompute_stages`` is in effect."""
    before = [(module, vars(module).get("forward")) for module in model.modules()]
    try:
        recompute_stages(model, layout, starts, much, randomly=randomly)
        yield
    finally:
        for module, forward in before:
            vars(module).pop("forward", None)
            if forward is not None:
                module.forward = forward


def weigh_again(
    model: nn.Module,
    layout: Layout,
    starts: Sequence[int],
    plain: Sequence[StageWeight],
    weighed: Callable[[], list[StageWeight]],
    *,
    wanted: Sequence[Collection[Share]] | None = None,
    known: Levels | None = None,
) -> Levels:
    """What stages take with blocks recomputed; nothing if they cannot run again.

    Args:
        model: the model, without memory.
        layout: where it can be cut.
        starts: where its stages begin.
        plain: what they take if nothing is recomputed.
        weighed: weighs them as they are now.
        wanted: the shares of each stage; by default all of its blocks, whole and selectively.
        known: what was weighed before.
    """
    numbers = [len(blocks) for blocks in blocks_of(model, layout, starts)]
    found = [dict(each) for each in known] if known is not None else [{} for _ in starts]
    rows = []
    for stage, blocks in enumerate(numbers):
        shares = (Share(0.0, 1.0), Share(1.0)) if wanted is None else wanted[stage]
        rows.append(sorted({counted(share, blocks) for share in shares if blocks} - found[stage].keys()))
    for turn in range(max(map(len, rows))):
        chosen = {stage: row[min(turn, len(row) - 1)] for stage, row in enumerate(rows) if row}
        much = {stage: Share(*(each / numbers[stage] for each in count)) for stage, count in chosen.items()}
        try:
            with recomputing(model, layout, starts, much, randomly=False):
                weights = weighed()
        except PipelineError:  # from blocks that cannot run again, since as they are they ran
            return [{} for _ in starts]
        except SavedError:  # from blocks that do not multiply the same each time: they can run again as a whole only
            continue
        for stage, count in chosen.items():
            found[stage][count] = weights[stage]
    # Where all blocks together hold what they held, there is nothing to choose.
    return [each if each and each[max(each)] != own else {} for each, own in zip(found, plain, strict=True)]
