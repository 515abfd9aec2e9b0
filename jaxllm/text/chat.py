"""Chat templates: messages to one prompt text.

A template is a Jinja program that came with the model, so it runs in Jinja's immutable sandbox,
with the globals and filters that the transformers library gives to templates.
"""

import datetime
import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jaxllm.errors import PromptError, TokenizerError, shown

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def render(
    template: str | None,
    messages: Sequence[Mapping[str, Any]],
    add_generation_prompt: bool = True,
    *,
    bos_text: str = "",
    eos_text: str = "",
    chatml_fallback: bool = False,
    **variables: Any,
) -> str:
    """The prompt text of `messages`, each a mapping with a "role" and a "content".

    Without a template, ChatML is used if `chatml_fallback` says that the vocabulary has its
    tokens. `variables` reach the template (tools, enable_thinking, ...). The text may begin with
    `bos_text`: encode it with parse_special=True and without a second BOS.
    Raises TokenizerError for a missing or failing template, PromptError for malformed messages.
    """
    check_messages(messages)
    if template is None:
        if not chatml_fallback:
            raise TokenizerError(
                "the model has no chat template: use generate with a plain prompt, or pass "
                "chat_template=."
            )
        template = CHATML
    context = {"tools": None, "documents": None, **variables}
    context |= {"bos_token": bos_text, "eos_token": eos_text}
    context |= {"messages": messages, "add_generation_prompt": add_generation_prompt}
    try:
        return _compiled(template).render(context)
    except jinja2.TemplateSyntaxError as error:
        raise TokenizerError(
            f"the chat template has a syntax error in line {error.lineno}: "
            f"{_one_line(error.message)}; pass another with chat_template=."
        ) from error
    except Exception as error:  # A template may fail in any way that an expression can.
        raise TokenizerError(
            f"the chat template refuses these messages: {_one_line(error)}; change the messages "
            "or pass another chat_template=."
        ) from error


def check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    """PromptError unless `messages` is a non-empty list of mappings with role and content."""
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise PromptError(
            f"messages must be a list of mappings with role and content, not {shown(messages)}."
        )
    if not messages:
        raise PromptError("messages is empty; pass at least one message with role and content.")
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise PromptError(
                f"message {number} is {shown(message)}; pass a mapping with role and content."
            )
        if not isinstance(message.get("role"), str):
            raise PromptError(
                f"message {number} has the role {shown(message.get('role'))}; pass a text such "
                "as 'user'."
            )
        content = message.get("content")
        if not isinstance(content, str | list) and not (
            content is None and "tool_calls" in message
        ):
            raise PromptError(f"message {number} has the content {shown(content)}; pass a text.")


class _GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's text for training; here its body is plain."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@lru_cache(maxsize=16)
def _compiled(template: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(template)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike Jinja's own filter this escapes nothing for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _one_line(error: object) -> str:
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__
