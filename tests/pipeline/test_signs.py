"""Signs of life on a clock of our own: who is lost after how long, who is not, and who is told."""

from __future__ import annotations

import socket

import pytest
import torch.distributed as dist

from sternway.pipeline.faults import _sockets
from sternway.pipeline.faults._lost import LostRank, Position
from sternway.pipeline.faults._signs import DROPPED, ENDED, SignsOfLife

TIMEOUT = 6.0


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def ranks(clock: Clock) -> list[SignsOfLife]:
    store = dist.HashStore()
    found = [SignsOfLife(store, rank, 3, TIMEOUT, clock) for rank in range(3)]
    for rank, signs in enumerate(found):
        signs.write(Position(4, rank, f"{rank}F2"))
    return found


HERE = Position(4, 0, "0F3")


def test_the_rank_before_misses_one_that_falls_silent(ranks: list[SignsOfLife], clock: Clock) -> None:
    assert ranks[0].look(HERE) is None
    clock.now += TIMEOUT
    assert ranks[0].look(HERE) is None  # not yet
    clock.now += 0.5
    lost = ranks[0].look(HERE)
    what = "no sign of life for 6.5 s: it died, was stopped, or hangs"
    assert lost == LostRank(1, what, Position(4, 1, "1F2"), exact=False)
    assert str(lost.error(0)).startswith(
        "rank 1 was lost; its last sign of life was during step 4 (stage 1, at 1F2); got no sign of life for 6.5 s"
    )


def test_one_that_writes_is_not_missed(ranks: list[SignsOfLife], clock: Clock) -> None:
    for _ in range(5):
        clock.now += TIMEOUT - 0.1
        ranks[1].write(Position(4, 1, "1F2"))  # at the same action for a long time: a slow one
        assert ranks[0].look(HERE) is None


def test_one_that_closed_is_not_missed(ranks: list[SignsOfLife], clock: Clock) -> None:
    ranks[1].write_closed()
    assert ranks[0].look(HERE) is None
    clock.now += 100 * TIMEOUT
    assert ranks[0].look(HERE) is None


def test_one_that_never_wrote_is_missed(clock: Clock) -> None:
    alone = SignsOfLife(dist.HashStore(), 0, 2, TIMEOUT, clock)
    assert alone.look(HERE) is None
    clock.now += TIMEOUT + 1
    assert str(alone.look(HERE).error(0)).startswith("rank 1 was lost; its last sign of life was before the first step")


def test_after_a_lost_connection_all_are_looked_at_and_less_patience_is_needed(
    ranks: list[SignsOfLife], clock: Clock
) -> None:
    ranks[0].suspicious = True
    assert ranks[0].look(HERE) is None
    clock.now += 3.5  # three intervals are enough now
    ranks[1].write(Position(4, 1, "1F3"))
    assert ranks[0].look(HERE).rank == 2


def test_a_lost_connection_though_all_live_is_the_loss_of_this_rank(ranks: list[SignsOfLife], clock: Clock) -> None:
    ranks[0].suspicious = True
    assert ranks[0].look(HERE) is None
    clock.now += 1
    for rank in (1, 2):
        ranks[rank].write(Position(5))
    assert ranks[0].look(HERE) == LostRank(
        0, "its connection to another rank was lost, though all ranks are alive", HERE
    )


def test_what_is_waited_for_says_more_than_the_last_sign(ranks: list[SignsOfLife], clock: Clock) -> None:
    ranks[0].awaited = {1: Position(4, 1, "1I0")}.get
    ranks[0].look(HERE)
    clock.now += TIMEOUT + 1
    lost = ranks[0].look(HERE)
    assert (lost.position, lost.exact) == (Position(4, 1, "1I0"), True)
    assert str(lost.error(0)).startswith("rank 1 was lost during step 4 (stage 1, at 1I0); got no sign")


def test_the_first_report_counts_for_all(ranks: list[SignsOfLife]) -> None:
    assert ranks[1].reported() is None
    first = LostRank(2, "ValueError: no luck", Position(4, 2, "2F0"))
    assert ranks[2].report(first) == first
    assert ranks[0].report(LostRank(1, "something else")) == first
    assert ranks[1].reported() == first
    assert not ranks[0].all_confirmed(first)
    ranks[1].confirm()
    assert ranks[0].all_confirmed(first)


@pytest.mark.parametrize(
    ("position", "words"),
    [
        (Position(), "before the first step"),
        (Position(14), "after step 14"),
        (Position(14, 2, "2F3"), "during step 14 (stage 2, at 2F3)"),
    ],
)
def test_a_position_in_words(position: Position, words: str) -> None:
    assert str(position) == words
    assert str(LostRank(2, "why", position).error(0)).startswith(f"rank 2 was lost {words}; got why. Fix: ")


def test_a_loss_of_nobody_knows_whom() -> None:
    assert str(LostRank(None, "why").error(3)).startswith("a rank was lost, as rank 3 noticed; got why")


