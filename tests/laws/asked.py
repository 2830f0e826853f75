"""What may be asked for: every field of a sampling, of a speculation and of the knobs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import get_args

import torch
from hypothesis import strategies as st

from cluster.messages import Knobs
from cluster.model.processors import LogitsProcessor
from cluster.request import (
    FixedThreshold,
    FollowingThreshold,
    RuleName,
    Sampling,
    ScheduledThreshold,
    Speculation,
)
from tests.laws.schedules import (
    rich_samplings,
    tokens,
)


def tilted(seen: Sequence[int], logits_V: torch.Tensor) -> torch.Tensor:
    """Depends on every token before the position."""
    return logits_V + torch.tensor([float(sum(seen) * (token + 3) % 7) for token in range(len(logits_V))])


def unrepeated(seen: Sequence[int], logits_V: torch.Tensor) -> torch.Tensor:
    logits_V[seen[-1]] = float("-inf")
    return logits_V


def broken(seen: Sequence[int], logits_V: torch.Tensor) -> torch.Tensor:
    if seen[-1] == 3:
        raise ZeroDivisionError("three")
    return logits_V * float("nan") if sum(seen) % 11 == 0 else logits_V


PLUGGED: Mapping[str, LogitsProcessor] = {"tilted": tilted, "unrepeated": unrepeated, "broken": broken}

sequences = st.lists(tokens, min_size=1, max_size=3).map(tuple)
words = st.text("abcdef", min_size=1, max_size=4)


@st.composite
def every_samplings(draw: st.DrawFn, plugged: Sequence[str] = tuple(PLUGGED)) -> Sampling:
    """`rich_samplings` and everything beside; about half of each is switched off."""
    base = draw(rich_samplings)
    budget = draw(st.one_of(st.none(), st.integers(0, 12)))
    return replace(
        base,
        min_tokens=draw(st.one_of(st.just(0), st.integers(0, base.max_tokens))),
        include_stop=draw(st.booleans()),
        allowed_ids=draw(st.one_of(st.none(), st.lists(tokens, min_size=1, max_size=5).map(tuple))),
        bad_ids=draw(st.one_of(st.just(()), st.lists(sequences, max_size=4).map(tuple))),
        bad_words=draw(st.one_of(st.just(()), st.lists(words, max_size=3).map(tuple))),
        thinking_tokens=budget,
        think_end=() if budget is None else draw(sequences),
        prompt_logprobs=draw(st.sampled_from((None, None, 0, 2))),
        logits_processors=tuple(draw(st.lists(st.sampled_from(sorted(plugged)), unique=True, max_size=1))),
    )


#: What goes on and off together.
FEATURES: Sequence[tuple[str, ...]] = (
    *((field.name,) for field in fields(Sampling) if field.name not in {"thinking_tokens", "think_end", "max_tokens"}),
    ("thinking_tokens", "think_end"),
)


@st.composite
def some_samplings(draw: st.DrawFn) -> Sampling:
    """At most four wishes at once, and otherwise long answers: those that wish for everything seldom last."""
    every = draw(every_samplings())
    kept = {name for group in draw(st.lists(st.sampled_from(FEATURES), max_size=4)) for name in group}
    longest = draw(st.integers(1, 24))
    plain = Sampling(max_tokens=longest, temperature=every.temperature, seed=every.seed, ignore_eos=True)
    sampling = replace(plain, **{name: getattr(every, name) for name in kept if name != "min_tokens"})
    return replace(sampling, min_tokens=min(longest, every.min_tokens)) if "min_tokens" in kept else sampling


thresholds = st.sampled_from((None, FixedThreshold(0.2), ScheduledThreshold(every=2), FollowingThreshold()))


def every_speculations(methods: Sequence[str]) -> st.SearchStrategy[Speculation]:
    return st.builds(
        Speculation,
        enabled=st.sampled_from((True, True, True, True, False)),
        k=st.sampled_from((None, None, None, 1, 3, 7, 0)),
        rule=st.sampled_from((None, None, "coupled", *get_args(RuleName))),
        method=st.sampled_from((None, None, *methods)),
        threshold=thresholds,
        max_retries=st.sampled_from((None, 3, 8)),
    )


every_knobs = st.builds(
    Knobs,
    k=st.sampled_from((4, 1, 2, 3, 5, 6, 0)),
    rule=st.sampled_from((*("coupled",) * 5, *get_args(RuleName))),
    token_budget=st.integers(1, 24),
    adaptive=st.booleans(),
    tree_nodes=st.sampled_from((16, 16, 6, 0)),
    max_retries=st.integers(3, 8),
)
