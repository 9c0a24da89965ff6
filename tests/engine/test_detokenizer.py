"""Streaming text equals whole-list decoding, and stop strings are found wherever they end."""

from __future__ import annotations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from specdec.engine.detokenizer import Detokenizer, StopStrings
from specdec.engine.tokenizer import Tokenizer

EMOJI_BYTES = (92, 93, 94, 95)  # the toy ids of one emoji


def stream(tokenizer: Tokenizer, token_ids: list[int], *, skip_special_tokens: bool = True) -> list[str]:
    """Pieces of a token list as a client would get them."""
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
    return [*(detokenizer.feed(token_id) for token_id in token_ids), detokenizer.flush()]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.one_of(st.integers(0, 49_151), st.integers(0, 300)), max_size=40), st.booleans())
def test_streamed_text_equals_decoded_text_for_any_ids(smollm: Tokenizer, token_ids: list[int], skip: bool) -> None:
    assert "".join(stream(smollm, token_ids, skip_special_tokens=skip)) == smollm.decode(token_ids, skip_special_tokens=skip)


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=30))
def test_pieces_of_a_text_hold_whole_characters(smollm: Tokenizer, text: str) -> None:
    token_ids = list(smollm.encode(text, add_special_tokens=False))
    assume(smollm.decode(token_ids, skip_special_tokens=False) == text and "\ufffd" not in text)  # the vocabulary lacks some bytes
    pieces = stream(smollm, token_ids, skip_special_tokens=False)
    assert "".join(pieces) == text
    assert pieces[-1] == ""
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_character_split_over_tokens_appears_whole_with_its_last_byte(toy: Tokenizer) -> None:
    assert stream(toy, [*EMOJI_BYTES, *toy.encode("!")]) == ["", "", "", "🎉", "!", ""]


def test_an_unfinished_character_is_flushed_as_the_decoder_prints_it(toy: Tokenizer) -> None:
    token_ids = [*toy.encode("ab"), *EMOJI_BYTES[:2]]
    pieces = stream(toy, token_ids)
    assert pieces[:-1] == ["a", "b", "", ""]
    assert "".join(pieces) == toy.decode(token_ids) == "ab\ufffd"


def test_special_tokens_show_only_when_asked(toy: Tokenizer) -> None:
    token_ids = [*toy.encode("a"), toy.eos_token_ids[0], *toy.encode("b")]
    assert "".join(stream(toy, token_ids)) == "ab"
    assert "".join(stream(toy, token_ids, skip_special_tokens=False)) == "a<eos>b"


def test_a_decoder_that_takes_text_back_is_followed_by_whole_decoding(toy: Tokenizer) -> None:
    class Stubborn:
        def step(self, *_: object) -> str:
            raise RuntimeError("invalid prefix")

    detokenizer = Detokenizer(toy, skip_special_tokens=True)
    first = detokenizer.feed(toy.encode("a")[0])
    detokenizer._stream = Stubborn()  # type: ignore[assignment]  # what the library does for decoders that strip text
    rest = [detokenizer.feed(token_id) for token_id in (*toy.encode("b"), *EMOJI_BYTES)]
    assert [first, *rest] == ["a", "b", "", "", "", "🎉"]


def reference_stop(text: str, stops: tuple[str, ...], *, include: bool) -> tuple[str, str | None]:
    """The stop that ends first (the longest on a tie), judged character by character on the whole text."""
    for end in range(1, len(text) + 1):
        done = [stop for stop in stops if text[:end].endswith(stop)]
        if done:
            stop = max(done, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@settings(max_examples=400, deadline=None)
@given(st.text("ab", max_size=16), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), st.booleans())
def test_stops_in_single_characters_match_the_reference(text: str, stop_list: list[str], include: bool) -> None:
    stops = StopStrings(tuple(stop_list), include=include)
    shown, found = "", None
    for char in text:
        piece, found = stops.feed(char, armed=True)
        shown += piece
        if found is not None:
            break
    assert (shown + stops.flush(), found) == reference_stop(text, tuple(stop_list), include=include)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.text("ab", max_size=3), max_size=10), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), st.booleans())
def test_nothing_is_shown_that_a_later_stop_takes_back(pieces: list[str], stop_list: list[str], include: bool) -> None:
    stops = StopStrings(tuple(stop_list), include=include)
    shown, text = "", ""
    for piece in pieces:
        text += piece
        new, found = stops.feed(piece, armed=True)
        shown += new
        assert text.startswith(shown)
        if found is not None:
            cut = text.rfind(found) if shown != text and not include else len(shown)
            assert found in text
            assert len(shown) == cut or text[len(shown) :].startswith(found)
            return
        held = text[len(shown) :]
        assert not held or any(stop.startswith(held) and stop != held for stop in stop_list)
    assert shown + stops.flush() == text


def test_a_stop_that_spans_pieces_is_held_back_until_it_completes() -> None:
    stops = StopStrings(("END",), include=False)
    assert [stops.feed(piece, armed=True) for piece in ("ab", "cE", "N", "Dxyz")] == [("ab", None), ("c", None), ("", None), ("", "END")]


def test_a_broken_off_stop_is_released() -> None:
    stops = StopStrings(("END",), include=False)
    assert [stops.feed(piece, armed=True)[0] for piece in ("E", "NE", "x")] == ["", "EN", "Ex"]


def test_an_included_stop_is_shown_at_once_and_text_after_it_is_cut() -> None:
    stops = StopStrings(("END",), include=True)
    assert [stops.feed(piece, armed=True) for piece in ("aE", "N", "Dxyz")] == [("aE", None), ("N", None), ("D", "END")]


@pytest.mark.parametrize("include", [False, True])
def test_a_disarmed_stop_does_not_count_later(include: bool) -> None:
    stops = StopStrings(("b", "abc"), include=include)
    assert stops.feed("ab", armed=False)[1] is None
    assert stops.feed("x", armed=True)[1] is None
    assert stops.feed("b", armed=True)[1] == "b"


def test_a_stop_that_began_before_arming_counts_when_it_completes_after() -> None:
    stops = StopStrings(("abc",), include=False)
    assert stops.feed("xab", armed=False) == ("x", None)
    assert stops.feed("c", armed=True) == ("", "abc")


@pytest.mark.parametrize(("stops", "shown", "found"), [(("abcd", "bc"), "xa", "bc"), (("c", "bc"), "xa", "bc"), (("d", "a"), "x", "a")])
def test_of_stops_in_one_piece_the_first_to_end_wins_and_the_longer_on_a_tie(stops: tuple[str, ...], shown: str, found: str) -> None:
    for order in (stops, stops[::-1]):
        assert StopStrings(order, include=False).feed("xabcd", armed=True) == (shown, found)
