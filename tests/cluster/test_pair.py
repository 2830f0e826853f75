"""The benchmarks' pair, after `make pair`: one vocabulary, and drafts that change no token in float32."""

from __future__ import annotations

import pytest

from cluster.build import assemble
from cluster.config import EngineConfig, KnobConfig, ModelDraft, SchedulerConfig, TargetConfig
from cluster.model.load import locate
from cluster.request import Request, Sampling, Speculation
from cluster.text.tokenizer import Tokenizer

TARGET, DRAFT = "qwen2.5-coder-1.5b", "qwen2.5-coder-0.5b"
ASKED = "Write a Python function that reverses the words of a sentence."

pytestmark = pytest.mark.soak


def test_the_pair_speaks_one_vocabulary_and_the_template_of_its_family() -> None:
    target, draft = (Tokenizer.load(locate(name).directory) for name in (TARGET, DRAFT))
    target.check_same(draft)
    assert target.vocab_size == 151936
    assert target.eos_ids == {target.token_id("<|im_end|>"), target.token_id("<|endoftext|>")}
    turn = f"<|im_start|>user\n{ASKED}<|im_end|>\n<|im_start|>assistant\n"
    system = "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
    assert target.encode_chat([{"role": "user", "content": ASKED}]) == target.encode(system + turn)
    # The family splits text by a pattern of its own: digits one by one, runs of newlines together.
    assert [target.decode([token]) for token in target.encode("x = 1234\n\n\ny")] == [
        "x", " =", " ", "1", "2", "3", "4", "\n\n\n", "y",
    ]  # fmt: skip


def test_the_draft_changes_no_token_of_the_target() -> None:
    made = assemble(
        EngineConfig(
            target=TargetConfig(model=TARGET, dtype="float32", max_context=512),
            drafts=(ModelDraft(kind="model", model=DRAFT),),
            scheduler=SchedulerConfig(max_sequences=4),
            knobs=KnobConfig(k=5),
        )
    )
    prompts = [
        made.tokenizer.encode_chat([{"role": "user", "content": ASKED}]),
        made.tokenizer.encode("def fibonacci(n):\n"),
    ]
    told: dict[bool, dict[str, list[int]]] = {}
    for drafting in (False, True):
        answers = told.setdefault(drafting, {})
        for index, prompt in enumerate(prompts):
            for temperature in (0.0, 0.8):
                name = f"{index} at {temperature}"
                sampling = Sampling(max_tokens=32, temperature=temperature, seed=7)
                made.engine.submit(Request(name, tuple(prompt), sampling, Speculation(enabled=drafting)))
        accepted = 0
        while made.engine.has_work:
            for delta in made.engine.step():
                answers.setdefault(delta.request, []).extend(delta.tokens)
                if delta.finish is not None:
                    accepted += delta.statistics.accepted
        assert (accepted > 40) is drafting, "half of what is emitted is drafted"
    assert told[True] == told[False]
    assert "return" in made.tokenizer.decode(told[True]["1 at 0.0"])
