"""Words of an ask in token ids, where the tokenizer is.

Knows: in which ways a word may be spelled inside an answer.
Refuses to know: HTTP, and how the ids are put into effect.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from cluster.request import Sampling
from cluster.text.tokenizer import Tokenizer
from deploy.asks import Words


def put_in_ids(sampling: Sampling, words: Words, tokenizer: Tokenizer) -> Sampling:
    """`sampling` with the words in it. Raises RequestError when there are too many or they are too long.

    A bad word is forbidden as the tokenizer spells it, at the start of a line and behind a space;
    a model may still put the same text together from other tokens.
    """
    bad = [spelling for word in words.bad for spelling in _spellings(word, tokenizer)]
    sampling = replace(sampling, bad_ids=(*sampling.bad_ids, *dict.fromkeys(bad)))
    if words.thinking_tokens is None:
        return sampling
    end = words.think_end
    ids = tuple(tokenizer.encode_bare(end)) if isinstance(end, str) else end
    return replace(sampling, thinking_tokens=words.thinking_tokens, think_end=ids)


def _spellings(word: str | tuple[int, ...], tokenizer: Tokenizer) -> Iterator[tuple[int, ...]]:
    if not isinstance(word, str):
        yield word
        return
    for text in (word, " " + word.lstrip()):
        ids = tuple(tokenizer.encode_bare(text))
        if ids:
            yield ids
