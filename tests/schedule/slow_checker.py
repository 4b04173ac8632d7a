"""A second opinion on schedules, written to be obviously right and nothing else: slow, no code shared."""

from collections import Counter

from sternway.schedule import Overlap, Schedule


def actions_of(step):
    return [step.forward, step.backward] if isinstance(step, Overlap) else [step]


def is_valid(schedule: Schedule) -> bool:
    """Whether every action is there once, where its stage is, and all of them can run."""
    ops = {}
    for rank, steps in enumerate(schedule.actions):
        for step in steps:
            for action in actions_of(step):
                if action.stage not in schedule.placement[rank]:
                    return False
                ops.setdefault((action.stage, action.microbatch), []).append(action.op)
    wanted = {(s, i) for s in range(schedule.num_stages) for i in range(schedule.n_microbatches)}
    if set(ops) != wanted or any(sorted(found) not in (["B", "F"], ["F", "I", "W"]) for found in ops.values()):
        return False
    return _runs(schedule)


def _runs(schedule: Schedule) -> bool:
    """Try every rank's next step over and over, until all are done or none can go on."""
    left = [list(steps) for steps in schedule.actions]
    done = set()
    while any(left):
        ready = [steps for steps in left if steps and all(_can_run(schedule, a, done) for a in actions_of(steps[0]))]
        if not ready:
            return False
        for steps in ready:
            done |= {(a.stage, a.op, a.microbatch) for a in actions_of(steps.pop(0))}
    return True


def _can_run(schedule, action, done) -> bool:
    stage, i = action.stage, action.microbatch
    if action.op == "F":
        return stage == 0 or (stage - 1, "F", i) in done
    if action.op == "W":
        return (stage, "I", i) in done
    gradient = {(stage + 1, "I", i), (stage + 1, "B", i)}
    return (stage, "F", i) in done and (stage == schedule.num_stages - 1 or bool(gradient & done))


def peak_memory(schedule: Schedule, memory_after_i: float) -> float:
    """The most any rank keeps, counted action by action."""
    most = 0.0
    for rank, steps in enumerate(schedule.actions):
        kept = Counter()
        share = 1 / len(schedule.placement[rank])
        for step in steps:
            for action in actions_of(step):  # an overlapped pair's F comes first here too
                key = (action.stage, action.microbatch)
                kept[key] = {"F": share, "I": share * memory_after_i, "W": 0.0, "B": 0.0}[action.op]
                most = max(most, sum(kept.values()))
    return most


def makespan(schedule: Schedule, costs) -> float:
    """The last end, by relaxing all start times until they stand still."""
    n = schedule.num_stages
    share = {s: 1 / len(held) for held in schedule.placement for s in held}

    def cost(op, stage):
        each = {
            x: getattr(costs, x)[stage] if isinstance(getattr(costs, x), tuple) else getattr(costs, x) * share[stage]
            for x in "FIW"
        }
        return each["I"] + each["W"] if op == "B" else each[op]

    rank_of = {s: rank for rank, held in enumerate(schedule.placement) for s in held}
    end = {}
    changed = True
    while changed:
        changed = False
        for rank, steps in enumerate(schedule.actions):
            now = 0.0
            for step in steps:
                start = now
                for a in actions_of(step):
                    before = []
                    if a.op == "F" and a.stage:
                        before = [(a.stage - 1, "F")]
                    elif a.op in "IB" and a.stage + 1 < n:
                        before = [(a.stage + 1, "G")]
                    for stage, kind in before:
                        hop = costs.comm if isinstance(costs.comm, float) else costs.comm[rank_of[stage]][rank]
                        comm = 0.0 if rank_of[stage] == rank else hop
                        start = max(start, end.get((stage, kind, a.microbatch), 0.0) + comm)
                now = start + sum(cost(a.op, a.stage) for a in actions_of(step))
                for a in actions_of(step):
                    key = (a.stage, {"F": "F", "I": "G", "B": "G", "W": "W"}[a.op], a.microbatch)
                    if end.get(key) != now:
                        end[key] = now
                        changed = True
    return max(end.values())


def rendezvous(text: str, placement) -> bool:
    """Whether compute_comms text runs if both sides of every transfer block until they meet."""
    rank_of = {s: rank for rank, held in enumerate(placement) for s in held}
    left = [[cell for cell in line.split(",") if cell] for line in text.strip().split("\n")]

    def meets(cell):
        for sent, received, step in (("SEND_F", "RECV_F", 1), ("SEND_B", "RECV_B", -1)):
            if sent in cell:
                stage, i = cell.split(sent)
                return rank_of[int(stage) + step], f"{int(stage) + step}{received}{i}"
        return None

    while any(left):
        moved = False
        for steps in left:
            while steps and "SEND" not in steps[0] and "RECV" not in steps[0]:
                steps.pop(0)
                moved = True
            if steps and "SEND" in steps[0]:
                other, cell = meets(steps[0])
                if left[other] and left[other][0] == cell:
                    steps.pop(0)
                    left[other].pop(0)
                    moved = True
        if not moved:
            return False
    return True
