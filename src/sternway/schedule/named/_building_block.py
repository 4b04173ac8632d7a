"""Schedules that repeat the pattern of one microbatch: how V-Half and V-Min are laid out.

Time is divided into slots, each as long as one action of one stage. A *building block* gives the slot in which each
rank runs the four actions of one microbatch that other actions wait for. The next microbatch runs the same six slots
later. Those four take four of every six slots, and the two W take the other two. How long a block lives determines how
much memory is kept.

Paper: Qi et al., Pipeline Parallelism with Controllable Memory, arXiv 2405.15362. On rank r, a is stage r and b is
stage 2 p - 1 - r:

    slot     0   1   2   3   4   5   6   7   8   9  10  11  12       V-Min on two ranks
    rank 0  aF0  .   .  bF0 bI0  .  aF1 aI0  .  bF1 bI1  .  aF2      one microbatch, and the next six slots later
    rank 1   .  aF0 bF0  .   .  bI0 aI0 aF1 bF1  .   .  bI1 aI1

The block alone is right in the steady state and leaves gaps at both ends. So there are three passes:

    1. repeat the block, and put each W into the first free slot after its I
    2. move every action to the earliest free slot after what it waits for, if memory allows
    3. once the first rank has run its last F, F and I matter more than W: move those to earlier slots again
       as if there were no W, if memory still allows, and put the W into the slots that stay free
"""

from bisect import insort
from typing import TypeAlias

from sternway.schedule._action import Action, Op
from sternway.schedule._costs import Placement
from sternway.schedule._depends import KIND, needs

_PERIOD = 6
_AF, _BF, _BI, _AI, _W = range(5)  # the lanes of a rank: four actions in the order of the V, and W
_LANES: tuple[tuple[int, Op], ...] = ((0, "F"), (1, "F"), (1, "I"), (0, "I"))  # which of the rank's stages, and the op

BuildingBlock: TypeAlias = tuple[int, int, int, int]
"""The slots of one microbatch on one rank: F of its first stage, F of its second, I of that, I of the first."""

Lanes: TypeAlias = list[list[int]]
"""For each lane, the slot of each microbatch (of each W, in the order of their I)."""

Sources: TypeAlias = list[list[tuple[int, int] | None]]
"""For each rank and lane, the rank and lane of the action that it waits for."""


def repeat(placement: Placement, blocks: list[BuildingBlock], microbatches: int, limit: int) -> list[list[Action]]:
    """Repeat the blocks, one for each rank, with at most ``limit`` stages' activations kept at a time."""
    sources = _sources(placement)
    ranks = [[list(range(slot, slot + _PERIOD * microbatches, _PERIOD)) for slot in block] for block in blocks]
    for lanes in ranks:
        lanes.append(_place_weights(lanes))
    _pull_forward(ranks, sources, limit)
    ranks = _squeeze(ranks, sources)
    _drain(ranks, sources, limit)
    for lanes in ranks:
        lanes[_W] = _place_weights(lanes)
    return [_read(lanes, stages) for lanes, stages in zip(ranks, placement, strict=True)]


def _sources(placement: Placement) -> Sources:
    """Return which action each F and I waits for, by rank and lane."""
    lane_of = {
        3 * stages[local] + KIND[op]: (rank, lane)
        for rank, stages in enumerate(placement)
        for lane, (local, op) in enumerate(_LANES)
    }
    table: Sources = [[None] * _W for _ in placement]
    for step, first in enumerate(needs(2 * len(placement))):
        if step in lane_of and first:
            rank, lane = lane_of[step]
            table[rank][lane] = lane_of[first[0]]
    return table


def _place_weights(lanes: Lanes) -> list[int]:
    """Return a slot for each W: the first free one after its I, in the order of the I's."""
    backwards = sorted(lanes[_BI] + lanes[_AI])
    taken = {slot for lane in lanes[:_W] for slot in lane}
    slots, slot = [], -1
    for backward in backwards:
        slot = max(slot, backward) + 1
        while slot in taken:
            slot += 1
        slots.append(slot)
    return slots


def _after(ranks: list[Lanes], sources: Sources, rank: int, lane: int, microbatch: int) -> int:
    """Return the last slot of what F or I waits for: its input, and the microbatch before it."""
    slot = ranks[rank][lane][microbatch - 1] if microbatch else -1
    source = sources[rank][lane]
    return slot if source is None else max(slot, ranks[source[0]][source[1]][microbatch])


def _in_slot_order(ranks: list[Lanes], lanes: int, after: int = -1) -> list[tuple[int, int, int, int]]:
    """Return (slot, rank, lane, microbatch) of the first ``lanes`` lanes, earliest first."""
    return sorted(
        (slot, rank, lane, i)
        for rank, rows in enumerate(ranks)
        for lane in range(lanes)
        for i, slot in enumerate(rows[lane])
        if slot > after
    )


