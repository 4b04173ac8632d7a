"""Messages between stages: which there are, who sends them, and who waits for them.

The program of a rank (``step/_run.py``) yields a ``Receive`` for each message that it needs and a ``Send`` for each
that it made. It holds no transport; a transport drives it and answers each ``Receive`` with a payload.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import NamedTuple

from sternway.pipeline.transport._payload import Payload
from sternway.schedule import Action

MAIN = "main"
"""The channel from each stage to the next. Skips have channels of their own, by their names."""


class MessageKey(NamedTuple):
    """Identifies one message of a step: what stage ``source`` sends to stage ``target`` for one microbatch.

    An activation goes to a later stage, a gradient to an earlier one.
    """

    channel: str
    source: int
    target: int
    microbatch: int

    @property
    def is_gradient(self) -> bool:
        return self.target < self.source

    @property
    def back(self) -> MessageKey:
        """The message in the other direction: an activation's gradient, a gradient's activation."""
        return MessageKey(self.channel, self.target, self.source, self.microbatch)


@dataclass(frozen=True, slots=True)
class Receive:
    key: MessageKey


@dataclass(frozen=True, slots=True)
class Send:
    key: MessageKey
    payload: Payload


RankProgram = Generator[Receive | Send, Payload, None]


@dataclass(frozen=True, slots=True)
class Routes:
    """Which channels lead from which stage to which: the main one, and the skips."""

    num_stages: int
    skips: dict[str, tuple[int, int]]

    def into(self, stage: int) -> dict[str, int]:
        """The channels that end at ``stage``, with the stages they come from."""
        main = {MAIN: stage - 1} if stage else {}
        return main | {name: source for name, (source, target) in self.skips.items() if target == stage}

    def out_of(self, stage: int) -> dict[str, int]:
        """The channels that start at ``stage``, with the stages they lead to."""
        main = {MAIN: stage + 1} if stage + 1 < self.num_stages else {}
        return main | {name: target for name, (source, target) in self.skips.items() if source == stage}

    def tag(self, key: MessageKey) -> int:
        """A number that no other activation of a step has, and no other gradient."""
        channels = [MAIN, *sorted(self.skips)]
        return (key.microbatch * len(channels) + channels.index(key.channel)) * self.num_stages + key.source

    def received(self, action: Action) -> list[MessageKey]:
        """The messages that an action waits for."""
        if action.op == "W":
            return []
        others = self.into(action.stage) if action.op == "F" else self.out_of(action.stage)
        return [MessageKey(name, other, action.stage, action.microbatch) for name, other in others.items()]

    def sent(self, action: Action) -> list[MessageKey]:
        """The messages that an action sends."""
        if action.op == "W":
            return []
        others = self.out_of(action.stage) if action.op == "F" else self.into(action.stage)
        return [MessageKey(name, action.stage, other, action.microbatch) for name, other in others.items()]
