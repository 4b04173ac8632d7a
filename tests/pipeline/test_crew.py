"""What processes decide together: an error keeps its kind on its way."""

from __future__ import annotations

import pickle

import pytest

from gloo import on_ranks
from sternway.errors import CheckpointError, LostRankError, PipelineError, ScheduleError, SternwayError
from sternway.pipeline import DistTransport
from sternway.pipeline.transport._crew import Crew, Outcome
from sternway.pipeline.transport._facts import StepFacts


def failing(error: Exception) -> object:
    raise error


@pytest.mark.parametrize("kind", [PipelineError, LostRankError, CheckpointError, ScheduleError])
def test_our_own_errors_keep_their_class(kind: type[SternwayError]) -> None:
    outcome = Outcome(lambda: failing(kind("a rule", got="this", fix="do that")), CheckpointError)
    with pytest.raises(kind, match=r"^a rule; got this here\. Fix: do that$") as raised:
        pickle.loads(pickle.dumps(outcome)).result(" here")
    assert type(raised.value) is kind


@pytest.mark.parametrize("kind", [PipelineError, CheckpointError])
def test_others_become_what_the_crew_says(kind: type[SternwayError]) -> None:
    with pytest.raises(kind, match="got OSError: no space") as raised:
        Crew().wrapping(kind).agree(lambda: failing(OSError("no space")))
    assert type(raised.value) is kind


def test_a_value() -> None:
    assert pickle.loads(pickle.dumps(Outcome(lambda: 3))).result() == 3
    assert Outcome.of("x").result() == "x"


def _one_fails(rank: int) -> None:
    crew = DistTransport().crew()
    with pytest.raises(ScheduleError, match=r"got that \(on process 1\)"):
        crew.agree(lambda: failing(ScheduleError("a rule", got="that")) if rank == 1 else rank)
    with pytest.raises(LostRankError, match="rank 2 was lost"):
        crew.from_first(lambda: failing(LostRankError("rank 2 was lost")))
    assert crew.agree(lambda: rank) == [0, 1]


def test_two_processes_raise_the_same() -> None:
    on_ranks(2, _one_fails)


@pytest.mark.parametrize("square", [None, 0.0, 2.5, float("inf"), float("nan")])
def test_facts_as_numbers(square: float | None) -> None:
    facts = StepFacts(2**32 - 1, 2**31, True, square)
    found = StepFacts.from_numbers([float(number) for number in facts.to_numbers()])
    assert (found.schedule, found.shapes, found.training) == (2**32 - 1, 2**31, True)
    assert repr(found.square) == repr(square)
