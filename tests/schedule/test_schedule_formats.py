"""CSV and JSON: what is written, and what is refused, with its place."""

import json

import pytest

from sternway import schedule
from sternway.errors import ScheduleError

COMMS = (
    "0UNSHARD,0F0,0SEND_F0,0RECV_B0,0B0,0REDUCE_GRAD,0RESHARD\n"
    "1RECV_F0,1UNSHARD,1F0,1B0,1SEND_B0,1REDUCE_GRAD,1RESHARD\n"
)


def gpipe():
    return schedule.make("gpipe", ranks=2, microbatches=1)


def test_compute_comms_as_written():
    text = gpipe().to_csv("compute_comms")
    assert sorted(text.replace("\n", ",").split(",")) == sorted(COMMS.replace("\n", ",").split(","))
    assert schedule.from_csv(text, name="gpipe", dialect="compute_comms") == gpipe()
    assert schedule.from_csv(COMMS, name="gpipe") == gpipe()


WAITS = (
    "0UNSHARD,0F0,0SEND_F0,0RECV_B0,0B0,0WAIT_SEND_F0,0REDUCE_GRAD,0WAIT_REDUCE_GRAD,0RESHARD\n"
    "1RECV_F0,1UNSHARD,1F0,1B0,1SEND_B0,1REDUCE_GRAD,1WAIT_REDUCE_GRAD,1RESHARD,1WAIT_SEND_B0\n"
)


def test_waits_of_a_newer_torch_are_written_and_read():
    assert set(gpipe().to_csv("compute_comms", waits=True).replace("\n", ",").split(",")) == set(
        WAITS.replace("\n", ",").split(",")
    )
    assert schedule.from_csv(WAITS, name="gpipe", dialect="compute_comms") == gpipe()
    for name in schedule.names():
        s = schedule.make(name, ranks=4, microbatches=8)
        text = s.to_csv("compute_comms", waits=True)
        assert schedule.from_csv(text, name=name) == s
        assert text.count("SEND_F") == 2 * text.count("WAIT_SEND_F") > 0
        assert text.count("SEND_B") == 2 * text.count("WAIT_SEND_B") > 0


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("0WAIT_SEND_F0,", "", r"send and reduction must have a wait, if one has; got 0SEND_F0 \(rank 0, step 2\)"),
        ("1WAIT_REDUCE_GRAD,", "", r"if one has; got 1REDUCE_GRAD \(rank 1, step 5\) without 1WAIT_REDUCE_GRAD"),
        ("0F0,0SEND_F0", "0WAIT_SEND_F0,0F0,0SEND_F0", r"a wait must come once, after .* got 0WAIT_SEND_F0 \(rank 0"),
        ("1WAIT_SEND_B0", "1WAIT_SEND_B0,1WAIT_SEND_B0", r"a wait must come once, .* got 1WAIT_SEND_B0 \(rank 1"),
        ("1WAIT_SEND_B0", "1WAIT_SEND_F0", r"a wait must come once, .* got 1WAIT_SEND_F0 \(rank 1"),
        ("0WAIT_REDUCE_GRAD", "0REDUCE_GRAD", r"one reduction of a rank must end before the next begins; got 0REDUCE"),
        ("0WAIT_SEND_F0", "0WAIT_SEND_F", r"an action must be written as .* got '0WAIT_SEND_F' at line 1"),
        ("0WAIT_REDUCE_GRAD", "0WAIT_REDUCE_GRAD0", r"got '0WAIT_REDUCE_GRAD0' at line 1"),
    ],
)
def test_waits_that_do_not_fit_are_refused(old, new, message):
    with pytest.raises(ScheduleError, match=message):
        schedule.from_csv(WAITS.replace(old, new))


def test_gaps_spaces_and_line_ends_carry_nothing():
    assert schedule.from_csv("0F0,,0B0,\r\n,1F0 , 1B0\r\n", name="gpipe") == gpipe()


