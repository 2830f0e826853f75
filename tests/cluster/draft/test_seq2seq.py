"""An encoder-decoder draft: its prompt is read once and its decoder's memory is always right."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM

from cluster.draft.candidates import Candidates
from cluster.draft.seq2seq import Seq2SeqProposer
from cluster.errors import ModelCorrupt, ModelUnsupported
from cluster.messages import Knobs, SequenceView
from cluster.model.load import locate
from cluster.model.quiet import quiet_transformers
from cluster.model.sample import Shape, draw, noise_key, shape_logits
from cluster.model.seq2seq import Recall, Seq2SeqModel, load_seq2seq
from cluster.request import Sampling
from tests.tiny import make_tiny_seq2seq

PROMPT = [40, 41, 42, 43, 44]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_seq2seq(tmp_path_factory.mktemp("t5"))


class Counted(Seq2SeqModel):
    """Counts what is read and fed."""

    reads = 0
    fed = 0

    def read(self, prompt: list[int]) -> Recall:
        self.reads += 1
        return super().read(prompt)

    def feed(self, recall: Recall, tokens: list[int]) -> torch.Tensor:
        self.fed += len(tokens)
        return super().feed(recall, tokens)


@pytest.fixture
def model(directory: Path) -> Counted:
    loaded = load_seq2seq(locate(str(directory)), dtype=torch.float32, device=torch.device("cpu"))
    return Counted(loaded._module)


def view(answer: list[int], k: int = 4, sequence: int = 0, **fields: object) -> SequenceView:
    greedy = Sampling(99, temperature=0.0)
    tokens = [*PROMPT, *answer]
    made = SequenceView(sequence, tokens, len(PROMPT), len(tokens) - 1, greedy, "coupled", "", None, k, 99)
    return replace(made, **fields)  # type: ignore[arg-type]


def one(made: Seq2SeqProposer, shown: SequenceView) -> tuple[int, ...]:
    offers = made.propose([shown], Knobs())
    return offers[0].tokens if offers else ()


def follow(model: Seq2SeqModel, answer: list[int], k: int) -> tuple[int, ...]:
    """What the modelling code says without any cache."""
    known = [model.start_id, *answer]
    for _ in range(k):
        with torch.inference_mode():
            output = model._module(input_ids=torch.tensor([PROMPT]), decoder_input_ids=torch.tensor([known]))
        known.append(int(output.logits[0, -1].argmax()))
    return tuple(known[len(answer) + 1 :])


def test_it_drafts_what_transformers_generates(model: Counted, directory: Path) -> None:
    with quiet_transformers():
        module = AutoModelForSeq2SeqLM.from_pretrained(directory)
    out = module.generate(torch.tensor([PROMPT]), do_sample=False, max_new_tokens=6, eos_token_id=None)
    assert one(Seq2SeqProposer(model, 8), view([], k=6)) == tuple(out[0, 1:].tolist())


@pytest.mark.parametrize("stood", [0, 1, 2, 4])
def test_after_any_verdict_it_builds_on_what_is_known(model: Counted, stood: int) -> None:
    for bonus in (*follow(model, [], 5)[stood : stood + 1], 7, 90):
        made = Seq2SeqProposer(model, 8)
        answer = [*one(made, view([]))[:stood], bonus]
        assert one(made, view(answer)) == follow(model, answer, 4)


def test_the_prompt_is_read_once_and_nothing_twice(model: Counted) -> None:
    made = Seq2SeqProposer(model, 8)
    answer: list[int] = []
    for _ in range(6):
        drafted = one(made, view(answer))
        answer += drafted[:2]
        answer.append(5)
    assert model.reads == 1
    # the start token and three drafts; from then on the token that corrected it and three drafts
    assert model.fed == 6 * 4


def test_the_same_view_twice_gives_the_same_drafts(model: Counted) -> None:
    made = Seq2SeqProposer(model, 8)
    assert one(made, view([9])) == one(made, view([9])) == follow(model, [9], 4)


def test_it_draws_with_the_targets_noise_under_coupled(model: Counted) -> None:
    warm = Sampling(99, temperature=1.5, seed=4)
    made = Seq2SeqProposer(model, 8)
    drafted = one(made, view([3], sampling=warm))
    recall = model.read(PROMPT)
    shape = Shape.of([warm])
    known = [model.start_id, 3]
    for number, token in enumerate(drafted):
        logits = model.feed(recall, known)[None]
        assert token == int(draw(shape_logits(logits, shape), shape, [noise_key(4, len(PROMPT) + 1 + number)])[0])
        known = [token]


@pytest.mark.parametrize("rule", ["ratio", "block"])
def test_under_a_rule_that_reads_laws_it_samples_and_ships_the_law(model: Counted, rule: str) -> None:
    """At each position the law after every processor of the request, penalties on drafted tokens included."""
    warm = Sampling(99, temperature=20.0, seed=4, top_k=20, frequency_penalty=2.0, allowed_ids=tuple(range(30)))
    made = Seq2SeqProposer(model, 8)
    drafted = set()
    for _ in range(4):
        (offer,) = made.propose([view([3], sampling=warm, rule=rule)], Knobs())
        recall = model.read(PROMPT)
        logits, answer = model.feed(recall, [model.start_id, 3]).double(), [3]
        assert offer.law is not None
        for slot, token in enumerate(offer.tokens):
            for seen in answer:
                logits[seen] -= 2.0
            logits[30:] = float("-inf")
            values, ids = (logits / 20.0).topk(20)
            law = dict(zip(ids.tolist(), torch.softmax(values, dim=0).tolist(), strict=True))
            shipped = {i: p for i, p in zip(offer.law.ids[slot], offer.law.probs[slot], strict=True) if p > 0}
            assert shipped == pytest.approx(law, abs=1e-5)
            assert token in law
            answer.append(token)
            logits = model.feed(recall, [token]).double()
        drafted.add(offer.tokens)
    assert len(drafted) > 1  # fresh draws in every round


def test_it_stops_when_unsure_and_at_its_own_length(model: Counted) -> None:
    assert one(Seq2SeqProposer(model, 8, Candidates(min_confidence=1.0)), view([])) == ()
    assert len(one(Seq2SeqProposer(model, 8, Candidates(most=2)), view([]))) == 2


def test_ids_it_does_not_have_silence_it_and_ids_only_it_has_are_never_drawn(model: Counted) -> None:
    made = Seq2SeqProposer(model, 8)
    assert one(made, view([model.vocab_size])) == ()
    narrow = Seq2SeqProposer(model, 8, vocab_size=10)
    assert all(token < 10 for token in one(narrow, view([], k=9)))


def test_few_are_held_and_those_let_go_are_read_again(model: Counted) -> None:
    made = Seq2SeqProposer(model, 2)
    for sequence in (0, 1, 2, 0, 1, 2):
        assert one(made, view([8], sequence=sequence)) == follow(model, [8], 4)
        assert made.held <= 2
    assert model.reads == 6


def test_nothing_grows_over_a_thousand_requests(model: Counted) -> None:
    made = Seq2SeqProposer(model, 8)
    for sequence in range(1000):
        made.open(view([], sequence=sequence))
        if sequence % 20 == 0:
            one(made, view([], sequence=sequence, k=1))
        made.close(sequence)
        made.close(sequence)
    assert made.held == 0


def test_a_decoder_is_refused(tiny_llama: Path) -> None:
    with pytest.raises(ModelUnsupported, match="no encoder-decoder"):
        load_seq2seq(locate(str(tiny_llama)), dtype=torch.float32, device=torch.device("cpu"))


def test_a_directory_without_weights_is_refused(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((directory / "config.json").read_bytes())
    with pytest.raises(ModelCorrupt, match="cannot be loaded"):
        load_seq2seq(locate(str(tmp_path)), dtype=torch.float32, device=torch.device("cpu"))
