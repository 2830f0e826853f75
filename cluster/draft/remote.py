"""A proposer whose drafting is done elsewhere: the verifier's end of one or several channels.

Knows: which drafter has which sequence and how much of it, what has been offered in time, and how long to wait.
Refuses to know: who drafts at the other end and how (server.py), and how channels cross.

    remote = RemoteProposer("model", wait_s=0.05)
    remote.attach(channel)             any number of them, at any time, from any thread

Every sequence has one drafter, the least busy when it came; when a drafter is lost its sequences go to
the others, and with none left nothing is offered until one is attached. A row waits at most `wait_s`,
for its own answer; a row without one is left to the next proposer in line, or decodes plainly. An offer
counts when it continues the tokens known now; one that comes too late, or from weights that were
replaced since, is dropped. So a drafter that lies, lags or dies costs speed and nothing else (law 7).
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from cluster.draft.verbs import LANGUAGE, Answer, Ask, Closed, Missing, Opened, Outcome, Row, Settled
from cluster.errors import PeerLost, WireError
from cluster.messages import DraftLaw, Knobs, Offer, SequenceView, Verdict
from cluster.parallel.channel import Channel


@dataclass(frozen=True, slots=True)
class RemoteStats:
    """What became of rows shown and of offers received since the start.

    hits: rows that got an offer in time; nothing: rows whose drafter said it had none; missed: rows
    without an answer in time, those that had no drafter among them.
    late: offers for tokens already known otherwise; stale: from replaced weights; doubled: received twice.
    waited_s: time spent waiting for answers, all rows of a round together.
    lost, attached: drafters.
    """

    hits: int = 0
    nothing: int = 0
    missed: int = 0
    late: int = 0
    stale: int = 0
    doubled: int = 0
    rounds: int = 0
    waited_s: float = 0.0
    lost: int = 0
    attached: int = 0

    @property
    def hit_rate(self) -> float:
        """Of the rows shown."""
        return self.hits / max(1, self.hits + self.nothing + self.missed)


@dataclass(slots=True, eq=False)
class _Link:
    """One drafter. known: tokens it was sent, by sequence; version: the newest of its weights seen."""

    number: int
    channel: Channel
    known: dict[int, int] = field(default_factory=dict)
    version: int = 0
    alive: bool = True


@dataclass(slots=True)
class _Mine:
    """A live sequence: who drafts for it, how many tokens are known, and the newest answer for them.

    base: tokens known when the answer was made; -1: none yet.
    """

    length: int
    link: _Link | None = None
    base: int = -1
    offer: Offer | None = None


class RemoteProposer:
    """See the module's docstring. All verbs are called from one thread; `attach` from any."""

    samples = True

    def __init__(self, name: str, wait_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.name = name
        self.wait_s = wait_s
        self._clock = clock
        self._bell = threading.Event()
        self._arriving: deque[Channel] = deque()
        self._links: list[_Link] = []
        self._numbers = itertools.count()
        self._mine: dict[int, _Mine] = {}
        self._round = 0
        self._counts: Counter[str] = Counter()
        self._waited_s = 0.0

    @property
    def stats(self) -> RemoteStats:
        return RemoteStats(**self._counts, waited_s=self._waited_s)

    @property
    def drafters(self) -> int:
        """Drafters attached and not known to be lost."""
        return len(self._links) + len(self._arriving)

    def attach(self, channel: Channel) -> None:
        """One more drafter, from the next round on. The channel is this proposer's now, and closed by it."""
        self._arriving.append(channel)

    def detach(self) -> None:
        """Let every drafter go."""
        self._adopt()
        for link in list(self._links):
            self._lose(link)

    def open(self, view: SequenceView) -> None:
        self._adopt()
        mine = self._mine[view.id] = _Mine(len(view.tokens))
        if view.k > 0 and view.method in (None, self.name):
            self._tell_whole(view, mine)

    def propose(self, views: Sequence[SequenceView], knobs: Knobs) -> list[Offer]:
        self._round += 1
        self._adopt()
        self._drain()
        waiting = self._ask(views, knobs)
        self._wait(waiting)
        return self._collect(views)

    def settle(self, verdicts: Sequence[Verdict]) -> None:
        """Tell the drafters at once, so that they draft on while the next step is prepared."""
        outcomes: dict[int, list[Outcome]] = {}
        for verdict in verdicts:
            mine = self._mine.get(verdict.sequence)
            if mine is None:
                continue
            start, mine.length = mine.length, mine.length + len(verdict.tokens)
            link = mine.link
            if link is not None and link.known.get(verdict.sequence) == start:
                link.known[verdict.sequence] = mine.length
                outcome = Outcome(verdict.sequence, start, verdict.tokens, verdict.accepted)
                outcomes.setdefault(link.number, []).append(outcome)
        for link in list(self._links):
            if link.number in outcomes:
                self._send(link, Settled(self._round, tuple(outcomes[link.number])))

    def close(self, sequence: int) -> None:
        mine = self._mine.pop(sequence, None)
        if mine is not None and mine.link is not None:
            self._tell_over(mine.link, sequence)

    # -- asking ------------------------------------------------------------------------------

    def _ask(self, views: Sequence[SequenceView], knobs: Knobs) -> set[int]:
        """Show each drafter its rows; returns the sequences whose answer is still to come."""
        rows: dict[int, list[Row]] = {}
        waiting: set[int] = set()
        for view in views:
            mine = self._mine[view.id]
            mine.length = len(view.tokens)
            link = self._tell_whole(view, mine)
            if link is None:
                continue
            known = link.known[view.id]
            fresh = tuple(view.tokens[known:])
            row = Row(view.id, known, fresh, view.computed_len, view.rule, view.method, view.k, view.room, view.nodes)
            rows.setdefault(link.number, []).append(row)
            link.known[view.id] = mine.length
            if mine.base != mine.length:
                waiting.add(view.id)
        oldest = min(self._mine, default=0)
        for link in list(self._links):
            if link.number in rows:
                asked = tuple(rows[link.number])
                self._send(link, Ask(self._round, oldest, knobs.token_budget, self.wait_s * 1e3, asked))
        return waiting

    def _tell_whole(self, view: SequenceView, mine: _Mine) -> _Link | None:
        """The drafter of a sequence, after it was sent the whole of it if it lacks any; None where there is none."""
        if mine.link is None or not mine.link.alive:
            mine.link = min(self._links, key=lambda link: (len(link.known), link.number), default=None)
        link = mine.link
        if link is not None and view.id not in link.known:
            link.known[view.id] = len(view.tokens)
            whole = Opened(view.id, view.prompt_len, view.salt, view.sampling, tuple(view.tokens), view.attempt)
            self._send(link, whole)
        return link if link is not None and link.alive else None

    def _tell_over(self, link: _Link, sequence: int) -> None:
        link.known.pop(sequence, None)
        self._send(link, Closed(sequence))

    # -- listening ---------------------------------------------------------------------------

    def _wait(self, waiting: set[int]) -> None:
        """Until every one of these rows has its answer, or no drafter it could come from, or `wait_s` is over."""
        began = self._clock()
        while True:
            self._bell.clear()
            self._drain()
            left = began + self.wait_s - self._clock()
            if left <= 0 or not any(self._open_question(sequence) for sequence in waiting):
                break
            self._bell.wait(left)
        self._counts["rounds"] += 1
        self._waited_s += self._clock() - began

    def _open_question(self, sequence: int) -> bool:
        mine = self._mine[sequence]
        return mine.base != mine.length and mine.link is not None and mine.link.alive

    def _drain(self) -> None:
        for link in list(self._links):
            try:
                while (data := link.channel.poll()) is not None:
                    self._hear(link, LANGUAGE.decode(data))
            except (PeerLost, WireError):
                self._lose(link)

    def _hear(self, link: _Link, message: object) -> None:
        match message:
            case Answer():
                self._note(link, message)
            case Missing():
                for sequence in message.sequences:
                    link.known.pop(sequence, None)  # sent whole with its next row
                    if sequence not in self._mine:
                        self._send(link, Closed(sequence))
            case _:
                raise WireError(f"a drafter does not say {type(message).__name__}")

    def _note(self, link: _Link, answer: Answer) -> None:
        link.version = max(link.version, answer.version)
        for offer in answer.offers:
            self._answered(link, offer.sequence, offer.base_len, offer)
        for sequence, base in answer.nothing:
            self._answered(link, sequence, base, None)

    def _answered(self, link: _Link, sequence: int, base: int, offer: Offer | None) -> None:
        """Keep an answer for the tokens known now. Which one is kept never depends on the tokens offered."""
        mine = self._mine.get(sequence)
        if mine is None:
            if sequence in link.known:
                self._tell_over(link, sequence)
        elif offer is not None and offer.version < link.version:
            self._counts["stale"] += 1
        elif base < mine.length:
            self._counts["late"] += offer is not None
        elif base == mine.base and mine.offer is not None:
            self._counts["doubled"] += offer is not None
        else:
            mine.base, mine.offer = base, offer

    def _collect(self, views: Sequence[SequenceView]) -> list[Offer]:
        offers = []
        for view in views:
            mine = self._mine[view.id]
            if mine.base != mine.length:
                self._counts["missed"] += 1
            elif mine.offer is None or not mine.offer.tokens:
                self._counts["nothing"] += 1
            else:
                self._counts["hits"] += 1
                offers.append(replace(_cut(mine.offer, view.k), source=self.name))
        return offers

    # -- drafters ----------------------------------------------------------------------------

    def _adopt(self) -> None:
        while self._arriving:
            link = _Link(next(self._numbers), self._arriving.popleft())
            link.channel.listen(self._bell)
            self._links.append(link)
            self._counts["attached"] += 1

    def _send(self, link: _Link, message: object) -> None:
        if not link.alive:
            return
        try:
            link.channel.send(LANGUAGE.encode(message))
        except PeerLost:
            self._lose(link)

    def _lose(self, link: _Link) -> None:
        """Its sequences find another with their next row."""
        if link.alive:
            link.alive = False
            self._links.remove(link)
            link.channel.close()
            self._counts["lost"] += 1


def _cut(offer: Offer, k: int) -> Offer:
    """At most k tokens of a chain: a row's k may have fallen since. Trees are cut where they are planned."""
    if offer.parents is not None or len(offer.tokens) <= k:
        return offer
    law = offer.law
    return replace(offer, tokens=offer.tokens[:k], law=law and DraftLaw(law.ids[:k], law.probs[:k]))
