"""The judge: from logits and drafts to what each row emits.

Knows: every live sequence's sampling, token history and ending; which offers are well formed.
Refuses to know: blocks, scheduling, how logits or drafts were made.

The judge is the only writer of check state (histories, text, endings). Everything it decides
about a token depends on the tokens before it and on keyed noise, never on the batch.

Legend of shape suffixes: N judged positions of a step, P those of one row, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from cluster.errors import BrokenInvariant
from cluster.messages import DraftLaw, Offer, Plan, PlanRow, TokenLogprob, Verdict
from cluster.model.runner import Flight
from cluster.model.sample import Shape, draw, noise_key, probabilities, shape_logits
from cluster.request import Request, RuleName, Sampling
from cluster.text.stream import OpenStream
from cluster.verify.accept import Ruling, coupled, ratio
from cluster.verify.ending import Cut, Ending
from cluster.verify.processors import History

_LAW_TOLERANCE = 1e-6


@dataclass(slots=True)
class _Case:
    """Check state of one sequence; `length` counts its known tokens, prompt included."""

    sampling: Sampling
    rule: RuleName | None
    length: int
    history: History
    ending: Ending


@dataclass(frozen=True, slots=True)
class JudgedRow:
    """One row that wants logits: its plan, its rule, and where its positions lie among N."""

    row: PlanRow
    rule: RuleName
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Laws:
    """What `rule` needs beside the logits, made on the CPU while the forward pass runs."""

    rows: tuple[JudgedRow, ...]
    shape: Shape  # one entry a judged position
    keys: tuple[int, ...]  # coupled noise, keyed (seed, position), one a judged position


class Judge:
    """Admits offers, prepares laws, rules on flights."""

    def __init__(self, vocab_size: int, eos_ids: frozenset[int], open_stream: OpenStream | None) -> None:
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids
        self._open_stream = open_stream
        self._cases: dict[int, _Case] = {}

    def open(self, sequence: int, request: Request) -> None:
        stream = self._open_stream(request.prompt) if self._open_stream is not None else None
        self._cases[sequence] = _Case(
            sampling=request.sampling,
            rule=request.speculation.rule,
            length=len(request.prompt),
            history=History(request.prompt, request.sampling),
            ending=Ending(request.sampling, self._eos_ids, stream),
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
        for row in plan.rows:
            if not row.wants:
                continue
            case = self._cases[row.sequence]
            start = len(keys)
            first = row.end - row.wants + 1  # position of the token drawn at the row's first judged slot
            keys.extend(noise_key(case.sampling.seed, position) for position in range(first, first + row.wants))
            samplings.extend([case.sampling] * row.wants)
            rows.append(JudgedRow(row, case.rule or plan.knobs.rule, start, len(keys)))
        return Laws(tuple(rows), Shape.of(samplings), tuple(keys))

    def rule(self, flight: Flight, laws: Laws) -> list[Verdict]:
        """Verdicts in plan order, one for each row that wanted logits."""
        raw_NV = flight.logits_NV
        if raw_NV.shape != (len(laws.keys), self._vocab_size):
            raise BrokenInvariant(
                f"logits of shape {tuple(raw_NV.shape)} for {len(laws.keys)} positions x {self._vocab_size} tokens"
            )
        if not laws.rows:
            return []
        shaped_NV = shape_logits(self._process(raw_NV, laws), laws.shape)
        asked = {judged.rule for judged in laws.rows}
        own = draw(shaped_NV, laws.shape, laws.keys).tolist() if "coupled" in asked else []
        chances_NV = probabilities(shaped_NV, laws.shape) if "ratio" in asked else shaped_NV
        verdicts = []
        for judged in laws.rows:
            ruling = self._ruling(judged, own, chances_NV, flight.plan.round)
            verdicts.append(self._verdict(judged, ruling, raw_NV))
        return verdicts

    def _sound(self, offer: Offer) -> bool:
        case = self._cases.get(offer.sequence)
        if case is None or offer.base_len != case.length or not offer.tokens:
            return False
        if not all(0 <= token < self._vocab_size for token in offer.tokens):
            return False
        return offer.law is None or self._sound_law(offer.law, offer.tokens)

    def _sound_law(self, law: DraftLaw, tokens: Sequence[int]) -> bool:
        if law.ids.shape != law.probs.shape or law.ids.ndim != 2 or law.ids.shape[0] < len(tokens):
            return False
        in_range = bool(((law.ids >= 0) & (law.ids < self._vocab_size)).all())
        sums = np.abs(law.probs.sum(axis=1) - 1.0) < _LAW_TOLERANCE
        possible = all(law.probs[slot][law.ids[slot] == token].sum() > 0 for slot, token in enumerate(tokens))
        return in_range and possible and bool((law.probs >= 0).all()) and bool(sums.all())

    def _process(self, raw_NV: torch.Tensor, laws: Laws) -> torch.Tensor:
        """Penalties and biases, in a copy when any applies: raw logits stay raw."""
        touched = [judged for judged in laws.rows if self._cases[judged.row.sequence].history.matters]
        if not touched:
            return raw_NV
        logits_NV = raw_NV.clone()
        for judged in touched:
            history = self._cases[judged.row.sequence].history
            history.apply(logits_NV[judged.start : judged.stop], _drafts(judged.row))
        return logits_NV

    def _ruling(self, judged: JudgedRow, own: list[int], chances_NV: torch.Tensor, round_: int) -> Ruling:
        drafts = _drafts(judged.row)
        here = slice(judged.start, judged.stop)
        if judged.rule == "coupled":
            return coupled(drafts, own[here])
        law = judged.row.offer.law if judged.row.offer is not None else None
        return ratio(drafts, chances_NV[here], law, self._cases[judged.row.sequence].sampling.seed, round_)

    def _verdict(self, judged: JudgedRow, ruling: Ruling, raw_NV: torch.Tensor) -> Verdict:
        case = self._cases[judged.row.sequence]
        cut: Cut = case.ending.cut(ruling.tokens)
        tokens = ruling.tokens[: cut.kept]
        case.history.extend(tokens)
        case.length += len(tokens)
        wanted = case.sampling.logprobs
        logprobs = (
            () if wanted is None else _logprobs(raw_NV[judged.start : judged.start + len(tokens)], tokens, wanted)
        )
        return Verdict(
            sequence=judged.row.sequence,
            accepted=min(ruling.accepted, cut.kept),
            tokens=tokens,
            text=cut.text,
            logprobs=logprobs,
            finish=cut.finish,
        )


def _drafts(row: PlanRow) -> tuple[int, ...]:
    return row.tokens[len(row.tokens) - row.drafts :]


def _logprobs(raw_PV: torch.Tensor, tokens: Sequence[int], alternatives: int) -> tuple[TokenLogprob, ...]:
    """Raw log-softmax of emitted tokens, with the likeliest alternatives."""
    logprobs_PV = torch.log_softmax(raw_PV.float(), dim=1)
    chosen = logprobs_PV.gather(1, torch.tensor(tokens, device=raw_PV.device).unsqueeze(1)).squeeze(1).tolist()
    values, indices = logprobs_PV.topk(min(alternatives, logprobs_PV.shape[1]), dim=1)
    return tuple(
        TokenLogprob(token, logprob, tuple(zip(ids, tops, strict=True)))
        for token, logprob, ids, tops in zip(tokens, chosen, indices.tolist(), values.tolist(), strict=True)
    )
