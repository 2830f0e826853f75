"""Same tokens? Every proposer against none, none against transformers, alone against a batch.

Against transformers in two ways: every answer is confirmed by one forward pass of the stock model over
prompt and answer (each token must be the likeliest after those before it, which by induction makes the
answer the one `generate` gives), and --stock of them also by `generate` itself.

Float32. Two answers count as the same up to the first position whose two best tokens (noise
included) lie closer than 1e-4 in the reference's float32 logits (law 0); such near-ties are
listed with their gaps. Anything else is a failure and the exit code says so.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from benchmarks.protocol import Outcome, Prompt, arguments, read_prompts, report, run
from cluster.build import Assembly, assemble
from cluster.config import DraftConfig, EngineConfig, KnobConfig, SchedulerConfig, TargetConfig
from cluster.config_drafts import ModelDraft, NgramDraft, SuffixDraft
from cluster.model.load import load_model, locate
from cluster.model.sample import gumbel, noise_key
from cluster.request import Request, Sampling, Speculation

TIE = 1e-4
NGRAM = NgramDraft(kind="ngram")
#: The target without four of its middle layers: wrong often enough to matter, right often enough too.
LAYERS = ModelDraft(kind="model", model="target", layers=tuple(n for n in range(30) if n not in (10, 13, 16, 19)))
PROPOSERS: dict[str, tuple[DraftConfig, ...]] = {
    "none": (),
    "ngram": (NGRAM,),
    "suffix": (SuffixDraft(kind="suffix"),),
    "model": (LAYERS,),
}


@dataclass(frozen=True)
class Divergence:
    prompt: str
    position: int
    gap: float


def assembly(model: str, drafts: tuple[DraftConfig, ...], batch: int) -> Assembly:
    return assemble(
        EngineConfig(
            target=TargetConfig(model=model, dtype="float32"),
            drafts=drafts,
            scheduler=SchedulerConfig(max_sequences=batch, max_waiting=4096),
            knobs=KnobConfig(k=5, adaptive=False),
        )
    )


def requests(prompts: Sequence[Prompt], temperature: float, tokens: int) -> list[Request]:
    return [
        Request(prompt.name, prompt.ids, Sampling(max_tokens=tokens, temperature=temperature, seed=seed))
        for seed, prompt in enumerate(prompts)
    ]


class Reference:
    """transformers, float32, its own attention."""

    def __init__(self, model: str, eos_ids: frozenset[int]) -> None:
        self._module = load_model(locate(model), dtype=torch.float32, device=torch.device("cpu")).module
        self._eos = sorted(eos_ids)

    def generate(self, prompts: Sequence[Prompt], tokens: int, batch: int = 8) -> dict[str, tuple[int, ...]]:
        """Greedy answers, prompts of like length together, padded on the left."""
        answers = {}
        ordered = sorted(prompts, key=lambda prompt: len(prompt.ids))
        for start in range(0, len(ordered), batch):
            group = ordered[start : start + batch]
            width = max(len(prompt.ids) for prompt in group)
            ids = torch.tensor([[0] * (width - len(p.ids)) + list(p.ids) for p in group])
            mask = torch.tensor([[0] * (width - len(p.ids)) + [1] * len(p.ids) for p in group])
            out = self._module.generate(
                input_ids=ids,
                attention_mask=mask,
                do_sample=False,
                max_new_tokens=tokens,
                eos_token_id=self._eos,
                pad_token_id=self._eos[0],
            )
            for prompt, row in zip(group, out[:, width:].tolist(), strict=True):
                answers[prompt.name] = self._cut(row)
        return answers

    def confirm(self, prompts: Sequence[Prompt], answers: dict[str, tuple[int, ...]]) -> list[Divergence]:
        """Where a greedy answer is not the stock model's choice, given the tokens before."""
        found = []
        for prompt in prompts:
            answer = answers[prompt.name]
            ids = torch.tensor([[*prompt.ids, *answer[:-1]]])
            with torch.inference_mode():
                logits = self._module(input_ids=ids, logits_to_keep=len(answer)).logits[0].float()
            best = logits.argmax(dim=1)
            for position, (token, choice) in enumerate(zip(answer, best.tolist(), strict=True)):
                if token != choice:
                    gap = float(logits[position, choice] - logits[position, token])
                    found.append(Divergence(prompt.name, position, gap))
                    break
        return found

    def gap(self, prompt: Prompt, before: Sequence[int], temperature: float, seed: int) -> float:
        """Distance between the two best tokens after `before`, noise included."""
        ids = [*prompt.ids, *before]
        with torch.inference_mode():
            logits = self._module(input_ids=torch.tensor([ids]), logits_to_keep=1).logits[0, -1].float()
        if temperature > 0:
            logits = logits / temperature + gumbel([noise_key(seed, len(ids))], logits.numel(), logits.device)[0]
        best = logits.topk(2).values
        return float(best[0] - best[1])

    def _cut(self, row: Sequence[int]) -> tuple[int, ...]:
        ends = [at for at, token in enumerate(row) if token in self._eos]
        return tuple(row[: ends[0] + 1]) if ends else tuple(row)


