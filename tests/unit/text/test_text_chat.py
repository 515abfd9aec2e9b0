"""Chat templates: the environment that templates expect, and every way they fail."""

from typing import Any

import pytest

from jaxllm.errors import PromptError, TokenizerError
from jaxllm.text import render

USER = [{"role": "user", "content": "Hi <b>&"}]


def test_template_gets_messages_and_texts() -> None:
    template = (
        "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m['content'] }}{{ eos_token }}"
        "{% endfor %}{% if add_generation_prompt %}>{% endif %}"
    )
    got = render(template, USER, bos_text="<s>", eos_text="</s>")
    assert got == "<s>[user] Hi <b>&</s>>"
    assert render(template, USER, False) == "[user] Hi <b>&"


def test_blocks_leave_no_white_space() -> None:
    template = (
        "{% for m in messages %}\n    {% if true %}\n{{ m.role }}\n    {% endif %}\n{% endfor %}"
    )
    assert render(template, USER) == "user\n"


def test_variables_filters_and_globals() -> None:
    assert render("{{ tools | tojson }}", USER, tools=[{"a": "é<"}]) == '[{"a": "é<"}]'
    assert render("{{ tools is none }}", USER) == "True"
    assert render("{{ enable_thinking }}", USER, enable_thinking=False) == "False"
    assert render("{{ {'b': 1, 'a': 2} | tojson(indent=2) }}", USER) == '{\n  "b": 1,\n  "a": 2\n}'
    assert len(render("{{ strftime_now('%Y') }}", USER)) == 4
    assert render("{% for i in [1, 2] %}{{ i }}{% break %}{% endfor %}", USER) == "1"
    assert render("{% generation %}{{ 1 }}{% endgeneration %}", USER) == "1"


def test_without_a_template() -> None:
    assert render(None, USER, chatml_fallback=True) == (
        "<|im_start|>user\nHi <b>&<|im_end|>\n<|im_start|>assistant\n"
    )
    with pytest.raises(
        TokenizerError, match="has no chat template: use generate .* chat_template="
    ):
        render(None, USER)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (
            "{{ raise_exception('roles must\n alternate.') }}",
            "these messages: roles must alternate;",
        ),
        ("a\n{% if %}", "syntax error in line 2"),
        ("{{ nothing.x.y }}", "is undefined"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ messages.append(1) }}", "append"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages | tojson(indent=messages) }}", "these messages"),
    ],
)
def test_failing_templates_are_one_sentence(template: str, message: str) -> None:
    with pytest.raises(TokenizerError, match=message) as caught:
        render(template, USER)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("Hi", "must be a list of mappings .* not 'Hi'"),
        ({"role": "user"}, "must be a list of mappings"),
        ([], "messages is empty"),
        (["Hi"], "message 0 is 'Hi'"),
        ([{"content": "x"}], "message 0 has the role None"),
        ([*USER, {"role": "user"}], "message 1 has the content None"),
        ([{"role": "user", "content": 3}], "message 0 has the content 3"),
    ],
)
def test_malformed_messages(messages: Any, message: str) -> None:
    with pytest.raises(PromptError, match=message):
        render("x", messages)
