"""torch.distributed.pipelining reads what we write, and we read what it writes.

Where torch has the same schedule, ours is the same list of actions. Its faults are shown, not worked around.
"""

import inspect
from types import SimpleNamespace

import pytest
from torch.distributed.pipelining import schedules as theirs

from sternway import schedule
from sternway.errors import ScheduleError

SHARED = {
    "interleaved-1f1b": (theirs.ScheduleInterleaved1F1B, "loop"),
    "looped-bfs": (theirs.ScheduleLoopedBFS, "loop"),
    "interleaved-zb": (theirs.ScheduleInterleavedZeroBubble, "loop"),
    "zb-v": (theirs.ScheduleZBVZeroBubble, "v"),
    "dualpipe-v": (theirs.ScheduleDualPipeV, "v"),
}
SIZES = [(1, 1), (1, 4), (2, 4), (2, 5), (3, 3), (3, 6), (4, 2), (4, 8), (4, 13), (5, 10)]


WAITS = hasattr(theirs, "WAIT_SEND_F")  # torch 2.15 and later


def stages(ranks, per_rank, style="loop"):
    """What torch's schedules ask of rank 0's stages before they run."""
    count = ranks * per_rank
    mine = (0, count - 1) if style == "v" else range(0, count, ranks)
    return [
        SimpleNamespace(
            stage_index=index,
            num_stages=count,
            group_size=ranks,
            group_rank=0,
            is_first=index == 0,
            is_last=index == count - 1,
            has_backward=False,
            submod=None,
        )
        for index in mine
    ]


def loss(output, target):
    return 0


def text_of(order):
    return "\n".join(",".join("" if a is None else str(a) for a in order[rank]) for rank in sorted(order)) + "\n"


def made_by_torch(name, ranks, microbatches, per_rank, **options):
    kind, style = SHARED[name]
    return kind(stages(ranks, per_rank, style), microbatches, loss_fn=loss, **options)


def cases():
    for name in SHARED:
        for ranks, microbatches in SIZES:
            for per_rank in (2,) if SHARED[name][1] == "v" else (1, 2, 3):
                rounds = max(1, microbatches // ranks)
                if name.startswith("interleaved") and microbatches % rounds:
                    continue  # torch refuses these
                if name == "dualpipe-v" and microbatches < 2 * ranks:
                    continue
                yield name, ranks, microbatches, per_rank


@pytest.mark.parametrize(("name", "ranks", "microbatches", "per_rank"), list(cases()))
def test_we_read_what_torch_writes_and_make_the_same(name, ranks, microbatches, per_rank):
    order = made_by_torch(name, ranks, microbatches, per_rank)
    mine = schedule.make(name, ranks=ranks, microbatches=microbatches, stages_per_rank=per_rank)
    assert schedule.from_csv(text_of(order.pipeline_order), name=name, dialect="compute_only") == mine
    assert schedule.from_csv(text_of(order.pipeline_order_with_comms), name=name) == mine


@pytest.mark.parametrize(("name", "ranks", "microbatches", "per_rank"), list(cases()))
def test_we_read_receives_that_torch_defers(name, ranks, microbatches, per_rank):
    if "defer_pp_recv" not in inspect.signature(SHARED[name][0]).parameters:
        pytest.skip("this torch does not defer receives")
    order = made_by_torch(name, ranks, microbatches, per_rank, defer_pp_recv=True)
    schedule.from_csv(text_of(order.pipeline_order_with_comms), name=name).check()


@pytest.mark.parametrize("name", schedule.names())
@pytest.mark.parametrize("dialect", ["compute_only", "compute_comms"])
def test_torch_reads_what_we_write(name, dialect, tmp_path):
    # All of ours, not only those that torch also has: its runtime takes any.
    for ranks, microbatches in ((1, 2), (2, 4), (3, 7), (4, 8)):
        s = schedule.make(name, ranks=ranks, microbatches=microbatches)
        style = "v" if s.placement[0][-1] == s.num_stages - 1 else "loop"
        path = tmp_path / "schedule.csv"
        path.write_text(s.to_csv(dialect, waits=WAITS))
        runtime = theirs._PipelineScheduleRuntime(stages(ranks, s.stages_per_rank, style), microbatches, loss_fn=loss)
        runtime._load_csv(str(path), format=dialect)
        assert runtime.stage_index_to_group_rank == dict(enumerate(s.stage_ranks()))
        read = text_of(runtime.pipeline_order_with_comms)
        assert schedule.from_csv(read, name=name) == s
        upkeep = [theirs.UNSHARD, theirs.RESHARD, theirs.REDUCE_GRAD]
        upkeep += [theirs.WAIT_REDUCE_GRAD] if WAITS else []
        plain = {
            rank: [a for a in actions if a.computation_type not in upkeep and a.sub_actions is None]
            for rank, actions in runtime.pipeline_order_with_comms.items()
        }
        if name != "dualpipe-v":  # torch's simulator knows no overlapped pairs, nor upkeep
            theirs._simulate_comms_compute(plain, lambda stage, s=s: s.rank_of(stage), s.num_stages)


def test_gpipe_is_torchs():
    for ranks, microbatches in SIZES:
        order = theirs.ScheduleGPipe(stages(ranks, 1)[0], microbatches, loss_fn=loss)._get_pipeline_order()
        mine = schedule.make("gpipe", ranks=ranks, microbatches=microbatches)
        assert schedule.from_csv(text_of(order), name="gpipe") == mine


def test_torchs_1f1b_order_starts_its_last_rank_at_microbatch_1():
    """A fault of torch: `_get_pipeline_order` counts on from 0 where nothing was run, and so leaves 0 out."""
    order = theirs.Schedule1F1B(stages(4, 1)[0], 8, loss_fn=loss)._get_pipeline_order()
    last = [str(a) for a in order[3] if a is not None]
    assert last[:3] == ["3F1", "3B0", "3F2"]
    with pytest.raises(ScheduleError, match=r"F before I or B .* got 3B0 \(rank 3, step 1\) with 3F0 nowhere"):
        schedule.from_csv(text_of(order)).check()
    # The other ranks are as ours.
    mine = schedule.make("1f1b", ranks=4, microbatches=8)
    for rank in range(3):
        assert [str(a) for a in order[rank] if a is not None and a.is_compute_op] == list(map(str, mine.actions[rank]))


def test_torch_accepts_what_we_reject():
    """Faults of torch: a duplicated F passes its validation, and text that is no action passes its reader."""
    twice = {0: [theirs._Action(0, theirs.F, 0), theirs._Action(0, theirs.F, 0), theirs._Action(0, theirs.B, 0)]}
    theirs._validate_schedule(twice, 1, 1, 1)
    with pytest.raises(ScheduleError, match=r"an action must run once; got 0F0 again \(rank 0, step 1\)"):
        schedule.from_csv(text_of(twice)).check()
    for text in ("1FOO", "2F0junk", "0BW0"):
        assert theirs._Action.from_str(text) is not None
        with pytest.raises(ScheduleError, match="line 1, column 1"):
            schedule.from_csv(text)


def test_torchs_simulator_fails_on_its_own_zb_v():
    """A fault of torch: its simulator does not know the steps that its own lowering adds."""
    with pytest.raises(ValueError, match="Unsupported action type"):
        made_by_torch("zb-v", 2, 4, 2)._simulate()
    assert schedule.make("zb-v", ranks=2, microbatches=4).simulate().bubble_rate == 0