def test_a_closed_connection_that_nobody_waits_on_makes_less_patient(ranks: list[SignsOfLife], clock: Clock) -> None:
    ranks[0].alarmed = True
    assert ranks[0].look(HERE) is None
    clock.now += 1
    for rank in (1, 2):
        ranks[rank].write(Position(5))
    assert ranks[0].look(HERE) is None  # all live: not this rank's loss either, as nothing failed
    clock.now += 4.5
    ranks[1].write(Position(6))
    assert ranks[0].look(HERE) is None  # those who wait for rank 2 know better where it was, and come first
    clock.now += 1
    ranks[1].write(Position(6))
    assert ranks[0].look(HERE).rank == 2


def test_whoever_waits_for_the_rank_is_less_patient_still(ranks: list[SignsOfLife], clock: Clock) -> None:
    ranks[0].alarmed, ranks[0].awaited = True, {2: Position(4, 2, "2I0")}.get
    assert ranks[0].look(HERE) is None
    clock.now += 3.5
    assert ranks[0].look(HERE) == LostRank(
        2, "no sign of life for 3.5 s: it died, was stopped, or hangs", Position(4, 2, "2I0")
    )


def test_a_connection_that_a_rank_closed_on_purpose_changes_nothing(ranks: list[SignsOfLife], clock: Clock) -> None:
    ranks[0].alarmed = True
    ranks[2].write_closed()
    assert ranks[0].look(HERE) is None
    clock.now += TIMEOUT
    assert ranks[0].look(HERE) is None
    clock.now += 0.5
    assert ranks[0].look(HERE).rank == 1


def test_a_process_that_ended_without_closing_is_lost_when_it_is_needed(ranks: list[SignsOfLife], clock: Clock) -> None:
    ended = LostRank(2, ENDED, Position(4, 2, "2F2"))
    ranks[2].write(Position(4, 2, "2F2"), end=ENDED)
    ranks[0].alarmed = True
    for _ in range(3):
        ranks[1].write(HERE)
        assert ranks[0].look(HERE) is None  # nothing waits for it: the others may be done as well
        clock.now += 3
    ranks[1].write(HERE)
    assert ranks[0].look(HERE, waits=4.5) is None
    assert ranks[0].look(HERE, waits=5.5) == ended
    ranks[1].suspicious = True  # on the CPU, a lost connection is enough
    assert ranks[1].look(HERE) == ended


def test_a_process_that_dropped_its_pipeline_is_lost_when_another_makes_one_more_call(
    ranks: list[SignsOfLife],
) -> None:
    """Over gloo its connections stay open."""
    for signs in ranks:
        signs.calls.note("step")
    ranks[1].write(Position(4, 1, "1F2"), end=DROPPED)
    assert ranks[0].look(HERE) is None  # in the same call
    ranks[0].calls.note("step")
    assert ranks[0].look(HERE) == LostRank(1, DROPPED, Position(4, 1, "1F2"))


def test_the_other_end_of_a_connection_is_seen_to_close() -> None:
    before = _sockets.opened()
    with socket.create_server(("127.0.0.1", 0)) as server:
        here = socket.create_connection(server.getsockname())
        there = server.accept()[0]
        new = _sockets.connected(_sockets.opened() - before)
        if not new:
            pytest.skip("this system does not list sockets")
        assert len(new) == 2  # not the listening one
        assert not _sockets.any_closed(new)
        there.sendall(b"a message that nobody has read")
        assert not _sockets.any_closed(new)
        there.close()
        mine = frozenset(entry for entry in new if entry[0] == here.fileno())
        assert len(mine) == 1
        assert _sockets.any_closed(mine)
        here.close()
        assert _sockets.any_closed(mine)


def test_the_connections_of_the_store_are_spared() -> None:
    """While a group is made, the process that holds the store may accept a connection: it is not the group's."""
    before = _sockets.opened()
    with socket.create_server(("127.0.0.1", 0)) as store, socket.create_server(("127.0.0.1", 0)) as other:
        pairs = []
        for server in (store, other):
            client = socket.create_connection(server.getsockname())
            pairs.append((client, server.accept()[0]))
        new = _sockets.opened() - before
        if not new:
            pytest.skip("this system does not list sockets")
        _sockets.cut(new, spared_port=store.getsockname()[1])
        (kept, kept_there), (lost, lost_there) = pairs
        kept.sendall(b"alive")
        assert kept_there.recv(5) == b"alive"
        assert lost_there.recv(5) == b""
        for end in (kept, kept_there, lost, lost_there):
            end.close()


def test_unix_sockets_are_nobodys_connections() -> None:
    """A process may have some for other reasons: asyncio, pipes of multiprocessing. All without a name look alike."""
    before = _sockets.opened()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        new = _sockets.opened() - before
        assert len(new) == 2
        assert _sockets.ends(new, 29500) == []
        assert _sockets.leading_to({"", " "}, new) == frozenset()
        _sockets.cut(new, 29500)
        theirs.send(b"x")
        assert ours.recv(1) == b"x"
