"""Drafting ahead: while the target verifies one draft, the drafts that may follow it are made.

Knows: which draft is being verified, what the target may make of it, how likely each outcome is, and how
many passes there is time for.
Refuses to know: how a pass is computed (the proposer's), and channels.

Around every draft in flight grow paths: one a guessed outcome, n of its tokens accepted and a token t of the
target's in the place of the next, with a draft of its own after them. When the verdict comes, the tokens it
emitted lead along one of the paths, or along none:

    hit     what is left of the path is the next draft, sent at once
    miss    the row goes on without one (another proposer may have a draft for it); this one is made at
            once where the verifier waits long enough, else it looks ahead from the new tokens on

No row ever waits for another's. Guesses are the draft's own likeliest tokens, the drafted one left out, for it
cannot be what took its place. Under `coupled` a path is drawn with the noise of its positions, so whatever of it
fits may be used. Under `ratio` and `block` every path has draws of its own, and one that was offered is never
offered again: a rule may have read its draws.

Source: algorithm SSD (Kumar, Dao, May, arXiv 2603.03251), its cache keyed by outcome, and its theorem 12;
`AllAccepted` is the single guess of PEARL (arXiv 2408.11850).
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import eq
from typing import Protocol, runtime_checkable

import numpy as np

from cluster.draft.drawing import Draft
from cluster.draft.guessing import AllAccepted, FanOut, Guessing
from cluster.draft.proposer import Proposer
from cluster.draft.server import Course
from cluster.errors import ConfigError
from cluster.messages import DraftLaw, Knobs, Offer, SequenceView
from cluster.request import LAW_RULES

#: What a pass, a round and an acceptance are worth one later.
_DECAY = 0.9
#: Acceptance assumed before anything is known, and the tokens it counts for.
_FIRST_ALPHA, _FIRST_WEIGHT = 0.7, 8.0


@runtime_checkable
class Foreseeing(Proposer, Protocol):
    """A proposer that drafts pass by pass and tells which tokens were likely at each position."""

    def begin(self, view: SequenceView, spread: int, like: int | None = None) -> Draft | None:
        """A draft with draws of its own. `view.tokens` stays as it is until the sequence is closed.

        like: another sequence, all of whose tokens begin this one's.
        """

    def advance(self, drafts: Sequence[Draft], knobs: Knobs) -> list[Draft]:
        """One forward pass for all of them; returns those that go on."""


@dataclass(frozen=True, slots=True)
class Foresight:
    """What became of the outcomes that were guessed, since the start, and what was measured.

    hits, misses: verdicts that led along a path, and that did not. in_time: drafts made after a miss while the
    verifier waited. paths, passes: drafts begun, forward passes. pass_ms, round_ms: of a pass, and from an answer
    to the verdict on it, lately.
    """

    hits: int = 0
    misses: int = 0
    in_time: int = 0
    paths: int = 0
    passes: int = 0
    pass_ms: float = 0.0
    round_ms: float = 0.0
    alpha: float = _FIRST_ALPHA

    @property
    def hit_rate(self) -> float:
        return self.hits / max(1, self.hits + self.misses)


@dataclass(slots=True, eq=False)
class _Path:
    """A draft of what follows the first `start` tokens of a sequence and, after them, `guess`."""

    start: int
    guess: tuple[int, ...]
    draft: Draft
    going: bool = True
    offered: bool = False

    @property
    def tokens(self) -> tuple[int, ...]:
        """At positions start, start + 1, ..."""
        return (*self.guess, *self.draft.tokens)

    def agrees(self, emitted: Sequence[int]) -> bool:
        """Whether its guess, as far as it goes, is what was emitted: soon said, and few are."""
        return all(map(eq, self.guess, emitted))

    def rest(self, known: int) -> tuple[int, ...]:
        """Its tokens after the first `known` of the sequence."""
        return self.tokens[known - self.start :]

    def likely(self, position: int) -> tuple[int, ...] | None:
        """Likely tokens at a position of the sequence; None where none are known yet."""
        place = position - self.start - len(self.guess)
        return self.draft.ranks[place] if 0 <= place < len(self.draft.ranks) else None

    def law(self, known: int, count: int) -> DraftLaw | None:
        """What `count` tokens after the first `known` were drawn from, where a rule wants to know."""
        first = known - self.start - len(self.guess)
        draft = self.draft
        if not draft.sampled:
            return None
        return DraftLaw(np.stack(draft.ids[first : first + count]), np.stack(draft.probs[first : first + count]))


@dataclass(slots=True, eq=False)
class _State:
    """One sequence. flight: what the target verifies now, as far as is known here: the beginning of `main`.

    planned: positions of the flight whose outcomes have been guessed. answered, asked: how many tokens were known
    when it last was. wanted: an answer is made while the verifier waits.
    """

    course: Course
    paths: list[_Path] = field(default_factory=list)
    main: _Path | None = None
    flight: tuple[int, ...] = ()
    planned: set[int] = field(default_factory=set)
    answered: int = -1
    asked: int = -1
    wanted: bool = False
    replied_at: float | None = None

    @property
    def known(self) -> int:
        return len(self.course.tokens)


class Lookahead:
    """A Strategy (server.py) for proposers that foresee.

    budget: guesses a sequence at most; most_rows: of all sequences together.
    Raises ConfigError for a proposer that cannot draft pass by pass.
    """

    def __init__(
        self,
        proposer: Proposer,
        guessing: Guessing | None = None,
        *,
        budget: int = 24,
        most_rows: int = 256,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if not isinstance(proposer, Foreseeing):
            raise ConfigError(f"drafts of kind {proposer.name} cannot look ahead: give them mode sync")
        self._proposer: Foreseeing = proposer
        self._guessing = guessing or FanOut()
        self._budget = budget
        self._most_rows = most_rows
        self._clock = clock
        self._states: dict[int, _State] = {}
        self._ids = itertools.count(-1, -1)  # to the proposer, paths are sequences of their own
        self._stood, self._tried = _FIRST_ALPHA * _FIRST_WEIGHT, _FIRST_WEIGHT
        self._left: list[int] = []
        self._counts: Counter[str] = Counter()
        self._pass_ms = self._round_ms = 0.0

    @property
    def stats(self) -> Foresight:
        alpha = self._stood / self._tried
        return Foresight(**self._counts, pass_ms=self._pass_ms, round_ms=self._round_ms, alpha=alpha)

    # -- what the server tells ---------------------------------------------------------------

    def opened(self, course: Course) -> None:
        self._states[course.id] = _State(course)

    def asked(self, course: Course) -> None:
        state = self._states[course.id]
        first, state.asked = state.asked < state.known, state.known
        if state.answered < state.known:
            self._answer(state)
        elif not first:
            self._reply(state, state.flight)  # asked again: the answer was lost

    def settled(self, course: Course, emitted: tuple[int, ...]) -> None:
        state = self._states[course.id]
        self._learn(state, emitted)
        self._follow(state)
        if course.k > 0:
            hit = state.main is not None and bool(state.main.rest(state.known))
            self._counts["hits" if hit else "misses"] += 1
            self._answer(state)

    def closed(self, course: Course) -> None:
        self._keep(self._states.pop(course.id), [])

    def swapped(self) -> None:
        """What was drafted with other weights is not offered any more."""
        for state in self._states.values():
            self._keep(state, [])
            state.main, state.flight = None, ()

    def work(self, knobs: Knobs) -> bool:
        """One pass for every path that grows."""
        # Paths left behind are closed here and not when a verdict leaves them: answers go out first.
        for number in self._left:
            self._proposer.close(number)
        self._left.clear()
        for state in self._states.values():
            self._plan(state)
        going = [path for state in self._states.values() for path in state.paths if path.going]
        if not going:
            return False
        began = self._clock()
        left = {draft.view.id for draft in self._proposer.advance([path.draft for path in going], knobs)}
        took = (self._clock() - began) * 1e3
        for path in going:
            path.going = path.draft.view.id in left
        self._pass_ms = _fade(self._pass_ms, took)
        self._counts["passes"] += 1
        for state in self._states.values():
            if state.wanted and state.main is not None:
                self._finish(state, state.main)
        return True

    # -- outcomes ----------------------------------------------------------------------------

    def _learn(self, state: _State, emitted: tuple[int, ...]) -> None:
        """How long the flight stood, and how long the target took."""
        if state.replied_at is not None:
            took = (self._clock() - state.replied_at) * 1e3
            self._round_ms = _fade(self._round_ms, took)
            state.replied_at = None
        if state.flight:
            both = min(len(state.flight), len(emitted))
            stood = next((n for n in range(both) if state.flight[n] != emitted[n]), both)
            self._stood = self._stood * _DECAY + stood
            self._tried = self._tried * _DECAY + stood + (stood < both)

    def _follow(self, state: _State) -> None:
        """Keep the paths that the sequence went along; the longest of them is the main one now."""
        known, tokens = state.known, state.course.tokens
        sampled = state.course.rule in LAW_RULES and not state.course.sampling.greedy
        self._keep(
            state,
            [
                path
                for path in state.paths
                if path.agrees(tokens[path.start : known])
                and len(path.tokens) + path.going > known - path.start
                and list(path.tokens[: known - path.start]) == tokens[path.start : known]
                and path.draft.sampled == sampled
                and not (sampled and (path.offered or known - path.start < len(path.guess)))
            ],
        )
        state.main = max(state.paths, key=lambda path: len(path.rest(known)), default=None)
        state.flight = ()
        state.wanted = False

    def _answer(self, state: _State) -> None:
        """With what there is; or, where the verifier waits long enough, with what there will be; or with nothing."""
        course = state.course
        if course.k < 1:
            self._reply(state, ())
            return
        if state.main is None:
            state.main = self._begin(state, (), course.k + 1)
        if state.main is None:
            self._reply(state, ())
        elif state.main.rest(state.known):
            self._reply(state, state.main.rest(state.known)[: course.k])
        elif self._pass_ms * (course.k + 1) <= course.desk.wait_s * 1e3:
            state.wanted = True
        else:
            self._reply(state, ())

    def _finish(self, state: _State, main: _Path) -> None:
        """Answer who waits, as soon as the draft is long enough."""
        rest = main.rest(state.known)[: state.course.k]
        if len(rest) == state.course.k or not main.going:
            self._counts["in_time"] += bool(rest)
            self._reply(state, rest)

    def _reply(self, state: _State, tokens: tuple[int, ...]) -> None:
        state.answered, state.flight, state.wanted, state.planned = state.known, tokens, False, set()
        state.replied_at = self._clock()
        if not tokens or state.main is None:
            state.course.reply(None)
            return
        state.main.offered = True
        law = state.main.law(state.known, len(tokens))
        state.course.reply(Offer(state.course.id, state.known, tokens, law, source=self._proposer.name))

    # -- guesses -----------------------------------------------------------------------------

    def _plan(self, state: _State) -> None:
        """Begin a path for each likely outcome of the flight, position by position as they become known."""
        main, flight, k = state.main, state.flight, state.course.k
        if main is None or state.wanted or k < 1 or len(state.planned) > len(flight):
            return
        fresh = {
            n: likely
            for n in range(len(flight) + 1)
            if n not in state.planned and (likely := main.likely(state.known + n))
        }
        if not fresh:
            return
        state.planned.update(fresh)
        depth = self._depth(k)
        widths = self._guessing.widths(self._stood / self._tried, len(flight), self._share(depth, k))
        for n, likely in fresh.items():
            # What was drafted cannot take its own place; where nothing was, the main path goes on with it.
            drafted = flight[n : n + 1] or (main.rest(state.known)[:1] if not flight else ())
            guesses = [token for token in likely if token not in drafted][: widths[n]]
            for token in guesses:
                self._begin(state, (*flight[:n], token), depth + 1)

    def _begin(self, state: _State, guess: tuple[int, ...], length: int) -> _Path | None:
        """A path of `length` draft tokens; None where the draft's context ends before."""
        course = state.course
        tokens = [*course.tokens, *guess]
        view = course.seen(next(self._ids), tokens, length)
        self._proposer.open(view)
        main = state.main
        like = main.draft.view.id if main is not None and len(main.draft.view.tokens) <= state.known else None
        draft = self._proposer.begin(view, self._budget + 1, like)
        if draft is None:
            self._proposer.close(view.id)
            return None
        path = _Path(state.known, guess, draft)
        state.paths.append(path)
        self._counts["paths"] += 1
        return path

    def _depth(self, k: int) -> int:
        """Draft tokens of a path for which there is time before the verdict, the likely ones after them included.

        Half a pass is spared: a verdict that comes in the middle of one waits for its end.
        """
        if not self._round_ms or not self._pass_ms:
            return k
        return max(1, min(k, int(self._round_ms / self._pass_ms - 0.5) - 1))

    def _share(self, depth: int, k: int) -> int:
        """Guesses of one sequence: fewer while others are many, or while passes are too slow for full drafts."""
        live = sum(state.main is not None for state in self._states.values())
        return max(1, min(self._budget, self._most_rows // max(1, live)) * depth // k)

    def _keep(self, state: _State, kept: list[_Path]) -> None:
        for path in state.paths:
            if path not in kept:
                self._left.append(path.draft.view.id)
        state.paths = kept


class Pearl(Lookahead):
    """Lookahead with PEARL's one guess: everything is accepted."""

    def __init__(self, proposer: Proposer, clock: Callable[[], float] = time.perf_counter) -> None:
        super().__init__(proposer, AllAccepted(), clock=clock)


def _fade(before: float, now: float) -> float:
    return now if before == 0.0 else before * _DECAY + now * (1 - _DECAY)
