"""How a drafting model draws: the request's processors, a law, and one keyed draw a token.

Knows: which law a row's next draft token is drawn from, with which noise, and what of it is shipped.
Refuses to know: models and their caches (the proposers), and acceptance.

What the target may not say is not worth drafting: penalties, biases and masks apply to a drafter's
logits too, one token at a time, drafts included. q is the drafter's own, so any law will do as long
as the one shipped is the one drawn from (law 4). Plugged-in processors stay with the target: they
are foreign code, and a draft is only a guess.

Legend of shape suffixes: B rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from cluster.draft.branching import Branching, Growth
from cluster.draft.candidates import Candidates
from cluster.messages import DraftLaw, Offer, SequenceView
from cluster.model.history import History
from cluster.model.processors import Vocabulary
from cluster.model.sample import Shape, draw, fresh_seed, gumbel, noise_key, shape_logits
from cluster.request import LAW_RULES, Sampling

#: Stream of the draws by which drafts are sampled under `ratio` and `block`; the rules read others.
DRAFT_STREAM = 4

#: Pairs of (id, probability) a sampled draft token ships: its law is the renormalised top-m.
TOP_M = 64


@dataclass(slots=True)
class Draft:
    """One row being drafted. `history` None: no processor looks at this request."""

    view: SequenceView
    sampling: Sampling  # the drafter's own
    round: int
    most: int
    history: History | None = None
    tokens: list[int] = field(default_factory=list)
    ids: list[np.ndarray] = field(default_factory=list)
    probs: list[np.ndarray] = field(default_factory=list)
    stopped: bool = False  # too unsure of the token that would come next, or there is none
    spread: int = 0  # likely tokens to note at each position, for a lookahead (lookahead.py)
    ranks: list[tuple[int, ...]] = field(default_factory=list)  # of them, the likeliest first

    @property
    def sampled(self) -> bool:
        """Whether the rule needs to know the law the tokens were drawn from."""
        return self.view.rule in LAW_RULES and not self.sampling.greedy

    @property
    def done(self) -> bool:
        return self.stopped or len(self.tokens) >= self.most

    @property
    def key(self) -> int:
        """Of the next draw: the target's own noise or, where a law is shipped, a draw nobody else reads."""
        position = len(self.view.tokens) + len(self.tokens)
        seed = self.view.sampling.seed
        if not self.sampled:
            return noise_key(seed, position)
        return noise_key(fresh_seed(seed, self.view.attempt), position, self.round, DRAFT_STREAM)

    def take(self, token: int) -> None:
        self.tokens.append(token)
        if self.history is not None:
            self.history.suppose(token)

    def offer(self, source: str) -> Offer:
        law = DraftLaw(np.stack(self.ids), np.stack(self.probs)) if self.sampled else None
        return Offer(self.view.id, len(self.view.tokens), tuple(self.tokens), law, source=source)


class Drawing:
    """Draws for one drafting model.

    model_vocab, vocab_size: ids of the draft model and of the target. Either may be padded: ids
    that only one of them has are never drawn.
    """

    def __init__(
        self, candidates: Candidates, model_vocab: int, vocab_size: int | None, vocabulary: Vocabulary
    ) -> None:
        self._candidates = candidates
        self._target_vocab = vocab_size or model_vocab
        self._shared_vocab = min(self._target_vocab, model_vocab)
        self._vocabulary = vocabulary
        self._histories: dict[int, History] = {}
        self._round = 0

    def start_round(self) -> None:
        """Draws of law-shipping rows are fresh in every round."""
        self._round += 1

    def restart(self, first_round: int) -> None:
        """Count rounds from here on: two drafters of one sequence must never make the same draws."""
        self._round = first_round

    def begin(self, view: SequenceView, spread: int = 0) -> Draft:
        """A draft of what follows the view's tokens."""
        most = min(view.k, self._candidates.most)
        sampling = self._candidates.sampling(view.sampling)
        return Draft(view, sampling, self._round, most, self._history(view), spread=spread)

    def plant(self, view: SequenceView, branching: Branching) -> Growth:
        """A tree of what may follow the view's tokens."""
        depth = min(view.k, branching.depth, self._candidates.most)
        return Growth(view, self._candidates.sampling(view.sampling), self._history(view), branching, depth)

    def close(self, sequence: int) -> None:
        """Forget a sequence. Unknown ids are ignored."""
        self._histories.pop(sequence, None)

    def extend(self, logits_BV: torch.Tensor, drafts: Sequence[Draft]) -> None:
        """One token more for each draft from its row, or none where the row is too unsure."""
        logits_BV, possible = self._process(logits_BV, [draft.history for draft in drafts], [()] * len(drafts))
        sure = self._candidates.confident(logits_BV)
        for draft, keep, some in zip(drafts, sure, possible, strict=True):
            draft.stopped |= not (keep and some)
        going = [n for n, draft in enumerate(drafts) if not draft.stopped]
        if going:
            rows_BV = (
                logits_BV if len(going) == len(drafts) else logits_BV[torch.tensor(going, device=logits_BV.device)]
            )
            _draw(rows_BV, [drafts[n] for n in going])

    def branch(self, logits_BV: torch.Tensor, trees: Sequence[Growth]) -> None:
        """One level more of each tree, from a row of logits for each of its nodes in front.

        Where the target draws with noise that the drafter knows too, the noise decides here as it does there;
        else only the law does: the nodes must not depend on chance.
        """
        of = [tree for tree in trees for _ in tree.front]
        supposed = [path for tree in trees for path in tree.supposed()]
        logits_BV, possible = self._process(logits_BV, [tree.history for tree in of], supposed)
        sure = self._candidates.confident(logits_BV)
        shape = Shape.of([tree.sampling for tree in of])
        scores_BV = shape_logits(logits_BV, shape).float()
        noisy = [n for n, tree in enumerate(of) if tree.view.rule not in LAW_RULES and not tree.sampling.greedy]
        if noisy:
            keys = [noise_key(of[n].view.sampling.seed, len(of[n].view.tokens) + len(supposed[n])) for n in noisy]
            scores_BV = scores_BV.clone()
            scores_BV[noisy] += gumbel(keys, scores_BV.shape[1], scores_BV.device)
        children = iter(_likeliest(scores_BV, of, [keep and some for keep, some in zip(sure, possible, strict=True)]))
        for tree in trees:
            tree.add([next(children) for _ in tree.front])

    def _history(self, view: SequenceView) -> History | None:
        history = self._histories.get(view.id)
        if history is None:
            # Names of plugged-in processors are left out with what they name.
            named = view.sampling.logits_processors
            sampling = replace(view.sampling, logits_processors=()) if named else view.sampling
            history = History(view.tokens[: view.prompt_len], sampling, self._vocabulary)
            self._histories[view.id] = history
        if not history.matters:
            return None
        history.catch_up(view.tokens)
        return history

    def _process(
        self, logits_BV: torch.Tensor, histories: Sequence[History | None], supposed: Sequence[Sequence[int]]
    ) -> tuple[torch.Tensor, list[bool]]:
        """What the requests' processors make of the logits, in the vocabulary both models share.

        And whether any token is possible there. supposed: drafts before a row that its history lacks.
        """
        possible = [True] * len(histories)
        if all(history is None for history in histories):
            return logits_BV[:, : self._shared_vocab], possible
        wide_BV = logits_BV.new_full((len(histories), self._target_vocab), float("-inf"))
        wide_BV[:, : self._shared_vocab] = logits_BV[:, : self._shared_vocab]
        for n, (history, path) in enumerate(zip(histories, supposed, strict=True)):
            if history is not None:
                history.apply(wide_BV[n : n + 1], [path])
                possible[n] = not history.blocked and bool(wide_BV[n, : self._shared_vocab].max() > float("-inf"))
        return wide_BV[:, : self._shared_vocab], possible


