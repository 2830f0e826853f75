"""Forbidden text: at every position exactly the tokens that would complete a word are impossible."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.model.files import ModelFiles
from cluster.model.history import History
from cluster.model.processors import Vocabulary
from cluster.request import Sampling
from cluster.text.lexicon import Lexicon
from cluster.text.tokenizer import Tokenizer

pieces = st.lists(st.text("ab ", max_size=3).map(str.encode), min_size=1, max_size=12)
words = st.lists(st.text("ab ", min_size=1, max_size=5), min_size=1, max_size=3).map(tuple)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(pieces, words, st.data())
def test_by_definition(spelled: list[bytes], bad: tuple[str, ...], data: st.DataObject) -> None:
    """Said so far, and drafted: a token is impossible where it makes a word appear that was not there."""
    ids = st.lists(st.integers(0, len(spelled) - 1), max_size=6)
    prompt, answer, drafts = [0, *data.draw(ids)], data.draw(ids), data.draw(ids)
    history = History(prompt, Sampling(bad_words=bad), Vocabulary(lexicon=Lexicon(spelled)))
    history.extend(answer)
    logits_PV = torch.zeros(len(drafts) + 1, len(spelled) + 1)  # one id of the model's is padding
    history.apply(logits_PV, [drafts[:slot] for slot in range(len(logits_PV))])
    for slot, logits_V in enumerate(logits_PV):
        said = b"".join(spelled[token] for token in (*answer, *drafts[:slot]))
        for token, piece in enumerate([*spelled, b""]):
            completed = any(appears(said + piece, word.encode(), len(said)) for word in bad)
            assert bool(logits_V[token] == float("-inf")) is completed


def appears(text: bytes, word: bytes, after: int) -> bool:
    """Whether `word` ends in `text` behind its first `after` bytes."""
    return any(text.startswith(word, at) and at + len(word) > after for at in range(len(text)))


def test_no_way_to_spell_it_is_left_in_a_real_vocabulary(smollm2: ModelFiles) -> None:
    """A law that wants a word, cut in every way the tokenizer knows: it comes as far as the last letter."""
    tokenizer = Tokenizer.load(smollm2.directory)
    lexicon = tokenizer.lexicon
    found = 0
    for word in ("secret", " Paris", "你好", "🎉"):
        data = word.encode()
        for cut in range(1, len(data)):
            begin = next((t for t in lexicon.starting(data[:cut]).tolist() if lexicon[t] == data[:cut]), None)
            if begin is None:
                continue
            history = History([1], Sampling(bad_words=(word,)), Vocabulary(lexicon=lexicon))
            history.extend([begin])
            logits_V = torch.zeros(1, tokenizer.vocab_size)
            history.apply(logits_V, [()])
            masked = (logits_V[0] == float("-inf")).nonzero().flatten().tolist()
            assert {lexicon[token] for token in masked} == {
                lexicon[token]
                for token in range(tokenizer.vocab_size)
                if lexicon[token].startswith(data[cut:]) or data in lexicon[token]
            }
            found += len(masked)
    assert found > 20
