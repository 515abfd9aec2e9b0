"""What is streamed is the whole text cut at the first stop text."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxllm.engine.stopping import StopFilter


class Pieces:
    """A decoder whose token i is the i-th of some texts; `rest` comes with the flush."""

    def __init__(self, texts: Sequence[str], rest: str = ""):
        self.texts, self.rest = texts, rest

    def push(self, token: int) -> str:
        return self.texts[token]

    def flush(self) -> str:
        return self.rest


def stream(texts: Sequence[str], stop: Sequence[str], rest: str = "") -> tuple[list[str], bool]:
    """The texts that a consumer sees, and whether a stop text ended them."""
    filtered = StopFilter(Pieces(texts, rest), stop)  # type: ignore[arg-type]
    seen = []
    for token in range(len(texts)):
        seen.append(filtered.push(token))
        if filtered.stopped:
            break
    return [*seen, filtered.flush()], filtered.stopped


def cut(text: str, stop: Sequence[str]) -> tuple[str, bool]:
    """The text before the stop text that begins first."""
    found = [at for at in map(text.find, stop) if at >= 0]
    return (text[: min(found)], True) if found else (text, False)


SHORT = st.text("ab", max_size=4)


@given(st.lists(SHORT, max_size=12), st.lists(st.text("ab", min_size=1, max_size=5), max_size=3))
def test_single_characters_cut_at_the_first_stop_text(texts: list[str], stop: list[str]):
    """Fed character by character, the first stop text to be complete ends the stream; among
    those that are complete at once the one that begins first."""
    letters = list("".join(texts))
    seen, stopped = stream(letters, stop)
    ends = [n for n in range(1, len(letters) + 1) if cut("".join(letters[:n]), stop)[1]]
    heard = "".join(letters[: ends[0]] if ends else letters)
    assert ("".join(seen), stopped) == cut(heard, stop)


@given(
    st.lists(SHORT, max_size=12),
    st.text("ab", min_size=1, max_size=5),
    st.text("ab", max_size=2),
)
def test_pieces_cut_at_the_first_stop_text(texts: list[str], stop: str, rest: str):
    seen, stopped = stream(texts, [stop], rest)
    assert ("".join(seen), stopped) == cut("".join(texts) + rest, [stop])


@given(st.lists(SHORT, max_size=12), st.lists(st.text("ab", min_size=1, max_size=5), max_size=3))
def test_nothing_of_a_stop_text_is_emitted(texts: list[str], stop: list[str]):
    seen, stopped = stream(texts, stop)
    whole, emitted = "".join(texts), "".join(seen)
    assert whole.startswith(emitted)
    assert not any(text in emitted for text in stop)
    if stopped:
        assert any(whole.startswith(text, len(emitted)) for text in stop)
    else:
        assert emitted == whole


@given(st.lists(SHORT, max_size=12), st.text("ab", min_size=1, max_size=5))
def test_no_more_is_held_back_than_may_be_a_stop_text(texts: list[str], stop: str):
    filtered = StopFilter(Pieces(texts), [stop])  # type: ignore[arg-type]
    heard = emitted = ""
    for token, text in enumerate(texts):
        heard += text
        emitted += filtered.push(token)
        if filtered.stopped:
            break
        assert stop.startswith(heard[len(emitted) :])


@pytest.mark.parametrize(
    ("texts", "stop", "expected"),
    [
        (["He", "llo", "\nUs", "er:", " hi"], ["\nUser:"], ["He", "llo", "", "", ""]),
        (["a<", "b<e", "nd>c"], ["<end>"], ["a", "<b", "", ""]),
        (["x", "aab", "y"], ["aaab"], ["x", "aab", "y", ""]),
        (["aaa", "ab"], ["aab"], ["a", "a", ""]),
        (["x\n", "\n", "y"], ["\n\n"], ["x", "", ""]),
        (["one two three"], ["three", "two"], ["one ", ""]),
        (["a", "b"], ["bc"], ["a", "", "b"]),
        (["a", "b"], [], ["a", "b", ""]),
    ],
)
def test_examples(texts: list[str], stop: list[str], expected: list[str]):
    assert stream(texts, stop)[0] == expected


def test_a_stop_text_completed_by_the_flush():
    assert stream(["xa"], ["a\ufffd"], "\ufffd") == (["x", ""], True)


def test_without_a_decoder_there_is_no_text():
    filtered = StopFilter(None, [])
    assert (filtered.push(3), filtered.flush(), filtered.stopped) == ("", "", False)
