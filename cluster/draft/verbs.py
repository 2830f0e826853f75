"""What a verifier and a drafter on its own device say to each other: the proposer's verbs as messages.

Knows: the fields of every message, and that tokens travel once: a row brings only what is new.
Refuses to know: bytes (parallel/wire.py), channels, and who drafts how.

    verifier                        drafter
    Opened   a sequence, whole
    Ask      rows to draft for  ->
                                <-  Answer   offers, or that there is none
    Settled  what was emitted   ->
                                <-  Missing  sequences it knows too little of: open them again
    Closed   a sequence

Any of them may be lost, late, doubled or out of order. Tokens of a sequence never change once known
and sequence numbers are never used again, so whatever arrives is true: a drafter joins it to what it
has, or asks for the whole. An offer that fits no more is told by its sequence, base_len and version.
"""

from __future__ import annotations

from dataclasses import dataclass

from cluster.messages import Offer
from cluster.parallel.wire import Language
from cluster.request import RuleName, Sampling


@dataclass(frozen=True, slots=True)
class Opened:
    """A sequence from its first token on, with all that stays as it is."""

    sequence: int
    prompt_len: int
    salt: str
    sampling: Sampling
    tokens: tuple[int, ...]
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class Row:
    """One view: what is new since the last row of this sequence, and what changes from round to round.

    tokens: ids at positions start, start + 1, ... up to the newest known.
    """

    sequence: int
    start: int
    tokens: tuple[int, ...]
    computed_len: int
    rule: RuleName
    method: str | None
    k: int
    room: int
    nodes: int


@dataclass(frozen=True, slots=True)
class Ask:
    """Draft for these rows. oldest: every sequence with a smaller number is over.

    wait_ms: how long the asker will wait for answers.
    """

    round: int
    oldest: int
    token_budget: int
    wait_ms: float
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one row emitted, at positions start, start + 1, ...; `accepted` of them had been drafted by somebody."""

    sequence: int
    start: int
    tokens: tuple[int, ...]
    accepted: int


@dataclass(frozen=True, slots=True)
class Settled:
    """The verdicts of one step, sent as soon as they are known."""

    round: int
    rows: tuple[Outcome, ...]


@dataclass(frozen=True, slots=True)
class Closed:
    """A sequence is over."""

    sequence: int


@dataclass(frozen=True, slots=True)
class Answer:
    """Offers, and the sequences that get none, each with the number of tokens known of it.

    round: of the newest Ask or Settled of the peer that was read before this was said.
    version: of the draft's weights.
    """

    round: int
    version: int
    offers: tuple[Offer, ...]
    nothing: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Missing:
    """Sequences of which tokens are missing here."""

    sequences: tuple[int, ...]


LANGUAGE = Language((Opened, Ask, Settled, Closed, Answer, Missing))