def compare(
    prompts: Sequence[Prompt],
    left: dict[str, tuple[int, ...]],
    right: dict[str, tuple[int, ...]],
    reference: Reference,
    temperature: float,
) -> list[Divergence]:
    found = []
    for seed, prompt in enumerate(prompts):  # the seed `requests` gave it
        if prompt.name not in left or prompt.name not in right:
            continue
        a, b = left[prompt.name], right[prompt.name]
        if a != b:
            at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
            found.append(Divergence(prompt.name, at, reference.gap(prompt, a[:at], temperature, seed)))
    return found


def show(label: str, count: int, divergences: Sequence[Divergence], outcome: Outcome | None) -> bool:
    ties = [d for d in divergences if d.gap < TIE]
    wrong = [d for d in divergences if d.gap >= TIE]
    extra = f", tau {outcome.tau:.2f}, acceptance {outcome.acceptance:.2f}" if outcome else ""
    print(f"{label}: {count - len(divergences)}/{count} identical, {len(ties)} near-ties, {len(wrong)} wrong{extra}")
    for divergence in divergences:
        print(f"    {divergence.prompt} at token {divergence.position}: gap {divergence.gap:.2e}")
    sys.stdout.flush()
    return not wrong


def main() -> int:
    parser = arguments(__doc__ or "")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--count", type=int, default=None, help="prompts of each file; default all")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--stock", type=int, default=40, help="how many prompts `generate` answers too")
    parser.add_argument("--alone", type=int, default=60, help="how many prompts are also run alone")
    options = parser.parse_args()
    start = time.perf_counter()
    plain = assembly(options.model, (), options.batch)
    prompts = [
        prompt
        for kind in ("code", "chat")
        for prompt in read_prompts(options.data, kind, plain.tokenizer, options.count)
    ]
    reference = Reference(options.model, plain.tokenizer.eos_ids)
    results: dict[str, object] = {"prompts": len(prompts)}
    good = True

    def judge(
        label: str,
        divergences: list[Divergence],
        outcome: Outcome | None = None,
        of: Sequence[Prompt] = prompts,
    ) -> None:
        nonlocal good
        good &= show(label, len(of), divergences, outcome)
        results[label] = [(d.prompt, d.position, d.gap) for d in divergences]

    base: dict[float, dict[str, tuple[int, ...]]] = {}
    for temperature in (0.0, 1.0):
        base[temperature] = run(plain.engine, requests(prompts, temperature, options.tokens)).tokens
    judge("greedy, none confirmed by transformers", reference.confirm(prompts, base[0.0]))
    some = prompts[:: max(1, len(prompts) // options.stock)]
    generated = reference.generate(some, options.tokens)
    judge("greedy, none against transformers generate", compare(some, generated, base[0.0], reference, 0.0), of=some)
    for name, drafts in PROPOSERS.items():
        if not drafts:
            continue
        made = assembly(options.model, drafts, options.batch)
        for temperature in (0.0, 1.0):
            outcome = run(made.engine, requests(prompts, temperature, options.tokens))
            judge(
                f"temperature {temperature:g}, {name} against none, batch of {options.batch}",
                compare(prompts, base[temperature], outcome.tokens, reference, temperature),
                outcome,
            )
    solo = assembly(options.model, (NGRAM,), 1)
    for name, speculate in (("ngram", True), ("none", False)):
        alone = [
            replace(request, speculation=Speculation(enabled=speculate))
            for request in requests(prompts, 1.0, options.tokens)[:: max(1, len(prompts) // options.alone)]
        ]
        outcome = run(solo.engine, alone)
        judge(
            f"temperature 1, {name} alone against none in a batch of {options.batch}",
            compare(prompts, base[1.0], outcome.tokens, reference, 1.0),
            outcome,
            of=[prompt for prompt in prompts if prompt.name in outcome.tokens],
        )
    print(f"{time.perf_counter() - start:.0f} s")
    report("exactness", options.out, results)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
