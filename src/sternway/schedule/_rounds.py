"""The order in which interleaved schedules go through a rank's stages: in rounds of microbatches.

A round is a handful of neighbouring microbatches, at least as many as there are ranks where there are
that many. A rank runs the round through its first stage, then through its second, and so on; then comes
the next round. Backward goes through the stages in reverse.

    2 ranks, 2 stages each, 4 microbatches, rounds of 2; rank 0 holds stages 0 and 2:
    forward   0F0 0F1 2F0 2F1 | 0F2 0F3 2F2 2F3
    backward  2B0 2B1 0B0 0B1 | 2B2 2B3 0B2 0B3
"""

from collections.abc import Sequence


def rounds(ranks: int, microbatches: int) -> list[range]:
    """Deal microbatches out to as many rounds of at least ``ranks`` as there can be, the longer ones first.

    Example:
        >>> rounds(ranks=2, microbatches=5)
        [range(0, 3), range(3, 5)]
    """
    count = max(1, microbatches // ranks)
    size, longer = divmod(microbatches, count)
    result, start = [], 0
    for index in range(count):
        stop = start + size + (index < longer)
        result.append(range(start, stop))
        start = stop
    return result


def in_rounds(stages: Sequence[int], groups: Sequence[range]) -> list[tuple[int, int]]:
    """Return (stage, microbatch) in the order of the module's head, for stages in the order given."""
    return [(stage, i) for group in groups for stage in stages for i in group]
