"""Stop strings: the text ends where a naive search in the whole text says, however it is cut into pieces."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.stop import StopMatcher, StopStrings
from router.text import IncrementalDetokenizer, WatchedText

LETTERS = st.text("abé", max_size=24)
STOPS = st.lists(st.text("abé", min_size=1, max_size=5), min_size=1, max_size=4)


def naive(text: str, stops: list[str], *, include: bool = False, ignored: int = 0) -> tuple[str, bool]:
    """The text before (or up to the end of) the stop that ends first beyond `ignored` characters."""
    for end in range(ignored + 1, len(text) + 1):
        lengths = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if lengths:
            return text[: end if include else end - max(lengths)], True
    return text, False


def could_start(text: str, stops: list[str]) -> int:
    """Length of the longest end of `text` that is the start of a stop, and not all of it."""
    return max(
        n for n in range(len(text) + 1) if any(len(s) > n and s.startswith(text[len(text) - n :]) for s in stops)
    )


@st.composite
def cut(draw: st.DrawFn, texts: st.SearchStrategy[str]) -> list[str]:
    text = draw(texts)
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=8)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@given(cut(LETTERS), STOPS, st.booleans(), st.integers(0, 4))
def test_any_cut_gives_the_naive_text(pieces: list[str], stops: list[str], include: bool, quiet: int) -> None:
    """`quiet`: so many pieces at the start may not stop."""
    matcher = StopMatcher(StopStrings(stops), include=include)
    text, shown = "".join(pieces), ""
    expected, stopped = naive(text, stops, include=include, ignored=len("".join(pieces[:quiet])))
    for i, piece in enumerate(pieces):
        shown += matcher.push(piece, may_stop=i >= quiet)
        if not matcher.stopped:
            so_far = "".join(pieces[: i + 1])
            assert shown == so_far[: len(so_far) - could_start(so_far, stops)], "held back neither too much nor little"
    assert matcher.stopped == stopped
    assert shown + matcher.flush() == expected


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("one two", ["e t"], "on"),
        ("one two", ["x"], "one two"),
        ("aaab", ["aab"], "a"),
        ("abcd", ["bcde", "c"], "ab"),
        ("abcd", ["abc", "bc", "c"], ""),
        ("Héllo 🎉!", ["🎉"], "Héllo "),
        ("abab", ["ab"], ""),
    ],
)
def test_examples(text: str, stops: list[str], expected: str) -> None:
    matcher = StopMatcher(StopStrings(stops))
    assert "".join(matcher.push(c) for c in text) + matcher.flush() == expected


def test_text_is_held_back_only_while_it_may_become_a_stop() -> None:
    matcher = StopMatcher(StopStrings(["END", "EXIT"]))
    assert [matcher.push(c) for c in "aENxE"] == ["a", "", "", "ENx", ""]
    assert matcher.flush() == "E"


def decode(ids: list[int]) -> str:
    return bytes(ids).decode("utf-8", errors="replace")


def watched(stops: list[str], *, include: bool = False, min_tokens: int = 0) -> WatchedText:
    return WatchedText(IncrementalDetokenizer(decode), StopStrings(stops), include=include, min_tokens=min_tokens)


def run(text: WatchedText, tokens: bytes) -> tuple[str, int]:
    """Text and number of tokens taken."""
    for i, token in enumerate(tokens):
        if text.watch(token, i == len(tokens) - 1):
            return text.push(()) + text.flush(), i + 1
    return text.flush(), len(tokens)


@given(st.text("ab🎉é", max_size=10), st.lists(st.text("ab🎉é", min_size=1, max_size=3), min_size=1, max_size=3))
def test_bytes_of_characters_stop_where_their_text_does(text: str, stops: list[str]) -> None:
    """One token a byte: the sample ends with the token that completes the stop string."""
    data = text.encode()
    expected, stopped = naive(text, stops)
    shown, num_tokens = run(watched(stops), data)
    assert shown == expected
    if stopped:
        whole, _ = naive(text, stops, include=True)
        assert num_tokens == len(whole.encode())
    else:
        assert num_tokens == len(data)


def test_a_stop_string_that_an_incomplete_character_held_back_is_found_at_the_end() -> None:
    cluster = {0: "", 1: "ab", 2: "ab�", 3: "ab�"}
    text = WatchedText(
        IncrementalDetokenizer(lambda ids: cluster[len(ids)]), StopStrings(["b�"]), include=False, min_tokens=0
    )
    assert not text.watch(7, False)
    assert text.watch(8, True)
    assert text.push(()) + text.flush() == "a"


def test_min_tokens_ignores_stops_that_end_before() -> None:
    assert run(watched(["b"], min_tokens=2), b"abab") == ("aba", 4)
    assert run(watched(["bc"], min_tokens=2), b"abcd") == ("a", 3)
    assert run(watched(["b"], min_tokens=9), b"abab") == ("abab", 4)
    assert run(watched(["b"], include=True, min_tokens=2), b"abab") == ("abab", 4)
