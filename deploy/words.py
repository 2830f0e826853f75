"""Words of an ask in token ids, where the tokenizer is.

Knows: how a mark is spelled inside an answer.
Refuses to know: HTTP, and how the ids are put into effect.
"""

from __future__ import annotations

from dataclasses import replace

from cluster.request import Sampling
from cluster.text.tokenizer import Tokenizer
from deploy.asks import Words


def put_in_ids(sampling: Sampling, words: Words, tokenizer: Tokenizer) -> Sampling:
    """`sampling` with the words in it. Raises RequestError when they are too long."""
    if words.thinking_tokens is None:
        return sampling
    end = words.think_end
    ids = tuple(tokenizer.encode_bare(end)) if isinstance(end, str) else end
    return replace(sampling, thinking_tokens=words.thinking_tokens, think_end=ids)
