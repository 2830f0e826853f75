"""transformers in a contender's process: `generate` as it comes, plain, with prompt lookup or with an assistant."""

from __future__ import annotations

import time
from importlib.metadata import version
from typing import Any

import torch
from transformers import AutoModelForCausalLM, StoppingCriteria
from wire import arrivals, kept


class Arrivals(StoppingCriteria):
    """Stops nothing: `generate` calls it after each of its rounds, and it notes when and how long the text was."""

    def __init__(self, width: int) -> None:
        self._began, self._length = time.perf_counter(), width
        self.times: list[tuple[float, int]] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:  # noqa: ARG002
        length = input_ids.shape[1]
        if length > self._length:
            self.times.append((time.perf_counter() - self._began, length - self._length))
            self._length = length
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


class Transformers:
    """settings: `model` a directory, `dtype`, `threads`; `draft`, a directory, is the assistant."""

    def __init__(self, settings: dict[str, Any]) -> None:
        torch.set_num_threads(settings["threads"])
        self._model = _read(settings["model"], settings["dtype"])
        self._assistant = _read(settings["draft"], settings["dtype"]) if settings["draft"] else None
        self.versions = {name: version(name) for name in ("transformers", "torch")}

    def run(self, ask: dict[str, Any]) -> dict[str, Any]:
        """Prompts are padded on the left to the longest. `lookup`: tokens of prompt lookup; `assist`: the draft."""
        prompts, end, whole = ask["prompts"], ask["end"], ask.get("whole", False)
        width, pad = max(map(len, prompts)), min(end)
        ids = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        options = self._speculation(ask) | {"do_sample": False, "max_new_tokens": ask["tokens"], "pad_token_id": pad}
        options |= {"eos_token_id": None, "min_new_tokens": ask["tokens"]} if whole else {"eos_token_id": end}
        arrived = Arrivals(width)
        began = time.perf_counter()
        with torch.inference_mode():
            out = self._model.generate(input_ids=ids, attention_mask=mask, stopping_criteria=[arrived], **options)
        seconds = time.perf_counter() - began
        answers = [kept(row, end, whole) for row in out[:, width:].tolist()]
        return {
            "answers": [{"tokens": a, "times": arrivals(arrived.times, len(a))} for a in answers],
            "seconds": seconds,
        }

    def _speculation(self, ask: dict[str, Any]) -> dict[str, Any]:
        if ask.get("assist"):
            return {"assistant_model": self._assistant}
        return {"prompt_lookup_num_tokens": ask["lookup"]} if ask.get("lookup") else {}


def _read(directory: str, dtype: str) -> Any:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype), local_files_only=True)
    return model.eval()


def load(settings: dict[str, Any]) -> Transformers:
    return Transformers(settings)
