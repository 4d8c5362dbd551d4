"""Stop strings and stop tokens, without a server."""

from hypothesis import given, settings, strategies as st

from examples.openai_server.text import ByteTokenizer
from examples.openai_server.transcript import StopStrings, Transcript


def expected(text: str, stops: list[str]) -> tuple[str, bool]:
    """The slow way: the first letter at which a stop string ends; of those that end there, the longest."""
    for end in range(1, len(text) + 1):
        lengths = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if lengths:
            return text[: end - max(lengths)], True
    return text, False


@settings(max_examples=250)
@given(st.lists(st.text("ab", max_size=4)), st.lists(st.text("ab", min_size=1, max_size=5), max_size=4))
def test_stop_strings_are_found_however_the_text_is_cut(pieces: list[str], stops: list[str]) -> None:
    machine = StopStrings(stops)
    said, fed = "", ""
    for piece in pieces:
        said += machine.feed(piece)
        fed += piece
        if not machine.found:
            # Held back is what may become a stop string, and no letter more.
            waiting = fed[len(said) :]
            longest = max((n for stop in stops for n in range(1, len(stop)) if fed.endswith(stop[:n])), default=0)
            assert len(waiting) == longest
    found = machine.found
    assert (said + machine.finish(), found) == expected("".join(pieces), stops)


def transcript(*stops: str, stop_token_ids: tuple[int, ...] = (), min_tokens: int = 0) -> Transcript:
    return Transcript(ByteTokenizer().detokenizer(), stops, stop_token_ids, min_tokens)


def test_nothing_behind_a_stop_string_is_said_or_counted() -> None:
    made = transcript("END")
    assert made.feed(b"abcEN") == "abc"
    assert made.feed(b"Dxyz") == ""
    assert made.stopped
    assert made.tokens == 6


def test_what_was_held_back_is_said_in_the_end() -> None:
    made = transcript("END")
    assert made.feed(b"abcEN") == "abc"
    assert made.finish(stopped=False) == "EN"
    assert not made.stopped


def test_stop_string_of_several_bytes() -> None:
    made = transcript("\u65e5\u672c")
    assert "".join(made.feed([byte]) for byte in "ok\u65e5\u672c!".encode() if not made.stopped) == "ok"
    assert made.stopped


def test_stop_strings_wait_for_min_tokens() -> None:
    made = transcript("a", min_tokens=3)
    assert made.feed(b"aaabba") == "aaabb"
    assert made.tokens == 6


def test_only_the_stop_token_that_ended_the_request_is_left_out() -> None:
    made = transcript(stop_token_ids=(ord("."),))
    assert made.feed(b"a.") == "a"
    assert made.feed(b"b.") == ".b"
    assert made.finish(stopped=True) == ""
    assert made.tokens == 4
    made = transcript(stop_token_ids=(ord("."),))
    assert made.feed(b"a.") == "a"
    assert made.finish(stopped=False) == "."