def _likeliest(scores_BV: torch.Tensor, of: Sequence[Growth], going: Sequence[bool]) -> list[list[tuple[int, float]]]:
    """The best tokens of each row with the log of their share, as many as its tree is wide."""
    width = min(scores_BV.shape[1], max(tree.branching.width for tree in of))
    values, ids = torch.log_softmax(scores_BV, dim=1).topk(width, dim=1)
    return [
        [pair for pair in zip(row_ids, row, strict=True) if pair[1] > float("-inf")] if going_on else []
        for row_ids, row, going_on in zip(ids.tolist(), values.tolist(), going, strict=True)
    ]


def _draw(logits_BV: torch.Tensor, drafts: Sequence[Draft]) -> None:
    shape = Shape.of([draft.sampling for draft in drafts])
    shaped_BV = shape_logits(logits_BV, shape)
    if any(draft.sampled for draft in drafts):
        cut = [
            _note_law(draft, row_V) if draft.sampled else row_V for draft, row_V in zip(drafts, shaped_BV, strict=True)
        ]
        shaped_BV = torch.stack(cut)
    keys = [draft.key for draft in drafts]
    _note_likely(shaped_BV, drafts, keys)
    tokens = draw(shaped_BV, shape, keys).tolist()
    for draft, token in zip(drafts, tokens, strict=True):
        draft.take(token)


def _note_likely(shaped_BV: torch.Tensor, drafts: Sequence[Draft], keys: Sequence[int]) -> None:
    """For drafts that look ahead: tokens the target may well say here, likeliest first, were the draft's law its own.

    Where it draws with the noise the draft draws with, that noise is known and counts; where it
    draws with other noise, only the law is known.
    """
    spread = max((draft.spread for draft in drafts), default=0)
    if not spread:
        return
    noisy = [n for n, draft in enumerate(drafts) if draft.spread and not (draft.sampled or draft.sampling.greedy)]
    scores_BV = shaped_BV
    if noisy:
        scores_BV = shaped_BV.clone()
        scores_BV[noisy] += gumbel([keys[n] for n in noisy], shaped_BV.shape[1], shaped_BV.device)
    values_BS, ids_BS = scores_BV.topk(min(spread, shaped_BV.shape[1]))
    possible_B = (values_BS > float("-inf")).sum(dim=1).tolist()
    for draft, ids, possible in zip(drafts, ids_BS.tolist(), possible_B, strict=True):
        if draft.spread:
            draft.ranks.append(tuple(ids[: min(draft.spread, possible)]))


def _note_law(draft: Draft, shaped_V: torch.Tensor) -> torch.Tensor:
    """Cut a row to its top m, record that law, and return its log weights."""
    values, ids = shaped_V.topk(min(TOP_M, shaped_V.numel()))
    probs = torch.softmax(values.double(), dim=0)
    draft.ids.append(ids.cpu().numpy())
    draft.probs.append(probs.cpu().numpy())
    cut = torch.full_like(shaped_V, float("-inf"))
    cut[ids] = values
    return cut
