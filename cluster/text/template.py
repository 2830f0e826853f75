"""Chat templates: the Jinja program, shipped with a model, that writes a conversation as its prompt.

Knows: the dialect such templates are written in: block trimming, loop controls, `tojson`,
`raise_exception`, `strftime_now`, and a `generation` block that only marks training spans.
Refuses to know: tokens. The program comes from the model's files, so it runs in Jinja's sandbox.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class ChatTemplate:
    """One compiled template. special: values for bos_token, eos_token and the like."""

    def __init__(self, source: str, special: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = _now
        self._template = environment.from_string(source)
        self._special = dict(special)

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The prompt that asks for the assistant's next answer.

        Raises: jinja2.TemplateError when the template refuses the messages.
        """
        return self._template.render(
            messages=[dict(message) for message in messages],
            tools=None,
            documents=None,
            add_generation_prompt=True,
            **self._special,
        )


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}`: the body, as it is."""

    tags = {"generation"}  # noqa: RUF012  (the attribute Jinja reads)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(value: object, indent: int | None = None, ensure_ascii: bool = False) -> str:
    # Jinja's own filter escapes for HTML, which a prompt must not be.
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _now(form: str) -> str:
    return datetime.datetime.now().strftime(form)
