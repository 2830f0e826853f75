"""llama.cpp in a contender's process, through llama-cpp-python: a GGUF as it lies on disk, one stream."""

from __future__ import annotations

import time
from importlib.metadata import version
from typing import Any

from llama_cpp import Llama
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding


class LlamaCpp:
    """settings: `gguf` a file, `context`, `threads`; `lookup` tokens of prompt lookup."""

    def __init__(self, settings: dict[str, Any]) -> None:
        lookup = settings.get("lookup")
        self._model = Llama(
            settings["gguf"],
            n_ctx=settings["context"],
            n_batch=512,
            n_threads=settings["threads"],
            n_threads_batch=settings["threads"],
            draft_model=LlamaPromptLookupDecoding(num_pred_tokens=lookup) if lookup else None,
            logits_all=bool(lookup),
            verbose=False,
        )
        self.versions = {"llama-cpp-python": version("llama-cpp-python")}

    def run(self, ask: dict[str, Any]) -> dict[str, Any]:
        """One prompt; greedy, and nothing kept from the run before."""
        (prompt,) = ask["prompts"]
        end = set() if ask.get("whole") else set(ask["end"])
        self._model.reset()
        self._model._ctx.kv_cache_clear()
        tokens: list[int] = []
        times: list[tuple[float, int]] = []
        began = time.perf_counter()
        for token in self._model.generate(prompt, temp=0.0, repeat_penalty=1.0):
            tokens.append(int(token))
            times.append((time.perf_counter() - began, 1))
            if len(tokens) == ask["tokens"] or token in end:
                break
        return {"answers": [{"tokens": tokens, "times": times}], "seconds": time.perf_counter() - began}


def load(settings: dict[str, Any]) -> LlamaCpp:
    return LlamaCpp(settings)
