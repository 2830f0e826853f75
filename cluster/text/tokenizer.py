"""Text to token ids and back, for one model.

Knows: the tokenizer and chat template of a model directory, which tokens end an answer, and how to
show text token by token without cutting a character.
Refuses to know: torch and transformers, so that a process which only speaks text starts in a
fraction of a second; and what the ids are used for. The one exception: a directory that has only
an older vocabulary format (no tokenizer.json) is converted through transformers, once a start.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
import tokenizers

from cluster.errors import ModelCorrupt, ModelNotFound, RequestError, TokenizerMismatch
from cluster.text.lexicon import Lexicon, read_lexicon
from cluster.text.template import ChatTemplate

_OLDER_FORMATS = ("tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")

#: A token that is still half a character after this many more tokens is junk and is shown as such.
_LONGEST_WAIT = 16


class Tokenizer:
    """A model's tokenizer. Immutable once loaded; may be shared between threads."""

    def __init__(self, backend: tokenizers.Tokenizer, eos_ids: frozenset[int], template: ChatTemplate | None) -> None:
        self._backend = backend
        self._template = template
        self.eos_ids = eos_ids

    @classmethod
    def load(cls, directory: Path) -> Tokenizer:
        """The tokenizer in a model directory.

        Raises: ModelNotFound when there is none, ModelCorrupt when a file of it cannot be read.
        """
        settings = _read_json(directory / "tokenizer_config.json")
        backend = _read_backend(directory)
        # Lengths are the scheduler's business: a tokenizer must never cut or fill silently.
        backend.no_truncation()
        backend.no_padding()
        special = {key: _content(value) for key, value in settings.items() if key.endswith("_token")}
        return cls(backend, _eos_ids(directory, backend, special), _read_template(directory, settings, special))

    @property
    def vocab_size(self) -> int:
        """How many tokens there are, added ones included."""
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, with the tokens the model expects around it (such as a leading bos), if any."""
        return list(self._backend.encode(text, add_special_tokens=True).ids)

    def encode_bare(self, text: str) -> list[int]:
        """Ids of `text` alone, as it may stand inside an answer."""
        return list(self._backend.encode(text, add_special_tokens=False).ids)

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Ids of a conversation, ending where the assistant's next answer begins.

        Raises: RequestError (param "messages") without a chat template or when it refuses the messages.
        """
        if self._template is None:
            raise RequestError("this model has no chat template: send `prompt` to /v1/completions", "messages")
        try:
            text = self._template.render(messages)
        except (jinja2.TemplateError, KeyError, TypeError, AttributeError, ValueError) as error:
            raise RequestError(f"the model's chat template refuses these messages: {error}", "messages") from error
        # The template has written every special token itself.
        return list(self._backend.encode(text, add_special_tokens=False).ids)

    def encode_plain(self, text: str) -> list[int]:
        """Ids of `text` and nothing around it."""
        return list(self._backend.encode(text, add_special_tokens=False).ids)

    @property
    def frame(self) -> tuple[list[int], list[int]]:
        """What `encode` puts before and after a text."""
        inner, whole = self.encode_plain("a"), self.encode("a")
        for start in range(len(whole) - len(inner) + 1):
            if whole[start : start + len(inner)] == inner:
                return whole[:start], whole[start + len(inner) :]
        return [], []

    @property
    def specials(self) -> dict[int, str]:
        """Tokens that `decode` leaves out, by id."""
        added = self._backend.get_added_tokens_decoder()
        return {token_id: token.content for token_id, token in added.items() if token.special}

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids` without special tokens; bytes that are no character become U+FFFD."""
        return str(self._backend.decode(list(ids), skip_special_tokens=True))

    def token_id(self, token: str) -> int | None:
        """Id of one token by its name, such as "<|im_end|>"; None when there is none."""
        found: int | None = self._backend.token_to_id(token)
        return found

    @cached_property
    def lexicon(self) -> Lexicon:
        """Bytes of each token."""
        return read_lexicon(self._backend)

    def stream(self, prompt_ids: Sequence[int]) -> TextStream:
        """Text of what follows `prompt_ids`, token by token."""
        return TextStream(self, prompt_ids)

    def check(self, vocab_size: int) -> None:
        """Refuse a model with fewer ids than this tokenizer can produce; more (padding) is fine.

        vocab_size: how many ids the model has.
        Raises: TokenizerMismatch.
        """
        token, largest = max(self._backend.get_vocab(with_added_tokens=True).items(), key=lambda item: item[1])
        if largest >= vocab_size:
            raise TokenizerMismatch(
                f"the tokenizer has id {largest} ({token!r}), but the model only knows ids below {vocab_size}: "
                "they do not belong together"
            )

    def same_as(self, other: Tokenizer) -> bool:
        """Whether each token has the same id in both."""
        return bool(self._backend.get_vocab(with_added_tokens=True) == other._backend.get_vocab(with_added_tokens=True))

    def check_same(self, other: Tokenizer) -> None:
        """Refuse `other` (a draft model's) unless each token has the same id in both.

        Raises: TokenizerMismatch, naming a token on which they differ.
        """
        ours, theirs = (t._backend.get_vocab(with_added_tokens=True) for t in (self, other))
        if ours == theirs:
            return
        token = min(token for token, _ in ours.items() ^ theirs.items())
        raise TokenizerMismatch(
            f"draft and target have different vocabularies: {token!r} is {theirs.get(token)} in the draft's "
            f"and {ours.get(token)} in the target's"
        )


class TextStream:
    """Shows one answer token by token.

    A token's text may depend on its neighbours (a character split over tokens, a leading space), so
    each step decodes the pending tokens behind those shown last, and holds text back while it ends in
    half a character. Everything returned, joined, is the text of all tokens decoded at once.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._context = list(prompt_ids[-6:])  # enough to hold one character and one word
        self._shown = tokenizer.decode(self._context)
        self._pending: list[int] = []

    @property
    def whole(self) -> bool:
        """True when nothing is held back."""
        return not self._pending

    def step(self, token: int) -> str:
        """Text that `token` makes ready to be shown; often of that token, sometimes none or more."""
        self._pending.append(token)
        text = self._tokenizer.decode(self._context + self._pending)
        if text.endswith("\N{REPLACEMENT CHARACTER}") and len(self._pending) < _LONGEST_WAIT:
            return ""
        return self._show(text)

    def finish(self) -> str:
        """What is still held back; the bytes of an unfinished character become U+FFFD."""
        return self._show(self._tokenizer.decode(self._context + self._pending))

    def _show(self, text: str) -> str:
        new = text[len(self._shown) :]
        if new:
            # Only tokens with text may become context: after a special token alone, a decoder that
            # strips the space of a text's first word would strip it here too.
            self._context = self._pending
            self._shown = self._tokenizer.decode(self._context)
            self._pending = []
        elif len(self._pending) >= _LONGEST_WAIT:
            self._pending = []
        return new


def _read_backend(directory: Path) -> tokenizers.Tokenizer:
    path = directory / "tokenizer.json"
    if path.is_file():
        try:
            return tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the Rust library raises bare Exception for every fault
            raise ModelCorrupt(
                f"{path} ({path.stat().st_size} bytes) cannot be read as a tokenizer: {error}"
            ) from error
    if not any((directory / name).is_file() for name in _OLDER_FORMATS):
        raise ModelNotFound(
            f"{directory} holds no tokenizer.json; copy the model's tokenizer files there, "
            "or name their directory as the tokenizer"
        )
    from transformers import AutoTokenizer

    try:
        converted = AutoTokenizer.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
    except (ValueError, OSError, ImportError, KeyError) as error:
        raise ModelCorrupt(f"{directory}: its tokenizer cannot be converted: {error}") from error
    backend = getattr(converted, "backend_tokenizer", None)
    if not isinstance(backend, tokenizers.Tokenizer):
        raise ModelCorrupt(f"{directory}: its tokenizer has no fast form; save it as tokenizer.json")
    return backend


def _eos_ids(directory: Path, backend: tokenizers.Tokenizer, special: Mapping[str, str]) -> frozenset[int]:
    ids: set[int] = set()
    named = backend.token_to_id(special["eos_token"]) if special.get("eos_token") else None
    if named is not None:
        ids.add(named)
    for name in ("generation_config.json", "config.json"):
        value = _read_json(directory / name).get("eos_token_id")
        if value is not None:
            ids.update(value if isinstance(value, list) else [value])
            break  # the generation configuration, where there is one, is what the model was released with
    return frozenset(ids)


def _read_template(directory: Path, settings: Mapping[str, Any], special: Mapping[str, str]) -> ChatTemplate | None:
    path = directory / "chat_template.jinja"
    source: Any = path.read_text(encoding="utf-8") if path.is_file() else settings.get("chat_template")
    if isinstance(source, list):  # several, by name
        source = {entry.get("name"): entry.get("template") for entry in source}.get("default")
    if not source:
        return None
    try:
        return ChatTemplate(str(source), special)
    except jinja2.TemplateSyntaxError as error:
        raise ModelCorrupt(f"{directory}: its chat template is broken at line {error.lineno}: {error}") from error


def _content(value: object) -> str:
    """A special token is written as its text, or as an object that holds it."""
    return str(value.get("content", "")) if isinstance(value, dict) else str(value or "")


def _read_json(path: Path) -> dict[str, Any]:
    """The JSON object in an optional file; empty when there is none."""
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return {}
    try:
        value = json.loads(raw)
    except ValueError as error:
        raise ModelCorrupt(f"{path} ({len(raw)} bytes) is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelCorrupt(f"{path} ({len(raw)} bytes) holds a JSON {type(value).__name__}, expected an object")
    return value
