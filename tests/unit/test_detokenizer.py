"""Incremental text: the pieces sent are the whole text, safe at every moment."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.text.detokenizer import IncrementalDetokenizer
from tests.support.models import EOS, bytes_tokenizer

TOKENIZER = bytes_tokenizer()


def feed_all(detokenizer: IncrementalDetokenizer, text: str) -> list[str]:
    return [detokenizer.feed([byte]) for byte in text.encode()] + [detokenizer.flush()]


@given(st.text(max_size=40))
@settings(max_examples=100, deadline=None)
def test_pieces_join_to_the_text_and_never_hold_half_a_character(text):
    pieces = feed_all(IncrementalDetokenizer(TOKENIZER), text)
    assert "".join(pieces) == text
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(pieces).replace(text, "")


@given(st.text("ab c", max_size=30), st.lists(st.text("ab c", min_size=1, max_size=4), max_size=3))
@settings(max_examples=200, deadline=None)
def test_text_ends_before_the_stop_string_that_is_complete_first(text, stop):
    detokenizer = IncrementalDetokenizer(TOKENIZER, stop)
    sent = "".join(feed_all(detokenizer, text))
    ends = [(text.find(s) + len(s), text.find(s)) for s in stop if s in text]
    assert detokenizer.stopped == bool(ends)
    assert sent == (text[: min(ends)[1]] if ends else text)
    assert detokenizer.num_tokens == (min(ends)[0] if ends else len(text))


def test_a_stop_string_may_end_inside_one_feed_and_the_rest_is_dropped():
    detokenizer = IncrementalDetokenizer(TOKENIZER, ["END"])
    assert detokenizer.feed(b"one END two") == "one "
    assert detokenizer.stopped
    assert detokenizer.stop_string == "END"
    assert detokenizer.num_tokens == len(b"one END")
    assert detokenizer.feed(b"more") == ""
    assert detokenizer.flush() == ""


def test_broken_utf8_becomes_replacement_characters_at_the_latest_on_flush():
    detokenizer = IncrementalDetokenizer(TOKENIZER)
    assert detokenizer.feed([0xE6, 0x97]) == ""
    assert detokenizer.feed([0x41]) == "\N{REPLACEMENT CHARACTER}A"
    assert detokenizer.feed([0xE6]) == ""
    assert detokenizer.flush() == "\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize(("shown", "expected"), [((), "ab"), (("<|im_end|>",), "a<|im_end|>b")])
def test_special_tokens_are_shown_only_when_asked_for(shown, expected):
    detokenizer = IncrementalDetokenizer(TOKENIZER, shown=shown)
    assert detokenizer.feed([ord("a"), EOS, ord("b")]) == expected
