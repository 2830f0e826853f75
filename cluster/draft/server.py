"""The drafter's end: any proposer behind channels, for one verifier or several.

Knows: every sequence the verifiers opened, as far as their messages told it; when to read, when to draft.
Refuses to know: models and devices (the proposer's), when a draft is wanted before it is asked for (the
strategy's), and how channels cross.

    server = DraftServer(proposer, Sync(proposer))
    server.attach(channel)             any number of verifiers, at any time, from any thread
    server.run(stop)                   on the drafter's own thread, until `stop` is set

Whatever the channels lose, double or reorder, a sequence here only grows, by tokens that are true; one of
which tokens are missing is asked for again. A verifier that is lost takes its sequences with it.
"""

from __future__ import annotations

import itertools
import secrets
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

from cluster.draft.proposer import Proposer
from cluster.draft.verbs import LANGUAGE, Answer, Ask, Closed, Missing, Opened, Outcome, Row, Settled
from cluster.errors import ConfigError, PeerLost, WireError
from cluster.messages import Knobs, Offer, SequenceView, Verdict
from cluster.model.runner import Runner
from cluster.parallel.channel import Channel
from cluster.request import RuleName, Sampling

#: How long an idle server sleeps before it looks whether to stop, in seconds. A message wakes it at once.
IDLE_S = 0.2


@dataclass(slots=True, eq=False)
class Course:
    """One sequence of one verifier, as this drafter knows it. `id` is this drafter's own number for it.

    k, room, rule, ...: of the newest row shown; before the first, nothing may be drafted (k = 0).
    """

    id: int
    sequence: int
    tokens: list[int]
    prompt_len: int
    salt: str
    sampling: Sampling
    desk: Desk
    computed_len: int = 0
    rule: RuleName = "coupled"
    method: str | None = None
    k: int = 0
    room: int = 0
    attempt: int = 0
    nodes: int = 0

    @property
    def view(self) -> SequenceView:
        """As a proposer sees it. `tokens` is live."""
        return self.seen(self.id, self.tokens, self.k)

    def seen(self, number: int, tokens: Sequence[int], k: int) -> SequenceView:
        """The same request under another number, with other tokens and k."""
        return SequenceView(
            id=number,
            tokens=tokens,
            prompt_len=self.prompt_len,
            computed_len=self.computed_len,
            sampling=self.sampling,
            rule=self.rule,
            salt=self.salt,
            method=self.method,
            k=k,
            room=self.room,
            attempt=self.attempt,
            nodes=self.nodes,
        )

    def reply(self, offer: Offer | None) -> None:
        """Answer for the tokens known now; None: there is no draft. An offer for fewer tokens is not sent."""
        if offer is None:
            self.desk.nothing.append((self.sequence, len(self.tokens)))
        elif offer.base_len == len(self.tokens):
            self.desk.offers.append(replace(offer, sequence=self.sequence))


@dataclass(slots=True, eq=False)
class Desk:
    """One verifier: its channel, its sequences by its own numbers, and what is to be told it next.

    wait_s: how long it waits for an answer.
    """

    channel: Channel
    courses: dict[int, Course] = field(default_factory=dict)
    offers: list[Offer] = field(default_factory=list)
    nothing: list[tuple[int, int]] = field(default_factory=list)
    missing: set[int] = field(default_factory=set)
    round: int = 0
    wait_s: float = 0.0
    over: int = 0  # sequences below are over


class Strategy(Protocol):
    """When to draft what. Told of everything that arrives; answers through `Course.reply`."""

    def opened(self, course: Course) -> None:
        """A new sequence."""

    def asked(self, course: Course) -> None:
        """A row is wanted now for the tokens known."""

    def settled(self, course: Course, emitted: tuple[int, ...]) -> None:
        """The sequence has grown by these tokens."""

    def closed(self, course: Course) -> None:
        """The sequence is over."""

    def swapped(self) -> None:
        """The proposer drafts with other weights from now on."""

    def work(self, knobs: Knobs) -> bool:
        """Do a little: one round, or one forward pass. False when there is nothing to do."""


