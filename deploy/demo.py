"""Three questions to a model served on this machine, with and without speculation.

Knows: what to ask, what to show, and what would make the demonstration a failure.
Refuses to know: how anything is served or generated; it speaks HTTP as any client does.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from cluster.errors import BrokenInvariant, OutriderError
from deploy.client import Client
from deploy.local import LocalServing, ServeFile, free_port
from deploy.results import Usage

Report = Callable[[str], None]

#: Measured runs of each kind for each question; the two kinds take turns.
REPEATS = 3
#: With equal weights and text, two answers may part only where the likeliest two tokens are this close
#: (difference of log-probabilities) for the type the model computes in.
NEAR_TIE = {"float32": 1e-3, "bfloat16": 0.15, "float16": 0.02}

PASSAGE = """\
The lighthouse on Hale Point was built in 1871 after three ships were lost on the reef in a single \
winter. Its first keeper, Ada Marsh, kept the lamp burning for thirty-four years and wrote down the \
weather four times a day. When the harbour authority replaced the oil lamp with an electric one in \
1926, the keeper's house became a school, and later a weather station. In 1983 the light was switched \
to automatic operation and the last keeper moved to the village. Today volunteers look after the \
tower, and Ada Marsh's notebooks, which cover more than twelve thousand days, are used by scientists \
who study how the storms of this coast have changed."""

QUESTIONS = (
    ("chat", "A friend of mine has never seen the sea. Describe it to them in a few sentences."),
    ("a function", "Write a Python function median(values) that returns the median of a list of numbers. "
                   "Give it a docstring and one example of its use."),
    ("a summary", f"Summarize the following text in two sentences.\n\n{PASSAGE}"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Run:
    """One answer and how long it took, from sending the question to its last byte, in seconds."""

    text: str
    took_s: float
    usage: Usage

    @property
    def speed(self) -> float:
        """Tokens a second."""
        return self.usage.completion_tokens / self.took_s


def run(file: ServeFile, report: Report, max_tokens: int) -> int:
    """Serve, ask, show, end. Returns the exit code; raises OutriderError on any failure."""
    began = time.monotonic()
    file = replace(file, host="127.0.0.1", port=free_port())
    with LocalServing(file, report) as serving, Client(file.url) as client:
        [model] = client.models()
        report(f"serving {model.id} ({model.details['dtype']} on {model.details['device']}) at {file.url}/v1")
        for number, (title, question) in enumerate(QUESTIONS, 1):
            serving.check()
            print(f"\n=== {number} of {len(QUESTIONS)}: {title} ===\n> {question}\n", flush=True)
            _ask(client, question, max_tokens, show=lambda text: print(text, end="", flush=True))
            print("\n", flush=True)
            _compare(client, question, max_tokens, report, model.details["dtype"])
    report(f"done in {time.monotonic() - began:.0f} s")
    return 0


def _compare(client: Client, question: str, max_tokens: int, report: Report, dtype: str) -> None:
    """Measure one question both ways, in turns: whatever else the machine does meets both alike."""
    runs: dict[bool, list[Run]] = {True: [], False: []}
    for repeat in range(REPEATS):
        for speculate in (True, False):
            report(f"measuring, {'with' if speculate else 'without'} speculation, {repeat + 1} of {REPEATS}")
            runs[speculate].append(_ask(client, question, max_tokens, speculate))
    drafted, plain = runs[True], runs[False]
    fast, slow = (statistics.median(one.speed for one in kind) for kind in (drafted, plain))
    usage = drafted[-1].usage
    same = {one.text for kind in (drafted, plain) for one in kind}
    print(f"\n  with speculation     {fast:6.1f} tokens/s")
    print(f"  without              {slow:6.1f} tokens/s    ({fast / slow:.2f}x, medians of {REPEATS}, taking turns)")
    print(f"  drafts accepted      {usage.acceptance:6.0%}             ({usage.accepted} of {usage.drafted})")
    print(f"  tokens a target step {usage.tokens_per_step:6.2f}")
    if len(same) == 1:
        print("  same answer          every time", flush=True)
    else:
        print(f"  same answer          {_explain(client, question, max_tokens, dtype)}", flush=True)


def _ask(
    client: Client, question: str, max_tokens: int, speculate: bool = True, show: Callable[[str], None] | None = None
) -> Run:
    """One streamed answer, the likeliest token at every place."""
    began, parts, usage = time.monotonic(), [], None
    options: dict[str, Any] = {"temperature": 0, "max_tokens": max_tokens, "speculation": {"enabled": speculate}}
    for chunk in client.chat([{"role": "user", "content": question}], stream=True, **options):
        parts.append(chunk.text)
        usage = chunk.usage or usage
        if show is not None:
            show(chunk.text)
    took = time.monotonic() - began
    if usage is None or usage.completion_tokens == 0:
        raise OutriderError("the server sent an answer without tokens")
    if not speculate and usage.drafted:
        raise BrokenInvariant(f"{usage.drafted} tokens were drafted although speculation was off")
    return Run("".join(parts), took, usage)


def _explain(client: Client, question: str, max_tokens: int, dtype: str) -> str:
    """Where the answers part, and that it is a near-tie there. Raises BrokenInvariant when it is not."""
    options: dict[str, Any] = {"temperature": 0, "max_tokens": max_tokens, "logprobs": True, "top_logprobs": 2}
    told = [
        client.chat([{"role": "user", "content": question}], speculation={"enabled": on}, **options).choices[0].logprobs
        for on in (True, False)
    ]
    with_drafts, plain = ([] if one is None else one["content"] for one in told)
    for place, (one, other) in enumerate(zip(with_drafts, plain, strict=False)):
        if one["token"] != other["token"]:
            first, second = other["top_logprobs"]
            gap = first["logprob"] - second["logprob"]
            if gap > NEAR_TIE[dtype]:
                raise BrokenInvariant(
                    f"speculation changed the answer at token {place}: the gap there is {gap:.4f}, no near-tie"
                )
            return f"up to token {place}, a near-tie (gap {gap:.4f}, within what {dtype} can tell apart)"
    return "when asked again (a near-tie went both ways)"
