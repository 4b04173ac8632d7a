"""Random valid schedules, and random edits that may break them, for hypothesis."""

from hypothesis import strategies as st

from sternway import schedule
from sternway.errors import ScheduleError
from sternway.schedule import Action, Overlap, Schedule


@st.composite
def named(draw, max_ranks=4, max_microbatches=6) -> Schedule:
    """One of the named schedules."""
    name = draw(st.sampled_from(schedule.names()))
    ranks = draw(st.integers(1, max_ranks))
    microbatches = draw(st.integers(1, max_microbatches))
    try:
        return schedule.make(name, ranks=ranks, microbatches=microbatches)
    except ScheduleError:
        return schedule.make(name, ranks=ranks, microbatches=2 * ranks)


@st.composite
def invented(draw) -> Schedule:
    """Any placement, any order that can run, backwards whole or split or overlapped as it comes."""
    num_stages = draw(st.integers(1, 5))
    ranks = draw(st.integers(1, num_stages))
    m = draw(st.integers(1, 3))
    # Every rank gets one stage, and the rest go anywhere.
    holder = draw(
        st.permutations([*range(ranks), *(draw(st.integers(0, ranks - 1)) for _ in range(num_stages - ranks))])
    )
    split = {(s, i): draw(st.booleans()) for s in range(num_stages) for i in range(m)}
    actions: list[list] = [[] for _ in range(ranks)]
    done: set[tuple[int, str, int]] = set()

    def ready():
        for (s, i), halves in split.items():
            if (s, "F", i) not in done:
                if s == 0 or (s - 1, "F", i) in done:
                    yield Action(s, "F", i)
            elif (s, "G", i) not in done:
                if s == num_stages - 1 or (s + 1, "G", i) in done:
                    yield Action(s, "I" if halves else "B", i)
            elif halves and (s, "W", i) not in done:
                yield Action(s, "W", i)

    while True:
        options = sorted(ready())
        if not options:
            break
        action = draw(st.sampled_from(options))
        partner = [o for o in options if {o.op, action.op} == {"F", "B"} and holder[o.stage] == holder[action.stage]]
        step = action
        if partner and draw(st.booleans()):
            forward, backward = sorted([action, partner[0]], key=lambda a: a.op != "F")
            step = Overlap(forward, backward)
        for part in [step] if isinstance(step, Action) else [step.forward, step.backward]:
            done.add((part.stage, {"F": "F", "W": "W"}.get(part.op, "G"), part.microbatch))
        actions[holder[action.stage]].append(step)
    placement = tuple(tuple(s for s in range(num_stages) if holder[s] == rank) for rank in range(ranks))
    return Schedule("invented", m, placement, tuple(map(tuple, actions)))


@st.composite
def edited(draw, schedules) -> Schedule:
    """A schedule with one step dropped, duplicated, swapped with another, or moved."""
    whole = draw(schedules)
    rows = [list(steps) for steps in whole.actions]
    rank = draw(st.sampled_from([r for r, steps in enumerate(rows) if steps]))
    row = rows[rank]
    at = draw(st.integers(0, len(row) - 1))
    edit = draw(st.sampled_from(["drop", "duplicate", "swap", "move"]))
    if edit == "drop":
        row.pop(at)
    elif edit == "duplicate":
        row.insert(draw(st.integers(0, len(row))), row[at])
    elif edit == "swap":
        other = draw(st.integers(0, len(row) - 1))
        row[at], row[other] = row[other], row[at]
    else:
        target = rows[draw(st.integers(0, len(rows) - 1))]
        step = row.pop(at)
        target.insert(draw(st.integers(0, len(target))), step)
    return Schedule(whole.name, whole.n_microbatches, whole.placement, tuple(map(tuple, rows)))