@runtime_checkable
class Drawing(Protocol):
    """A proposer that samples, by rounds it counts."""

    def restart_draws(self, first_round: int) -> None:
        """Count from here on."""


@runtime_checkable
class Swappable(Protocol):
    """A proposer whose weights may be replaced."""

    def swap(self, runner: Runner) -> None:
        """Draft with another model of the same shape from now on; keys and values of the old one are forgotten."""


class Sync:
    """Drafts when asked, all rows of all verifiers that wait together."""

    def __init__(self, proposer: Proposer) -> None:
        self._proposer = proposer
        self._asked: dict[int, Course] = {}

    def opened(self, course: Course) -> None: ...

    def asked(self, course: Course) -> None:
        self._asked[course.id] = course

    def settled(self, course: Course, emitted: tuple[int, ...]) -> None: ...

    def closed(self, course: Course) -> None:
        self._asked.pop(course.id, None)

    def swapped(self) -> None: ...

    def work(self, knobs: Knobs) -> bool:
        asked, self._asked = self._asked, {}
        if not asked:
            return False
        offers = self._proposer.propose([course.view for course in asked.values()], knobs)
        made = {offer.sequence: offer for offer in offers}
        for course in asked.values():
            course.reply(made.get(course.id))
        return True


class DraftServer:
    """See the module's docstring. `attach` and `swap` may be called from any thread, the rest from one.

    first_round: of the proposer's draws; random when not given, so that a drafter that takes over from
    another never repeats a draw that a rule has read.
    """

    def __init__(
        self, proposer: Proposer, strategy: Strategy, version: int = 0, first_round: int | None = None
    ) -> None:
        if isinstance(proposer, Drawing):
            proposer.restart_draws(secrets.randbits(60) if first_round is None else first_round)
        self._proposer = proposer
        self._strategy = strategy
        self._version = version
        self._bell = threading.Event()
        self._arriving: deque[Channel] = deque()
        self._swaps: deque[tuple[Runner, int]] = deque()
        self._desks: list[Desk] = []
        self._ids = itertools.count()
        self._budget = Knobs().token_budget

    @property
    def version(self) -> int:
        """Of the weights drafted with."""
        return self._version

    @property
    def verifiers(self) -> int:
        """Verifiers attached and not known to be lost."""
        return len(self._desks) + len(self._arriving)

    @property
    def sequences(self) -> int:
        return sum(len(desk.courses) for desk in self._desks)

    def attach(self, channel: Channel) -> None:
        """One more verifier. The channel is this server's now, and closed by it."""
        self._arriving.append(channel)
        self._bell.set()

    def swap(self, runner: Runner, version: int) -> None:
        """Draft with other weights before anything else is drafted; every later offer says so.

        Raises ConfigError where the proposer has no weights, or the version is not a newer one.
        """
        if not isinstance(self._proposer, Swappable):
            raise ConfigError(f"the proposer {self._proposer.name!r} has no weights to swap")
        if version <= self._version:
            raise ConfigError(f"version {version} is not newer than {self._version}, which is drafting now")
        self._swaps.append((runner, version))
        self._bell.set()

    def run(self, stop: threading.Event) -> None:
        """Serve until `stop` is set, then close every channel."""
        while not stop.is_set():
            self._bell.clear()
            if not self.step():
                self._bell.wait(IDLE_S)
        self.close()

    def step(self) -> bool:
        """Read all that has arrived, draft a little, answer. False when there was nothing to do."""
        self._adopt()
        heard = [self._read(desk) for desk in list(self._desks)]
        self._flush()  # what is known already does not wait for what is still to be drafted
        worked = self._strategy.work(Knobs(token_budget=self._budget))
        self._flush()
        return worked or any(heard)

    def close(self) -> None:
        """Leave every verifier."""
        self._adopt()
        for desk in list(self._desks):
            self._drop(desk)

    # -- hearing -----------------------------------------------------------------------------

    def _adopt(self) -> None:
        while self._swaps:
            runner, self._version = self._swaps.popleft()
            assert isinstance(self._proposer, Swappable)
            self._proposer.swap(runner)
            self._strategy.swapped()
        while self._arriving:
            desk = Desk(self._arriving.popleft())
            desk.channel.listen(self._bell)
            self._desks.append(desk)

    def _read(self, desk: Desk) -> bool:
        heard = False
        try:
            while (data := desk.channel.poll()) is not None:
                self._hear(desk, LANGUAGE.decode(data))
                heard = True
        except (PeerLost, WireError):
            self._drop(desk)
        return heard

    def _hear(self, desk: Desk, message: object) -> None:
        match message:
            case Opened():
                self._open(desk, message)
            case Ask():
                self._take_rows(desk, message)
            case Settled():
                desk.round = max(desk.round, message.round)
                for outcome in message.rows:
                    self._grow(desk, outcome)
            case Closed():
                self._close(desk, message.sequence)
            case _:
                raise WireError(f"a verifier does not say {type(message).__name__}")

    def _open(self, desk: Desk, opened: Opened) -> None:
        if opened.sequence < desk.over:
            return
        course = desk.courses.get(opened.sequence)
        if course is None:
            tokens, local = list(opened.tokens), next(self._ids)
            course = Course(local, opened.sequence, tokens, opened.prompt_len, opened.salt, opened.sampling, desk)
            course.attempt = opened.attempt
            desk.courses[opened.sequence] = course
            self._proposer.open(course.view)
            self._strategy.opened(course)
        else:
            self._grow(desk, Outcome(opened.sequence, 0, opened.tokens, 0))
        desk.missing.discard(opened.sequence)

    def _take_rows(self, desk: Desk, ask: Ask) -> None:
        desk.round = max(desk.round, ask.round)
        desk.wait_s = ask.wait_ms / 1e3
        desk.over = max(desk.over, ask.oldest)
        self._budget = ask.token_budget
        for over in [sequence for sequence in desk.courses if sequence < desk.over]:
            self._close(desk, over)
        for row in ask.rows:
            course = self._grow(desk, row)
            if course is not None and row.start + len(row.tokens) == len(course.tokens):
                course.k, course.room, course.computed_len = row.k, row.room, row.computed_len
                course.rule, course.method, course.nodes = row.rule, row.method, row.nodes
                self._strategy.asked(course)

    def _grow(self, desk: Desk, news: Row | Outcome) -> Course | None:
        """Join tokens to what is known; None where some between are missing, which are asked for."""
        course = desk.courses.get(news.sequence)
        if course is None or news.start > len(course.tokens):
            if news.sequence >= desk.over:
                desk.missing.add(news.sequence)
            return None
        fresh = tuple(news.tokens[len(course.tokens) - news.start :])
        if fresh:
            course.tokens.extend(fresh)
            accepted = min(news.accepted, len(fresh)) if isinstance(news, Outcome) else 0
            self._proposer.settle([Verdict(course.id, accepted, fresh)])
            self._strategy.settled(course, fresh)
        return course

    def _close(self, desk: Desk, sequence: int) -> None:
        desk.missing.discard(sequence)
        course = desk.courses.pop(sequence, None)
        if course is not None:
            self._strategy.closed(course)
            self._proposer.close(course.id)

    # -- answering ---------------------------------------------------------------------------

    def _flush(self) -> None:
        for desk in list(self._desks):
            self._answer(desk)

    def _answer(self, desk: Desk) -> None:
        messages: list[object] = []
        if desk.missing:
            messages.append(Missing(tuple(sorted(desk.missing))))
        if desk.offers or desk.nothing:
            offers = tuple(replace(offer, version=self._version) for offer in desk.offers)
            messages.append(Answer(desk.round, self._version, offers, tuple(desk.nothing)))
        desk.missing, desk.offers, desk.nothing = set(), [], []
        try:
            for message in messages:
                desk.channel.send(LANGUAGE.encode(message))
        except PeerLost:
            self._drop(desk)

    def _drop(self, desk: Desk) -> None:
        if desk in self._desks:
            self._desks.remove(desk)
            for sequence in list(desk.courses):
                self._close(desk, sequence)
            desk.channel.close()