def test_reading_is_not_checking():
    broken = schedule.from_csv("0F0,0F0,0B0\n1F0,1B0\n")
    with pytest.raises(ScheduleError, match="an action must run once"):
        broken.check()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,1FOO", r"stage, op, microbatch; got '1FOO' at line 1, column 5"),
        ("0F0,0B0\n1F0, 2F0junk", r"got '2F0junk' at line 2, column 6"),
        ("0F0,,0BW0", r"a whole backward must be written as B; got '0BW0' at line 1, column 6, of an older torch"),
        ("(0F0;1B1)OVERLAP", r"written as \(F;B\)OVERLAP_F_B; got '\(0F0;1B1\)OVERLAP' at line 1, column 1"),
        ("(0F0;1I1)OVERLAP_F_B", r"one F and one B, in that order; got .* at line 1, column 1"),
        ("0F0;0B0", r"got '0F0;0B0' at line 1, column 1"),
        ('"0F0",0B0', r"got '\"0F0\"' at line 1, column 1"),
        ("0SEND_F", r"got '0SEND_F' at line 1, column 1"),
        ("0UNSHARD0", r"got '0UNSHARD0' at line 1, column 1"),
        (
            "0F0,0B0\n0F1",
            r"a stage must be run by one rank; got 0F1 at line 2, column 1, whose stage is run by line 1",
        ),
        ("0F0,0B0\n\n1F0,1B0", r"every line must have the actions of one rank; got none at line 2"),
        ("", r"every line must have the actions of one rank; got none at line 1"),
        ("0F0,0B0\n2F0,2B0", r"numbered from 0 without gaps; got actions of stage 2 but none of stage 1"),
    ],
)
def test_what_is_not_the_format_is_refused_with_its_place(text, message):
    with pytest.raises(ScheduleError, match=message):
        schedule.from_csv(text)


def test_a_dialect_can_be_insisted_on():
    with pytest.raises(ScheduleError, match=r"compute_only must have .*; got '0UNSHARD' at line 1, column 1"):
        schedule.from_csv(COMMS, dialect="compute_only")
    with pytest.raises(ScheduleError, match=r"sent after its action; got 0F0 .* without 0SEND_F0 after it"):
        schedule.from_csv(gpipe().to_csv(), dialect="compute_comms")
    for call in (gpipe().to_csv, lambda d: schedule.from_csv(COMMS, dialect=d)):
        with pytest.raises(ScheduleError, match=r"dialect must be one of compute_only, compute_comms; got 'json'"):
            call("json")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("0SEND_F0,", "", r"another rank needs must be sent after its action; got 0F0 \(rank 0, step 1\)"),
        ("0F0,0SEND_F0", "0SEND_F0,0F0", r"got 0F0 \(rank 0, step 2\) without 0SEND_F0 after it"),
        (
            "1RECV_F0,",
            "",
            r"what an action needs must be received before it; got 1F0 \(rank 1, step 1\) without 1RECV_F0",
        ),
        ("1F0,1B0", "1F0,1RECV_F0,1B0", r"a transfer must run once; got 1RECV_F0 \(rank 1, step 3\) again"),
        (
            "0UNSHARD",
            "0RECV_F0",
            r"a transfer must have two sides; got 0RECV_F0 \(rank 0, step 0\) without -1SEND_F0",
        ),
        ("1F0,", "1F0,1SEND_F0,", r"a transfer must have two sides; got 1SEND_F0"),
        ("1F0,", "1F0,0SEND_F1,", r"on the rank of its stage; got 0SEND_F1 \(rank 1, step 3\)"),
        (
            "0F0,0SEND_F0,0RECV_B0",
            "0RECV_B0,0F0,0SEND_F0",
            r"cannot wait for a send that comes after it; got 0RECV_B0 \(rank 0, step 1\), which",
        ),
    ],
)
def test_transfers_are_checked_when_read(old, new, message):
    assert old in COMMS
    with pytest.raises(ScheduleError, match=message):
        schedule.from_csv(COMMS.replace(old, new))


def test_a_transfer_that_carries_nothing():
    with pytest.raises(ScheduleError, match=r"that needs it; got 0SEND_F1 \(rank 0, step 3\), which does not"):
        schedule.from_csv(COMMS.replace("0SEND_F0", "0SEND_F0,0SEND_F1").replace("1RECV_F0", "1RECV_F0,1RECV_F1"))


def test_transfers_are_written_only_of_what_can_run():
    broken = schedule.from_csv("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n")
    with pytest.raises(ScheduleError, match="a deadlock"):
        broken.to_csv("compute_comms")


def change(**fields):
    return json.dumps({**json.loads(gpipe().to_json()), **fields})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "must be JSON; got Expecting property name enclosed in double quotes at line 1, column 2"),
        ("[]", "the format sternway.schedule/1; got 'list'"),
        (change(format="other"), "the format sternway.schedule/1; got 'other'"),
        (change(extra=1), "must have the fields format, name, .*; got format, .*extra"),
        (change(name=3), "name must be a string and n_microbatches an int; got 3 and 1"),
        (change(n_microbatches=True), "n_microbatches an int; got 'gpipe' and True"),
        (
            change(placement=[0, 1]),
            "placement must be a list of lists of int, one for each rank; got a list of something else",
        ),
        (change(actions={}), "actions must be a list of lists of str, one for each rank; got dict"),
        (change(actions=[["0F0"], ["1F0", "1FOO"]]), "got '1FOO' at rank 1, step 1"),
        (change(placement=[[0], [0]]), "every stage exactly once"),
    ],
)
def test_json_that_is_not_a_schedule(text, message):
    with pytest.raises(ScheduleError, match=message):
        schedule.from_json(text)
