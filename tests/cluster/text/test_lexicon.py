"""Bytes of tokens: joined they are the text, whatever kind of tokenizer wrote them; and what is found by them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from cluster.model.files import ModelFiles
from cluster.text.lexicon import Lexicon, read_lexicon
from cluster.text.tokenizer import Tokenizer

TEXTS = ["def f(x):\n    return x", " 你好、世界", "🎉👩‍👩‍👧‍👦 naïve café", "a\tb\r\n\n", " the cat and the dog"]


def joined(lexicon: Lexicon, ids: list[int]) -> bytes:
    return b"".join(lexicon[token] for token in ids)


def test_bytes_of_a_byte_level_tokenizer(smollm2: ModelFiles, tiny_llama: Path) -> None:
    for tokenizer in (Tokenizer.load(smollm2.directory), Tokenizer.load(tiny_llama)):
        for text in TEXTS:
            assert joined(tokenizer.lexicon, tokenizer.encode_plain(text)) == text.encode()
        end = tokenizer.token_id("<|im_end|>")
        assert end is not None
        assert tokenizer.lexicon[end] == b""  # a text leaves it out
        assert tokenizer.lexicon[10**6] == b""


def test_bytes_of_a_tokenizer_that_marks_spaces() -> None:
    pieces = ["▁", "▁the", "▁cat", "s", *(f"<0x{byte:02X}>" for byte in range(256))]
    backend = Backend(models.BPE({piece: n for n, piece in enumerate(pieces)}, [], byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_tokens([AddedToken("<tool>", special=False), AddedToken("<end>", special=True)])
    lexicon = read_lexicon(backend)
    ids = [1, 2, 3, 4 + 0xF0, 4 + 0x9F, 4 + 0x8E, 4 + 0x89, 260, 261, 0]
    assert joined(lexicon, ids) == " the cats🎉<tool> ".encode() == backend.decode(ids).encode()


def test_bytes_of_a_tokenizer_of_another_kind() -> None:
    backend = Backend(models.WordPiece({"[UNK]": 0, "the": 1, "##re": 2, "cat": 3}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece()
    lexicon = read_lexicon(backend)
    assert joined(lexicon, [1, 2, 3]) == b" there cat" == f" {backend.decode([1, 2, 3])}".encode()


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.lists(st.binary(max_size=4), max_size=30), st.binary(min_size=1, max_size=3))
@pytest.mark.parametrize("narrow", [True, False])
def test_what_is_found_is_what_a_look_at_every_token_finds(narrow: bool, spelled: list[bytes], part: bytes) -> None:
    if narrow:  # few letters: much is found
        spelled = [bytes(byte % 2 for byte in piece) for piece in spelled]
        part = bytes(byte % 2 for byte in part)
    lexicon = Lexicon(spelled)
    assert lexicon.containing(part).tolist() == [n for n, piece in enumerate(spelled) if part in piece]
    assert sorted(lexicon.starting(part).tolist()) == [n for n, piece in enumerate(spelled) if piece.startswith(part)]
