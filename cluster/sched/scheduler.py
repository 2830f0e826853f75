"""The scheduler: which tokens of which sequences the next step computes.

Knows: sequences and their order, the token budget, and the cache facade it asks for room.
Refuses to know: logits, drafts' quality, tensors, text.

There is no prefill or decode phase: a row computes tokens that are known but not yet in the
cache, plus drafts where nothing else is pending. Chunked prefill, prefix hits, verification and
preemption are that one case. The scheduler is the only writer of sequences.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace

from cluster.errors import BrokenInvariant, Overloaded
from cluster.kv.cache import KVCache
from cluster.messages import Delta, Knobs, Load, Offer, Plan, PlanRow, SequenceView, Verdict
from cluster.request import Request
from cluster.sched.policy import Fcfs, Policy
from cluster.sched.sequence import Sequence
from cluster.tree import LARGEST, first_path, is_chain, kept, renumbered


@dataclass(frozen=True, slots=True)
class Limits:
    """max_sequences run at once, at most max_waiting wait. trees: whether drafts may be; else they are chains."""

    max_sequences: int
    max_waiting: int
    trees: bool = True


@dataclass(slots=True)
class _Draftboard:
    """A plan being made: rows by sequence, the budget left, and whether blocks ran short for those that run."""

    rows: dict[int, PlanRow]
    budget: int
    short: bool = False

    def add(self, row: PlanRow) -> None:
        self.rows[row.sequence] = row
        self.budget -= len(row.tokens)

    def drop(self, sequence: int) -> None:
        row = self.rows.pop(sequence, None)
        if row is not None:
            self.budget += len(row.tokens)


class Scheduler:
    """`policy` says who starts first and who gives way when blocks run short."""

    def __init__(self, cache: KVCache, limits: Limits, policy: Policy | None = None) -> None:
        self._cache = cache
        self._limits = limits
        self._policy = policy or Fcfs()
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []
        self._next_id = 0
        self._round = 0
        self._moves: list[tuple[int, int]] = []  # of accepted paths, for the next plan

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def add(self, request: Request) -> int:
        """Queue a request; returns its sequence id.

        Raises RequestError when the policy cannot serve it, Overloaded when the queue is full.
        """
        self._policy.check(request)
        if len(self._waiting) >= self._limits.max_waiting + self._idle_places():
            raise Overloaded(
                f"{len(self._waiting)} requests wait already (scheduler.max_waiting={self._limits.max_waiting})"
            )
        sequence = Sequence(self._next_id, request, [*request.prompt, *request.emitted])
        self._next_id += 1
        self._waiting.append(sequence)
        self._policy.arrived(sequence)
        return sequence.id

    def abort(self, sequence_id: int) -> None:
        """Forget a sequence and return its blocks at once. Unknown ids are ignored."""
        for sequence in (*self._running, *self._waiting):
            if sequence.id == sequence_id:
                self._remove(sequence)

    def views(self, knobs: Knobs) -> list[SequenceView]:
        """Sequences that could carry drafts in the next step."""
        nodes = self._nodes(knobs)
        views = (sequence.view(knobs, nodes) for sequence in self._running if sequence.pending == 1)
        return [view for view in views if view.k > 0]

    def load(self, knobs: Knobs) -> Load:
        """What the next step does apart from drafts."""
        ready = sum(sequence.pending == 1 for sequence in self._running)
        known = sum(sequence.pending for sequence in self._running)
        if self._waiting and self._idle_places():
            known += self._waiting[0].pending
        return Load(ready, min(known, knobs.token_budget))

    def view(self, sequence_id: int, knobs: Knobs) -> SequenceView:
        """One live sequence, for a proposer that is about to meet it."""
        for sequence in (*self._waiting, *self._running):
            if sequence.id == sequence_id:
                return sequence.view(knobs)
        raise BrokenInvariant(f"sequence {sequence_id} is not live")

    def plan(self, offers: SequenceOf[Offer], knobs: Knobs) -> Plan:
        """Rows for the next step, most important sequences first, within knobs.token_budget.

        The first plan after an accepted path carries the moves that lay it straight: whatever block was
        published, returned or given to another meanwhile, nothing reads or writes one before.
        """
        self._round += 1
        board = _Draftboard({}, knobs.token_budget)
        by_sequence = {offer.sequence: offer for offer in offers}
        self._plan_running(board, by_sequence, knobs)
        self._admit(board)
        if not board.rows:
            return Plan(self._round, (), knobs)
        moves, self._moves = tuple(self._moves), []
        return Plan(self._round, tuple(board.rows.values()), knobs, moves)

    def commit(self, plan: Plan, verdicts: SequenceOf[Verdict]) -> list[Delta]:
        """Take the verdicts into the sequences; returns news for those that emitted tokens."""
        live = {sequence.id: sequence for sequence in self._running}
        ruled = {verdict.sequence: verdict for verdict in verdicts}
        deltas = []
        for row in plan.rows:
            sequence = live[row.sequence]
            verdict = ruled.get(row.sequence)
            if (verdict is None) != (row.judged == 0):
                raise BrokenInvariant(f"sequence {row.sequence}: a verdict for every row that wants one, no other")
            if verdict is None:
                sequence.computed_len = row.end
                self._policy.served(sequence, len(row.tokens))
                self._cache.commit(sequence.id, sequence.tokens, sequence.computed_len)
            else:
                deltas.append(self._take(sequence, row, verdict))
        return deltas

    def check(self) -> None:
        """Raise BrokenInvariant unless law 1 and the scheduler's own invariants hold."""
        self._cache.check()
        for sequence in self._running:
            if not self._cache.holds(sequence.id) or not 0 <= sequence.computed_len < len(sequence.tokens):
                raise BrokenInvariant(f"running sequence {sequence.id} is inconsistent")
        if any(self._cache.holds(sequence.id) for sequence in self._waiting):
            raise BrokenInvariant("a waiting sequence holds blocks")

    def _idle_places(self) -> int:
        return max(0, self._limits.max_sequences - len(self._running))

    def _plan_running(self, board: _Draftboard, offers: Mapping[int, Offer], knobs: Knobs) -> None:
        """Rows of running sequences, those ready to decode first, the rest behind waiting ones that outrank them.

        Drafts take what the known tokens behind them leave of the budget, and leave one for a
        request that could start: a guess for one sequence is never worth a step of another.
        """
        order = sorted(self._running, key=self._policy.importance)
        ready = [sequence for sequence in order if sequence.pending == 1]
        filling = [sequence for sequence in order if sequence.pending > 1]
        head = self._head()
        later = sum(sequence.pending for sequence in self._running) + self._could_start(head)
        for sequence in (*ready, *filling):
            later -= sequence.pending
            if head is not None and sequence.pending > 1 and self._policy.outranks(head, sequence):
                self._admit(board, before=sequence)
                head = self._head()
            if board.budget <= 0:
                break
            if sequence not in self._running:  # gave way to a more important one in this very plan
                continue
            row = self._row(sequence, offers.get(sequence.id), knobs, board.budget, later)
            if row.parents is not None and not self._cache.reserve(sequence.id, row.end):
                row = _as_chain(row)
            if self._make_room(sequence, row, board):
                board.add(self._with_table(row))
            elif sequence in self._running:  # room without the drafts only
                board.add(self._with_table(_without_drafts(row)))

    def _could_start(self, head: Sequence | None) -> bool:
        """Whether there is a place for the next that waits, or one that it may take."""
        if head is None:
            return False
        return self._idle_places() > 0 or any(self._policy.outranks(head, other) for other in self._running)

    def _nodes(self, knobs: Knobs) -> int:
        """How many nodes a sequence's tree may have: a batch shares what one step may verify for nothing."""
        return min(LARGEST, knobs.tree_nodes // max(1, len(self._running))) if self._limits.trees else 0

    def _drafts(
        self, sequence: Sequence, offer: Offer, knobs: Knobs, room: int
    ) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
        """What of an offer is verified: at most `room` tokens; and their parents, where they are no chain."""
        k = sequence.view(knobs).k
        if offer.parents is None:
            return offer.tokens[: max(0, min(k, room))], None
        if not self._limits.trees:
            chain = next((at for at, parent in enumerate(offer.parents) if parent != at - 1), len(offer.parents))
            return offer.tokens[: max(0, min(k, room, chain))], None
        nodes = kept(offer.parents, max(0, min(max(k, self._nodes(knobs)), room)), k)
        parents = renumbered(offer.parents, nodes)
        return tuple(offer.tokens[node] for node in nodes), None if is_chain(parents) else parents

    def _row(self, sequence: Sequence, offer: Offer | None, knobs: Knobs, budget: int, later: int = 0) -> PlanRow:
        count = min(sequence.pending, budget)
        first = sequence.computed_len
        known = tuple(sequence.tokens[first : first + count])
        drafts: tuple[int, ...] = ()
        parents: tuple[int, ...] | None = None
        if offer is not None and sequence.pending == 1:
            drafts, parents = self._drafts(sequence, offer, knobs, budget - count - later)
        complete = count == sequence.pending
        told = max(0, min(first + count, sequence.untold) - first)
        return PlanRow(
            sequence=sequence.id,
            first=first,
            tokens=known + drafts,
            blocks=(),
            drafts=len(drafts),
            wants=told + (len(drafts) + 1 if complete else 0),
            offer=offer if drafts else None,
            told=told,
            parents=parents,
        )

    def _make_room(self, sequence: Sequence, row: PlanRow, board: _Draftboard) -> bool:
        """Reserve the row's blocks. Drafts go first, then less important sequences, then this one.

        False: the drafts must be left out (blocks for the rest are reserved), or the sequence
        itself was preempted.
        """
        if self._cache.reserve(sequence.id, row.end):
            return True
        needed = row.end - row.drafts
        while not self._cache.reserve(sequence.id, needed):
            victim = max(self._running, key=self._policy.importance)
            board.short = True
            self._preempt(victim, board)
            if victim is sequence:
                return False
        return row.drafts == 0

    def _preempt(self, sequence: Sequence, board: _Draftboard) -> None:
        """Back to the queue, where its place is by the policy; its tokens stay known and are recomputed later."""
        board.drop(sequence.id)
        self._running.remove(sequence)
        self._cache.release(sequence.id)
        sequence.computed_len = 0
        sequence.tally.preemptions += 1
        self._waiting.append(sequence)

    def _admit(self, board: _Draftboard, before: Sequence | None = None) -> None:
        """Start waiting sequences in order while places, budget and blocks last; only those that outrank `before`.

        Nobody starts in a step in which blocks ran short.
        """
        while board.budget > 0 and not board.short:
            sequence = self._head()
            if sequence is None or (before is not None and not self._policy.outranks(sequence, before)):
                return
            if not self._make_way(sequence, board):
                if not self._running:
                    raise BrokenInvariant(f"sequence {sequence.id} can never fit; submit should have refused it")
                return
            self._waiting.remove(sequence)
            self._start(sequence, board)

    def _head(self) -> Sequence | None:
        """Who starts next, where a place is free or may become so."""
        if not self._idle_places() and not self._policy.displaces:
            return None
        return min((s for s in self._waiting if not self._held(s)), key=self._policy.turn, default=None)

    def _make_way(self, sequence: Sequence, board: _Draftboard) -> bool:
        """Whether there is a place and room to start: as it is, or once the least important that it outranks left.

        A block is spared for each that runs on to grow into. Nobody leaves for one that could not start even so.
        """
        outranked = [other for other in self._running if self._policy.outranks(sequence, other)]
        outranked.sort(key=self._policy.importance, reverse=True)
        freed = 0
        for count, victim in enumerate([None, *outranked]):
            freed += 0 if victim is None else self._cache.held_alone(victim.id)
            left = len(self._running) - count
            if left < self._limits.max_sequences and self._fits(sequence, left - freed):
                for other in outranked[:count]:
                    self._preempt(other, board)
                return self._fits(sequence, left)
        return False

    def _held(self, sequence: Sequence) -> bool:
        """Whether another of its group is computing the prompt whose blocks the two can share."""
        request = sequence.request
        if not request.group or sequence.untold:
            return False
        shared = self._cache.shareable(sequence.prompt_len)
        return any(
            other.request.group == request.group
            and other.computed_len < shared
            and (other.request.prompt, other.request.salt) == (request.prompt, request.salt)
            for other in self._running
        )

    def _fits(self, sequence: Sequence, spare: int) -> bool:
        return self._cache.fits(sequence.tokens, sequence.request.salt, spare, match=not sequence.untold)

    def _start(self, sequence: Sequence, board: _Draftboard) -> None:
        salt = sequence.request.salt
        # Every position is computed where something is told of it.
        sequence.computed_len = self._cache.open(sequence.id, sequence.tokens, salt, match=not sequence.untold)
        if not sequence.admitted_before:
            sequence.tally.cached_tokens = sequence.computed_len
            sequence.admitted_before = True
        self._running.append(sequence)
        row = self._row(sequence, None, Knobs(k=0), board.budget)
        if not self._cache.reserve(sequence.id, row.end):
            raise BrokenInvariant(f"sequence {sequence.id} was admitted without room")
        board.add(self._with_table(row))

    def _with_table(self, row: PlanRow) -> PlanRow:
        return replace(row, blocks=self._cache.table(row.sequence))

    def _take(self, sequence: Sequence, row: PlanRow, verdict: Verdict) -> Delta:
        fits = verdict.accepted <= row.depth and len(verdict.path or ()) == (verdict.accepted if row.parents else 0)
        if not (verdict.tokens or verdict.fault) or not fits:
            raise BrokenInvariant(f"sequence {sequence.id}: verdict {verdict} does not fit its row")
        sequence.tokens.extend(verdict.tokens)
        self._straighten(row, verdict)
        sequence.computed_len = row.end - row.drafts + verdict.accepted
        sequence.tally.record(row, verdict)
        self._policy.served(sequence, len(row.tokens) - row.drafts + len(verdict.tokens))
        if verdict.tokens:
            self._cache.commit(sequence.id, sequence.tokens, sequence.computed_len)
        if verdict.finish is not None:
            self._remove(sequence)
        return Delta(
            request=sequence.request.id,
            tokens=verdict.tokens,
            text=verdict.text,
            logprobs=verdict.logprobs,
            finish=verdict.finish,
            statistics=sequence.statistics(),
            prompt_logprobs=verdict.prompt_logprobs,
            fault=verdict.fault,
        )

    def _straighten(self, row: PlanRow, verdict: Verdict) -> None:
        """Have the keys and values of an accepted path moved to where those of a chain would lie."""
        size = self._cache.block_tokens
        for position, node in enumerate(verdict.path or ()):
            if node != position:
                source, place = row.root + node, row.root + position
                self._moves.append(
                    (row.blocks[source // size] * size + source % size, row.blocks[place // size] * size + place % size)
                )

    def _remove(self, sequence: Sequence) -> None:
        if sequence in self._running:
            self._running.remove(sequence)
        else:
            self._waiting.remove(sequence)
        self._policy.left(sequence)
        self._cache.release(sequence.id)


def _without_drafts(row: PlanRow) -> PlanRow:
    known = row.tokens[: len(row.tokens) - row.drafts]
    return replace(row, tokens=known, drafts=0, wants=row.wants - row.drafts, offer=None, parents=None)


def _as_chain(row: PlanRow) -> PlanRow:
    """The tree's first path alone."""
    known, drafts = row.tokens[: len(row.tokens) - row.drafts], row.tokens[len(row.tokens) - row.drafts :]
    path = first_path(row.parents or ())
    tokens = (*known, *(drafts[node] for node in path))
    return replace(row, tokens=tokens, drafts=len(path), wants=row.wants - row.drafts + len(path), parents=None)
