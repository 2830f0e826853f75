"""Law 0's stronger half: with `target.deterministic`, the same bits in bfloat16 whatever is computed beside."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.build import Assembly, assemble
from cluster.config import parse
from cluster.errors import ConfigError
from cluster.request import Request, Sampling, Speculation

DRAFTS = [{"kind": "suffix", "tree": True}, {"kind": "ngram"}, {"kind": "model", "layers": {"first": 1}}]
COUNT = 24


def made(model: Path) -> Assembly:
    target = {"model": str(model), "dtype": "bfloat16", "deterministic": True}
    scheduler = {"max_sequences": 64}
    knobs = {"tree_nodes": 64, "k": 6}
    return assemble(parse({"target": target, "drafts": DRAFTS, "scheduler": scheduler, "knobs": knobs}))


def answers(assembly: Assembly, batch: int, method: str | None) -> list[list[tuple[int, float]]]:
    """Tokens and their log-probabilities, for prompts of 3 to 40 tokens that repeat themselves."""
    engine = assembly.engine
    told: dict[str, list[tuple[int, float]]] = {}
    requests = []
    for row in range(COUNT):
        prompt = tuple((row * 7 + at % (2 + row % 5) * 11) % 200 + 1 for at in range(3 + 37 * row % 38))
        sampling = Sampling(8, temperature=row % 2 * 0.8, seed=row, logprobs=1, ignore_eos=True)
        requests.append(Request(str(row), prompt, sampling, Speculation(enabled=method is not None, method=method)))
    for start in range(0, COUNT, batch):
        engine.forget_prefixes()
        for request in requests[start : start + batch]:
            engine.submit(request)
        while engine.has_work:
            for delta in engine.step():
                told.setdefault(delta.request, []).extend((one.token, one.logprob) for one in delta.logprobs)
    return [told[str(row)] for row in range(COUNT)]


def test_bits_do_not_depend_on_the_batch_or_on_drafts(tiny_llama: Path) -> None:
    assembly = made(tiny_llama)
    alone = answers(assembly, 1, None)
    for batch in (7, 24):
        assert answers(assembly, batch, None) == alone
    for method in ("suffix", "ngram", "model"):
        for batch in (5, 24):
            assert answers(assembly, batch, method) == alone, (method, batch)


def test_it_is_refused_where_it_cannot_be_kept(tiny_model: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigError, match=r"target\.deterministic: .* is not run by kernels that keep it"):
        assemble(parse({"target": {"model": str(tiny_model("mixtral")), "deterministic": True}, "drafts": []}))
    with pytest.raises(ConfigError, match="choose one of the two"):
        parse({"target": {"deterministic": True, "tensor_parallel": 2}})
