"""The judge: from logits and drafts to what each row emits.

Knows: every live sequence's sampling, token history and ending; which offers are well formed.
Refuses to know: blocks, scheduling, how logits or drafts were made.

The judge is the only writer of check state (histories, text, endings). Everything it decides
about a token depends on the tokens before it and on keyed noise, never on the batch.

Legend of shape suffixes: N judged positions of a step, P those of one row, V vocabulary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from cluster.errors import BrokenInvariant, RequestError
from cluster.messages import DraftLaw, Fault, Offer, Plan, PlanRow, Verdict
from cluster.model.history import History
from cluster.model.processors import LogitsProcessor, Vocabulary
from cluster.model.runner import Flight
from cluster.model.sample import Shape, draw, fresh_seed, noise_key, probabilities, shape_logits
from cluster.request import Request, RuleName, Sampling, Speculation
from cluster.text.lexicon import Lexicon
from cluster.text.stream import OpenStream
from cluster.tree import paths, sound
from cluster.verify.ending import Cut, Ending
from cluster.verify.prompt import PromptLogprobs, logprobs_of
from cluster.verify.rules.base import Facts, Ruling
from cluster.verify.rules.registry import RULES

_LAW_TOLERANCE = 1e-6

#: Rounds of a request that a rule may look back on.
_OUTCOMES_KEPT = 64


@dataclass(slots=True)
class _Case:
    """Check state of one sequence; `length` counts its known tokens, prompt included."""

    sampling: Sampling
    speculation: Speculation
    prompt_len: int
    length: int
    fresh_seed: int  # of draws that are new in every round
    history: History
    ending: Ending
    told: PromptLogprobs
    outcomes: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=_OUTCOMES_KEPT))


@dataclass(frozen=True, slots=True)
class JudgedRow:
    """One row that gets a verdict: its plan, its rule, and where its positions lie among N."""

    row: PlanRow
    rule: RuleName
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Laws:
    """What `rule` needs beside the logits, made on the CPU while the forward pass runs."""

    rows: tuple[JudgedRow, ...]
    told: Mapping[int, range]  # by sequence: positions of the flight that are read for the prompt's log-probabilities
    shape: Shape  # one entry a judged position
    keys: tuple[int, ...]  # coupled noise, keyed (seed, position), one a judged position
    own: tuple[int, ...]  # positions at which a rule reads the target's own draw
    read: tuple[int, ...]  # positions at which a rule reads the law itself
    read_shape: Shape  # of those


class Judge:
    """Admits offers, prepares laws, rules on flights."""

    def __init__(
        self,
        vocab_size: int,
        eos_ids: frozenset[int],
        open_stream: OpenStream | None,
        plugged: Mapping[str, LogitsProcessor] | None = None,
        lexicon: Lexicon | None = None,
    ) -> None:
        self._vocab_size = vocab_size
        self._vocabulary = Vocabulary(eos_ids, lexicon)
        self._plugged = plugged or {}
        self._eos_ids = eos_ids
        self._open_stream = open_stream
        self._cases: dict[int, _Case] = {}

    @property
    def processors(self) -> tuple[str, ...]:
        """What a request may name as its logits processors."""
        return tuple(self._plugged)

    @property
    def reads_text(self) -> bool:
        """Whether words can be forbidden by their text."""
        return self._vocabulary.lexicon is not None

    def open(self, sequence: int, request: Request) -> None:
        """Meet a sequence. What it emitted elsewhere passes through every state as if it had been emitted here.

        Raises RequestError when that already ends the answer; nothing is kept then.
        """
        sampling = request.sampling
        stream = self._open_stream(request.prompt) if self._open_stream is not None else None
        ending = Ending(sampling, self._eos_ids, stream)
        if ending.cut(request.emitted).finish is not None:  # its text was shown where the tokens were
            raise RequestError("emitted holds a complete answer: there is nothing to go on with", "emitted")
        history = History(request.prompt, sampling, self._vocabulary, self._plugged)
        history.extend(request.emitted)
        self._cases[sequence] = _Case(
            sampling=sampling,
            speculation=request.speculation,
            prompt_len=len(request.prompt),
            length=len(request.prompt) + len(request.emitted),
            fresh_seed=fresh_seed(sampling.seed, request.attempt),
            history=history,
            ending=ending,
            told=PromptLogprobs(request.prompt, sampling.prompt_logprobs),
        )

    def close(self, sequence: int) -> None:
        """Forget a sequence. Unknown ids are ignored."""
        self._cases.pop(sequence, None)

    def admit(self, offers: Sequence[Offer]) -> list[Offer]:
        """The offers that may be verified: known sequence, fresh base, sane ids and laws.

        A bad offer is dropped whole, the first of several for a sequence wins.
        """
        admitted: dict[int, Offer] = {}
        for offer in offers:
            if offer.sequence not in admitted and self._sound(offer):
                admitted[offer.sequence] = offer
        return list(admitted.values())

    def prepare(self, plan: Plan) -> Laws:
        """Sampling parameters and noise keys of every judged position, in plan order."""
        rows: list[JudgedRow] = []
        samplings: list[Sampling] = []
        keys: list[int] = []
        told: dict[int, range] = {}
        place = 0
        for row in plan.rows:
            if row.told:
                told[row.sequence] = range(place, place + row.told)
            place += row.wants
            if not row.judged:
                continue
            case = self._cases[row.sequence]
            start = len(keys)
            judged = row.positions[len(row.tokens) - row.judged :]
            keys.extend(noise_key(case.sampling.seed, position + 1) for position in judged)
            samplings.extend([case.sampling] * row.judged)
            rows.append(JudgedRow(row, case.speculation.rule or plan.knobs.rule, start, len(keys)))
        return self._laws(tuple(rows), told, Shape.of(samplings), tuple(keys))

    def rule(self, flight: Flight, laws: Laws) -> list[Verdict]:
        """Verdicts in plan order, one for each row that wanted one."""
        raw_NV = self._tell(flight, laws)
        if raw_NV.shape != (len(laws.keys), self._vocab_size):
            raise BrokenInvariant(
                f"logits of shape {tuple(raw_NV.shape)} for {len(laws.keys)} positions x {self._vocab_size} tokens"
            )
        if not laws.rows:
            return []
        shaped_NV = shape_logits(self._process(raw_NV, laws), laws.shape)
        own = _draws(shaped_NV, laws)
        read = _read(shaped_NV, laws)
        verdicts = []
        for judged in laws.rows:
            here = range(judged.start, judged.stop)
            facts = self._facts(judged, flight.plan, tuple(own[n] for n in here if n in own), read.get(judged.start))
            verdicts.append(self._verdict(judged, RULES[judged.rule].decide(facts), raw_NV))
        return verdicts

    def _laws(
        self, rows: tuple[JudgedRow, ...], told: Mapping[int, range], shape: Shape, keys: tuple[int, ...]
    ) -> Laws:
        """With which positions each kind of reading is needed at: nothing is computed that no rule reads."""
        own = tuple(n for row in rows if RULES[row.rule].reads_own for n in range(row.start, row.stop))
        readers = [row for row in rows if RULES[row.rule].reads_laws]
        read = tuple(n for row in readers for n in range(row.start, row.stop))
        warm = {n for row in readers if not RULES[row.rule].exact for n in range(row.start, row.stop)}
        temperature = tuple(1.0 if t == 0 and n in warm else t for n, t in enumerate(shape.temperature))
        return Laws(rows, told, shape, keys, own, read, replace(shape, temperature=temperature).at(read))

    def _sound(self, offer: Offer) -> bool:
        case = self._cases.get(offer.sequence)
        if case is None or offer.base_len != case.length or not offer.tokens:
            return False
        if not all(0 <= token < self._vocab_size for token in offer.tokens):
            return False
        if offer.parents is not None:  # a tree's nodes were chosen, not sampled
            return offer.law is None and len(offer.parents) == len(offer.tokens) and sound(offer.parents)
        return offer.law is None or self._sound_law(offer.law, offer.tokens)

    def _sound_law(self, law: DraftLaw, tokens: Sequence[int]) -> bool:
        if law.ids.shape != law.probs.shape or law.ids.ndim != 2 or law.ids.shape[0] < len(tokens):
            return False
        in_range = bool(((law.ids >= 0) & (law.ids < self._vocab_size)).all())
        sums = np.abs(law.probs.sum(axis=1) - 1.0) < _LAW_TOLERANCE
        possible = all(law.probs[slot][law.ids[slot] == token].sum() > 0 for slot, token in enumerate(tokens))
        return in_range and possible and bool((law.probs >= 0).all()) and bool(sums.all())

    def _tell(self, flight: Flight, laws: Laws) -> torch.Tensor:
        """Note what a flight says of prompt tokens; returns the logits of the positions that are judged."""
        if not laws.told:
            return flight.logits_NV
        firsts = {row.sequence: row.first for row in flight.plan.rows}
        for sequence, places in laws.told.items():
            rows = flight.logits_NV[places.start : places.stop]
            self._cases[sequence].told.note(rows, firsts[sequence])
        told = {place for places in laws.told.values() for place in places}
        return _at(flight.logits_NV, [place for place in range(len(flight.logits_NV)) if place not in told])

    def _process(self, raw_NV: torch.Tensor, laws: Laws) -> torch.Tensor:
        """What processors make of the logits, in a copy when any applies: raw logits stay raw."""
        touched = [judged for judged in laws.rows if self._cases[judged.row.sequence].history.matters]
        if not touched:
            return raw_NV
        logits_NV = raw_NV.clone()
        for judged in touched:
            history = self._cases[judged.row.sequence].history
            history.apply(logits_NV[judged.start : judged.stop], _supposed(judged.row))
        return logits_NV

    def _facts(self, judged: JudgedRow, plan: Plan, own: tuple[int, ...], target_PV: torch.Tensor | None) -> Facts:
        case = self._cases[judged.row.sequence]
        facts = Facts(
            drafts=_drafts(judged.row),
            own=own,
            law=judged.row.offer.law if judged.row.offer is not None else None,
            seed=case.fresh_seed,
            round=plan.round,
            emitted=case.length - case.prompt_len,
            outcomes=case.outcomes,
            threshold=case.speculation.threshold or plan.knobs.threshold,
            typical=plan.knobs.typical,
            parents=judged.row.parents,
        )
        return facts if target_PV is None else replace(facts, target_PV=target_PV)

    def _verdict(self, judged: JudgedRow, ruling: Ruling, raw_NV: torch.Tensor) -> Verdict:
        case = self._cases[judged.row.sequence]
        slots = [0, *(range(1, ruling.accepted + 1) if ruling.path is None else (node + 1 for node in ruling.path))]
        emitted, fault = _unblocked(ruling.tokens, slots, case.history.blocked)
        cut: Cut = case.ending.cut(emitted)
        tokens = emitted[: cut.kept]
        case.history.extend(tokens)
        case.length += len(tokens)
        if judged.row.drafts:
            case.outcomes.append((judged.row.depth, ruling.accepted))
        at = [judged.start + slot for slot in slots[: len(tokens)]]
        wanted = case.sampling.logprobs
        accepted = min(ruling.accepted, len(tokens))
        return Verdict(
            sequence=judged.row.sequence,
            accepted=accepted,
            tokens=tokens,
            text=cut.text,
            logprobs=() if wanted is None else logprobs_of(_at(raw_NV, at), tokens, wanted),
            finish=cut.finish or (None if fault is None else "error"),
            prompt_logprobs=case.told.take(),
            fault=fault if cut.finish is None else None,
            rule=judged.rule,
            lossy=not RULES[judged.rule].exact,
            path=None if ruling.path is None else ruling.path[:accepted],
        )


def _drafts(row: PlanRow) -> tuple[int, ...]:
    return row.tokens[len(row.tokens) - row.drafts :]


def _supposed(row: PlanRow) -> list[tuple[int, ...]]:
    """The drafts before each judged slot."""
    drafts = _drafts(row)
    if row.parents is None:
        return [drafts[:slot] for slot in range(row.judged)]
    return [(), *paths(drafts, row.parents)]


def _unblocked(
    tokens: tuple[int, ...], slots: Sequence[int], blocked: Mapping[int, Fault]
) -> tuple[tuple[int, ...], Fault | None]:
    """The tokens before the first of their slots that says nothing, and why, where the row got that far."""
    for count, slot in enumerate(slots[: len(tokens)]):
        if slot in blocked:
            return tokens[:count], blocked[slot]
    return tokens, None


def _draws(shaped_NV: torch.Tensor, laws: Laws) -> dict[int, int]:
    """The target's own draw by position, where a rule reads it."""
    if not laws.own:
        return {}
    rows = _at(shaped_NV, laws.own)
    drawn = draw(rows, laws.shape.at(laws.own), [laws.keys[n] for n in laws.own]).tolist()
    return dict(zip(laws.own, drawn, strict=True))


def _read(shaped_NV: torch.Tensor, laws: Laws) -> dict[int, torch.Tensor]:
    """Laws of each row whose rule reads them, float64 [P, V], by the row's first position."""
    if not laws.read:
        return {}
    chances = probabilities(_at(shaped_NV, laws.read), laws.read_shape)
    where = {n: place for place, n in enumerate(laws.read)}
    return {
        row.start: chances[where[row.start] : where[row.start] + row.stop - row.start]
        for row in laws.rows
        if row.start in where
    }


def _at(rows_NV: torch.Tensor, places: Sequence[int]) -> torch.Tensor:
    """These rows, without a copy where they are all."""
    return (
        rows_NV
        if len(places) == len(rows_NV)
        else rows_NV[torch.tensor(places, dtype=torch.int64, device=rows_NV.device)]
    )
