"""The fields of a body that shape an answer, and the engine's parameters they become.

Knows: their names in the API and in the engine, the defaults of the former, which go together.
Refuses to know: prompts, choices, streams; what words are in token ids (deploy/words.py).
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt

from cluster.errors import RequestError
from cluster.request import MAX_BAD_WORD, MAX_LOGPROBS, Sampling
from deploy.asks import Words

TokenId = Annotated[StrictInt, Field(ge=0)]
Ids = Annotated[list[TokenId], Field(min_length=1)]
Word = Annotated[str, Field(min_length=1, max_length=MAX_BAD_WORD)]

#: The mark that ends thinking where a body names none.
THINK_END = "</think>"
#: What the engine calls fields that have another name in the API.
_NAMES = {
    "allowed_ids": "allowed_token_ids",
    "bad_ids": "bad_words",
    "stop_ids": "stop_token_ids",
    "thinking_tokens": "thinking_token_budget",
}


class StrictBody(BaseModel):
    """Unknown fields are refused by name."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class SamplingFields(StrictBody):
    """What both endpoints have in common; None: not said."""

    temperature: float | None = None
    top_p: float | None = None
    stop: str | list[str] | None = None
    seed: StrictInt | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    max_tokens: StrictInt | None = None
    # extensions, under the names other servers gave them
    top_k: StrictInt | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: StrictBool | None = None
    min_tokens: StrictInt | None = None
    stop_token_ids: list[TokenId] | None = Field(None, max_length=64)
    include_stop_str_in_output: StrictBool | None = None
    allowed_token_ids: Ids | None = None
    bad_words: list[Word | Ids] | None = None
    prompt_logprobs: StrictInt | None = Field(None, ge=0, le=MAX_LOGPROBS)
    thinking_token_budget: StrictInt | None = Field(None, ge=0)
    think_end: Word | Ids | None = None
    logits_processors: list[str] | None = None

    def wanted_logprobs(self) -> int | None:
        raise NotImplementedError

    def wanted_prompt_logprobs(self) -> int | None:
        return self.prompt_logprobs

    def length(self) -> int | None:
        return self.max_tokens

    def sampling(self, default_max_tokens: int, seed: int) -> Sampling:
        """What is said in numbers. RequestError names the field as the body does."""
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        given = {
            "max_tokens": self.length(),
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": max(self.top_k, 0) if self.top_k is not None else None,  # -1 is a usual way to say off
            "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "ignore_eos": self.ignore_eos,
            "min_tokens": self.min_tokens,
            "include_stop": self.include_stop_str_in_output,
            "prompt_logprobs": self.wanted_prompt_logprobs(),
        }
        values: dict[str, Any] = {"max_tokens": default_max_tokens}
        values |= {name: value for name, value in given.items() if value is not None}
        try:
            return Sampling(
                **values,
                seed=seed,
                stop=stop,
                stop_ids=tuple(self.stop_token_ids or ()),
                allowed_ids=None if self.allowed_token_ids is None else tuple(self.allowed_token_ids),
                bad_words=tuple(word for word in self.bad_words or () if isinstance(word, str)),
                bad_ids=tuple(tuple(word) for word in self.bad_words or () if not isinstance(word, str)),
                logits_processors=tuple(self.logits_processors or ()),
                logit_bias=_biases(self.logit_bias),
                logprobs=self.wanted_logprobs(),
            )
        except RequestError as error:
            raise in_api_words(error) from None

    def words(self) -> Words:
        """What is said in text, or may be. RequestError as above."""
        if self.thinking_token_budget is None and self.think_end is not None:
            raise RequestError("think_end needs thinking_token_budget", "think_end")
        end = self.think_end or THINK_END
        return Words(self.thinking_token_budget, end if isinstance(end, str) else tuple(end))


def in_api_words(error: RequestError) -> RequestError:
    """The same error with the field's name in the API; others as they are."""
    name = _NAMES.get(error.param or "")
    if name is None:
        return error
    return type(error)(str(error).replace(str(error.param), name, 1), name)


def _biases(given: dict[str, float] | None) -> dict[int, float]:
    if not given:
        return {}
    if not all(key.isdecimal() for key in given):
        raise RequestError("logit_bias: keys must be token ids", "logit_bias")
    return {int(key): value for key, value in given.items()}
