"""Outrider in a contender's process: one assembled engine, and per run what the caller says about drafting."""

from __future__ import annotations

import time
from importlib.metadata import version
from typing import Any

from cluster.build import assemble
from cluster.config import parse
from cluster.messages import Delta
from cluster.request import Request, Sampling, Speculation


class Outrider:
    """settings: `config`, the tree under `args` of ray_config.yaml."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._made = assemble(parse(settings["config"]))
        self._run = 0
        self.versions = {name: version(name) for name in ("outrider", "torch")}

    def run(self, ask: dict[str, Any]) -> dict[str, Any]:
        """`speculation`: fields of a request's speculation, such as {"enabled": false}."""
        engine = self._made.engine
        engine.forget_prefixes()
        self._run += 1  # a salt of its own: what earlier runs taught a proposer helps no later one
        sampling = Sampling(ask["tokens"], temperature=0.0, stop_ids=tuple(ask["end"]), ignore_eos=True)
        if ask.get("whole"):
            sampling = Sampling(ask["tokens"], temperature=0.0, ignore_eos=True)
        speculation = Speculation(**ask.get("speculation", {}))
        asked = [
            Request(str(row), tuple(ids), sampling, speculation, salt=f"run {self._run}")
            for row, ids in enumerate(ask["prompts"])
        ]
        tokens: list[list[int]] = [[] for _ in asked]
        times: list[list[tuple[float, int]]] = [[] for _ in asked]
        last: dict[str, Delta] = {}
        began = time.perf_counter()
        for request in asked:
            engine.submit(request)
        while engine.has_work:
            deltas = engine.step()
            now = time.perf_counter() - began
            for delta in deltas:
                if delta.fault is not None:
                    raise RuntimeError(f"request {delta.request} failed: {delta.fault}")
                last[delta.request] = delta
                tokens[int(delta.request)].extend(delta.tokens)
                if delta.tokens:
                    times[int(delta.request)].append((now, len(delta.tokens)))
        told = [delta.statistics for delta in last.values()]
        return {
            "answers": [{"tokens": a, "times": t} for a, t in zip(tokens, times, strict=True)],
            "seconds": time.perf_counter() - began,
            "rounds": sum(one.rounds for one in told),
            "drafted": sum(one.drafted for one in told),
            "accepted": sum(one.accepted for one in told),
        }


def load(settings: dict[str, Any]) -> Outrider:
    return Outrider(settings)
