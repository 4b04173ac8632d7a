"""Offloading: what a GPU would do, on a CPU with copies that come late, and plans that keep their promises."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import MODELS, gpt
from saved_steps import LARGE, assert_equal, grads_of, moving
from torch import Tensor

from sternway import saved
from sternway.errors import SavedError
from sternway.saved._plan import PACK, USE, Record, furthest_first, plan_in_time
from sternway.saved.stores._copies import Mover, Ticket, Wait
from sternway.saved.stores._host import HostStore
from sternway.saved.stores._pool import Pool


class LateTicket(Ticket):
    """A copy that happens when somebody waits for it, and not before: the worst that a stream may do."""

    def __init__(self, source: Tensor, target: Tensor) -> None:
        self._source = weakref.ref(source)
        self._target: Tensor | None = target

    def run(self) -> None:
        if self._target is not None:
            source = self._source()
            assert source is not None, "what was being copied has been let go of"
            self._target.copy_(source)
            self._target = None

    def done(self) -> bool:
        return self._target is None

    def join(self) -> Wait | None:
        self.run()
        return None

    def let_go(self, tensor: Tensor) -> None:
        if self._target is not None and self._target is not tensor:
            self.run()


class LateMover(Mover):
    """Copies late. A buffer that is taken again is written to only after whatever was asked of it before."""

    pinned = False

    def __init__(self) -> None:
        self.tickets: list[LateTicket] = []
        self.moments = 0

    def out(self, source: Tensor, target: Tensor, after: Ticket | None) -> Ticket:
        if after is not None:
            after.join()
        return self._late(source, target)

    def back(self, source: Tensor, target: Tensor) -> Ticket:
        ticket = self._late(source, target)
        ticket.keep = source  # type: ignore[attr-defined]  # a slice of a buffer, which the pool keeps
        return ticket

    def _late(self, source: Tensor, target: Tensor) -> LateTicket:
        self.tickets.append(LateTicket(source, target))
        return self.tickets[-1]

    def mark(self) -> int:
        self.moments += 1
        return self.moments

    def times(self, marks: Sequence[Any]) -> list[float]:
        return [float(mark - marks[0]) for mark in marks]


class LateStore(HostStore):
    def __init__(self) -> None:
        super().__init__(LARGE, pinned=False)
        self.late = LateMover()

    def mover(self, device: torch.device) -> Mover:
        return self.late

    def rates(self, device: torch.device) -> tuple[float, float]:
        return 3000.0, 3000.0  # bytes per event


@pytest.mark.parametrize("budget", [0, 4000, 0.5, "auto"])
@pytest.mark.parametrize(("prefetch", "window"), [(LARGE, LARGE), (0, 0), (3000, 2000)])
@pytest.mark.parametrize("name", ["gpt", "recurrent", "convnet"])
def test_nothing_is_used_before_its_copy(name: str, budget: Any, prefetch: int, window: int) -> None:
    make, shape = MODELS[name]
    model, x = make(), torch.randn(shape)
    expected = grads_of(model, x)
    policy = moving(budget, prefetch, window, LateStore())
    for _ in range(5):
        assert_equal(grads_of(model, x, policy), expected)
    assert policy.offloader.store.pool.taken_bytes == 0


def test_auto_moves_what_the_link_hides_and_no_more() -> None:
    model, x = gpt(16, 4), torch.randn(2, 5, 16)
    policy = moving("auto", store=LateStore())
    reports = []
    for _ in range(4):
        with policy as report:
            loss = model(x).sum()
        loss.backward()
        reports.append(report)
    total = reports[0].kept_bytes
    assert reports[1].moved_bytes == 0  # two steps are timed
    assert 0 < reports[3].moved_bytes < total
    assert reports[3].peak_bytes < reports[0].peak_bytes
    assert policy.offloader.plan is not None
    assert policy.offloader.plan.predicted_peak < total


def test_another_kind_of_step_is_measured_anew() -> None:
    policy = moving("auto", store=LateStore())
    for length in (5, 5, 5, 50, 50, 50, 50):
        model, x = gpt(16, 2), torch.randn(2, length, 16)
        assert_equal(grads_of(model, x, policy), grads_of(model, x))
    assert policy.offloader.plan is not None


def test_what_is_used_before_it_has_left_is_not_brought_back() -> None:
    store = LateStore()
    x = torch.randn(100, requires_grad=True)
    with moving(store=store):
        y = x.exp().sum()
    y.backward()
    assert len(store.late.tickets) == 1


def test_ahead_by_the_order_of_the_step_before() -> None:
    """Used in the order of packing, which the first step does not expect; the second knows, and asks for the next."""
    store = LateStore()
    policy = moving(prefetch=400, window=0, store=store)
    asked: list[list[int]] = []

    def step() -> None:
        x = torch.randn(100, requires_grad=True)
        with policy:
            parts = [(x * factor).exp() for factor in (1.0, 2.0, 3.0, 4.0)]
        asked.append([])
        for part in parts:
            part.sum().backward()
            asked[-1].append(len(policy.offloader._round.coming))

    for _ in range(2):
        step()
    assert asked == [[0, 0, 0, 0], [1, 1, 1, 0]]  # on their way after each use
    coming = []
    fetch = policy.offloader.fetch

    def spy(content: Any) -> Tensor:
        coming.append(content in policy.offloader._round.coming)
        return fetch(content)

    policy.offloader.fetch = spy  # type: ignore[method-assign]
    step()
    assert coming == [False, True, True, True]  # all but the first were on their way already


# The plan


@st.composite
def _records(draw: Any) -> Record:
    """A step in which some microbatches go forward before the first goes backward."""
    microbatches = draw(st.integers(1, 3))
    depth = draw(st.integers(1, 6))
    sizes = [draw(st.integers(1, 50)) for _ in range(microbatches * depth)]
    ahead = draw(st.integers(1, microbatches))
    events: list[tuple[int, int]] = []
    done = 0
    for microbatch in range(microbatches):
        events += [(PACK, microbatch * depth + layer) for layer in range(depth)]
        if microbatch + 1 >= ahead:
            events += [(USE, done * depth + layer) for layer in reversed(range(depth))]
            done += 1
    for left in range(done, microbatches):
        events += [(USE, left * depth + layer) for layer in reversed(range(depth))]
    return Record(tuple(sizes), tuple(events), tuple(float(i) for i in range(len(events))))


@settings(max_examples=200, deadline=None)
@given(record=_records(), share=st.floats(0, 1))
def test_what_stays_fits_the_budget(record: Record, share: float) -> None:
    budget = int(share * record.total)
    moved = furthest_first(record, budget)
    held = 0
    for kind, number in record.accesses:
        if number not in moved:
            held += record.sizes[number] if kind == PACK else -record.sizes[number]
            assert held <= budget
    if budget >= record.total:
        assert not moved


@settings(max_examples=100, deadline=None)
@given(record=_records(), rate=st.floats(0.1, 1000))
def test_a_plan_in_time_is_in_time(record: Record, rate: float) -> None:
    plan = plan_in_time(record, rate, rate)
    assert plan.predicted_stall <= 0.03 * record.times[-1] + 1e-9
    assert plan.predicted_peak <= record.total
    assert plan.release.keys() == plan.moves == plan.fetch.keys()
    assert all(1 <= tick <= len(record.accesses) + 1 for tick in plan.release.values())


def test_a_fast_link_moves_nearly_all_and_a_slow_one_nothing() -> None:
    depth = 20
    events = tuple([(PACK, n) for n in range(depth)] + [(USE, n) for n in reversed(range(depth))])
    record = Record((10,) * depth, events, tuple(float(i) for i in range(2 * depth)))
    assert plan_in_time(record, 1e9, 1e9).predicted_peak <= 20
    assert plan_in_time(record, 1e-3, 1e-3).moves == frozenset()
    halfway = plan_in_time(record, 5, 5)  # half of what is made can be copied meanwhile
    assert 90 <= halfway.predicted_peak <= 120


# The pool


def test_buffers_are_reused_and_bounded() -> None:
    pool = Pool(2**20, pinned=False)
    first = pool.take(2**19)
    assert first is not None
    assert pool.take(2**20) is None
    pool.give(first)
    again = pool.take(2**19 - 5)
    assert again is first
    pool.give(again)
    assert pool.take(2**20) is not None  # the smaller one makes room
    assert pool.free_bytes == 0


def test_what_does_not_fit_the_pool_stays() -> None:
    model, x = gpt(16, 2), torch.randn(2, 5, 16)
    expected = grads_of(model, x)
    policy = moving(store=HostStore(2**17, pinned=False))
    for _ in range(2):
        with policy as report:
            assert_equal(grads_of(model, x), expected)
    assert report.skipped["no room"] > 0
    assert report.moved_bytes > 0
    assert report.moved_bytes + sum(report.skipped.values()) == report.packed_bytes


def test_the_budget_is_kept() -> None:
    model, x = gpt(32, 4), torch.randn(2, 16, 32)
    policy = moving(budget=20_000, prefetch=0, window=0)
    for _ in range(3):
        with policy as report:
            loss = model(x).sum()
        kept = report.kept_bytes
        loss.backward()
        assert 0 < kept <= 20_000
    largest = 3 * x.nbytes + 4 * x.nbytes
    assert report.peak_bytes <= 20_000 + largest


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": "4 parsecs"}, "budget must be a size; got '4 parsecs'"),
        ({"budget": 1.5}, r"a fraction must be between 0 and 1; got 1\.5"),
        ({"budget": -1}, "budget must be a size; got -1"),
        ({"to": "moon"}, 'to must be "cpu" or "disk"; got .moon.'),
        ({"to": "disk"}, 'to="disk" needs a directory; got none'),
        ({"to": "disk", "directory": "/nowhere/at/all"}, "must be an existing directory; got '/nowhere/at/all'"),
        ({"directory": "."}, 'to="cpu" cannot use a directory'),
        ({"where": [3]}, "where must be a pattern"),
        ({"prefetch": "x"}, "prefetch must be a size"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SavedError, match=message):
        saved.offload(**options)


def test_on_the_cpu_there_is_nothing_to_move_to_the_cpu() -> None:
    model, x = gpt(16, 1), torch.randn(2, 5, 16)
    with pytest.warns(UserWarning, match="moved nothing"), saved.offload(min_bytes=0) as report:
        assert_equal(grads_of(model, x), grads_of(model, x))
    assert report.moved_bytes == 0
    assert report.skipped["already there"] > 0
