"""What processes decide together: an error keeps its kind on its way."""

from __future__ import annotations

import pickle

import pytest
import torch

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


def test_facts_as_numbers() -> None:
    facts = StepFacts(True, True, 2**32 - 1, 1, 2**32 - 1, 10**9, 2**63 - 1)
    assert StepFacts.from_numbers(torch.tensor(facts.to_numbers(), dtype=torch.int64).tolist()) == facts


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (StepFacts(training=False, options=1), "all ranks must call step, or all evaluate; got evaluate here, step on"),
        (StepFacts(training=True, options=2), "the same loss_everywhere, record and nonfinite"),
        (StepFacts(training=True, options=1, tunes=True), "stop_tuning after the same step, or none; got no call here"),
        (StepFacts(training=True, options=1, trial=3), "or none; got a call here, no call on the first rank"),
    ],
)
def test_a_rank_that_was_called_otherwise(other: StepFacts, message: str) -> None:
    with pytest.raises(PipelineError, match=message):
        StepFacts(training=True, options=1).check(other)