def _pull_forward(ranks: list[Lanes], sources: Sources, limit: int) -> None:
    """Pass 2: move each action to the earliest free slot after what it waits for, if memory allows."""
    horizon = 2 + max(slot for lanes in ranks for lane in lanes for slot in lane)
    taken = [bytearray(horizon) for _ in ranks]
    for rank, lanes in enumerate(ranks):
        for row in lanes:
            for slot in row:
                taken[rank][slot] = 1
    kept = [_kept(lanes, horizon) for lanes in ranks]
    backwards: list[list[int]] = [[] for _ in ranks]
    for slot, rank, lane, i in _in_slot_order(ranks, lanes=5):
        if lane == _W:
            first = max(backwards[rank][i], ranks[rank][_W][i - 1] if i else -1) + 1
        else:
            first = _after(ranks, sources, rank, lane, i) + 1
        best = _earliest(taken[rank], first, slot, kept[rank] if lane <= _BF else None, limit)
        taken[rank][slot], taken[rank][best] = 0, 1
        ranks[rank][lane][i] = best
        if lane <= _BF:
            for between in range(best, slot):
                kept[rank][between] += 1
        elif lane == _W:
            for between in range(best + 1, slot + 1):
                kept[rank][between] -= 1
        else:
            insort(backwards[rank], best)


def _earliest(taken: bytearray, first: int, slot: int, kept: list[int] | None, limit: int) -> int:
    """Return the earliest free slot from ``first`` on from which memory suffices until ``slot``, or ``slot``."""
    # There is almost never one, and bytearray.find is fast at saying so.
    free = taken.find(0, first, slot)
    if free >= 0 and kept is not None:
        full = next((at for at in range(slot - 1, free - 1, -1) if kept[at] >= limit), free - 1)
        free = taken.find(0, full + 1, slot)
    return free if free >= 0 else slot


def _kept(lanes: Lanes, horizon: int) -> list[int]:
    """Return how many stages' activations a rank keeps in each slot."""
    change = [0] * (horizon + 1)
    for lane in (_AF, _BF):
        for slot in lanes[lane]:
            change[slot] += 1
    for slot in lanes[_W]:
        change[slot + 1] -= 1
    level, levels = 0, []
    for delta in change[:horizon]:
        level += delta
        levels.append(level)
    return levels


def _squeeze(ranks: list[Lanes], sources: Sources) -> list[Lanes]:
    """Return the slots in which the same order runs if no action waits longer than it must."""
    squeezed: list[Lanes] = [[[] for _ in range(5)] for _ in ranks]
    clock = [-1] * len(ranks)
    for _, rank, lane, i in _in_slot_order(ranks, lanes=5):
        if lane != _W:
            clock[rank] = max(clock[rank], _after(squeezed, sources, rank, lane, i))
        clock[rank] += 1
        squeezed[rank][lane].append(clock[rank])
    return squeezed


def _drain(ranks: list[Lanes], sources: Sources, limit: int) -> None:
    """Pass 3: after the first rank's last F, move F and I to earlier slots as if there were no W."""
    start = ranks[0][_AF][-1]
    ends = [1 + max(lane[-1] for lane in lanes[:_W]) for lanes in ranks]
    # What a rank does in each slot: +1 for F, -1 for I, 0 for neither, which has room for a W.
    grids = [[0] * end for end in ends]
    for grid, lanes in zip(grids, ranks, strict=True):
        for lane in range(_W):
            for slot in lanes[lane]:
                grid[slot] = 1 if lane <= _BF else -1
    before = []
    for grid in grids:
        state = _run(grid[:start], 0, 0, limit)
        assert state is not None, "pass 2 keeps to the limit, and W cannot come earlier than here"
        before.append(state)
    for slot, rank, lane, i in _in_slot_order(ranks, lanes=_W, after=start):
        grid = grids[rank]
        kind = grid[slot]
        for earlier in range(max(start, _after(ranks, sources, rank, lane, i)) + 1, slot):
            if grid[earlier]:
                continue
            grid[slot], grid[earlier] = 0, kind
            if _run(grid[start:], *before[rank], limit) is not None:
                ranks[rank][lane][i] = earlier
                break
            grid[slot], grid[earlier] = kind, 0


def _run(grid: list[int], kept: int, waiting: int, limit: int) -> tuple[int, int] | None:
    """Run slots with a W in every free one if any waits; return what is kept and what waits, or None if over."""
    for kind in grid:
        if kind > 0:
            kept += 1
            if kept > limit:
                return None
        elif kind:
            waiting += 1
        elif waiting:
            waiting -= 1
            kept -= 1
    return kept, waiting


def _read(lanes: Lanes, stages: tuple[int, ...]) -> list[Action]:
    """Return one rank's actions in the order of their slots."""
    slots = [
        (slot, Action(stages[local], op, i))
        for lane, (local, op) in zip(lanes, _LANES, strict=False)  # the fifth lane is W
        for i, slot in enumerate(lane)
    ]
    backwards = [action for _, action in sorted(slots) if action.op == "I"]
    slots += zip(lanes[_W], [Action(action.stage, "W", action.microbatch) for action in backwards], strict=True)
    return [action for _, action in sorted(slots)]
