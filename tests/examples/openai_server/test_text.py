"""From tokens to text and back, without a server."""

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings, strategies as st
from tokenizers import AddedToken, Tokenizer as Backend, decoders, models, pre_tokenizers
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

from examples.openai_server.text import ByteTokenizer, Detokenizer, HFTokenizer, pieces_of

FAMILY = "\U0001f469\u200d\U0001f469\u200d\U0001f467"
TEXTS = ["hello w\u00f6rld", "\U0001f600", "\u65e5\u672c\u8a9e", "e\u0301", FAMILY, "\ufffd", " a\n", "<think>"]


def byte_level() -> Backend:
    """As GPT-2 and its heirs have it; with few merges, so that characters are split."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=280,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<end>"],
        show_progress=False,
    )
    backend.train_from_iterator(TEXTS[:5] * 20, trainer)
    backend.add_tokens([AddedToken("<think>"), AddedToken("  ")])
    return backend


def byte_fallback(strip: bool = True) -> Backend:
    """As Llama 2 has it: words with a mark for the space, and tokens for single bytes."""
    vocabulary = {"<unk>": 0, "<end>": 1}
    vocabulary |= {f"<0x{value:02X}>": len(vocabulary) + value for value in range(256)}
    for word in ("\u2581", "a", "b", "\u2581hello", "\u2581a", "\u65e5"):
        vocabulary[word] = len(vocabulary)
    backend = Backend(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>"))
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    backend.add_special_tokens([AddedToken("<unk>", special=True), AddedToken("<end>", special=True)])
    return backend


def parts(detokenizer: Detokenizer, ids: Sequence[int], size: int = 1) -> list[str]:
    return [detokenizer.push(ids[at : at + size]) for at in range(0, len(ids), size)] + [detokenizer.finish()]


BYTE_LEVEL = byte_level()
PIECES, _ = pieces_of(BYTE_LEVEL)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.one_of(st.sampled_from(TEXTS), st.integers(0, len(PIECES) - 1))), st.integers(1, 4))
def test_b46_byte_level_text_is_what_the_tokenizers_library_says(said: list[str | int], size: int) -> None:
    ids: list[int] = []
    for each in said:
        ids += [each] if isinstance(each, int) else BYTE_LEVEL.encode(each, add_special_tokens=False).ids
    assert "".join(parts(Detokenizer(PIECES), ids, size)) == BYTE_LEVEL.decode(ids, skip_special_tokens=True)


@settings(max_examples=100, deadline=None)
@given(st.text(alphabet="ab \u65e5\u672c\U0001f600\u0301"), st.booleans())
def test_b46_byte_fallback_text_is_what_the_tokenizers_library_says(text: str, strip: bool) -> None:
    backend = byte_fallback(strip)
    ids = backend.encode(text.replace(" ", "\u2581"), add_special_tokens=False).ids
    pieces, strip_first = pieces_of(backend)
    assert "".join(parts(Detokenizer(pieces, strip_first=strip_first), ids)) == backend.decode(ids)


def test_b46_byte_fallback_spares_the_neighbours_of_an_invalid_byte() -> None:
    """The library replaces the whole run of byte tokens."""
    backend = byte_fallback()
    pieces, _ = pieces_of(backend)
    ids = [2 + value for value in (*"\u20ac".encode(), 0xFF)]
    assert "".join(parts(Detokenizer(pieces), ids)) == "\u20ac\ufffd"
    assert backend.decode(ids) == "\ufffd" * 4


@pytest.mark.parametrize(
    ("said", "text"),
    [
        ("\U0001f600".encode(), ["", "", "", "\U0001f600", ""]),
        ("e\u0301".encode(), ["e", "", "\u0301", ""]),
        (b"a\xffb", ["a", "\ufffd", "b", ""]),
        (b"a\xe6\x97", ["a", "", "", "\ufffd"]),
        (b"\xf0\x9fa", ["", "", "\ufffda", ""]),
    ],
    ids=["emoji", "accent", "stray byte", "cut", "cut inside"],
)
def test_b46_bytes_wait_no_longer_than_their_character(said: bytes, text: list[str]) -> None:
    assert parts(ByteTokenizer().detokenizer(), said) == text


def test_b46_emoji_over_two_tokens() -> None:
    pieces = [b"\xf0\x9f", b"\x98\x80"]
    assert parts(Detokenizer(pieces), [0, 1, 0, 1]) == ["", "\U0001f600", "", "\U0001f600", ""]


def test_b46_streams_do_not_mix() -> None:
    tokenizer = ByteTokenizer()
    one, other = tokenizer.detokenizer(), tokenizer.detokenizer()
    said = [(one.push([a]), other.push([b])) for a, b in zip("\u65e5".encode(), "\u672c".encode(), strict=True)]
    assert said == [("", ""), ("", ""), ("\u65e5", "\u672c")]


def test_tokens_beyond_the_tokenizer_say_nothing() -> None:
    assert parts(ByteTokenizer().detokenizer(), [256, 104, 9999, 105]) == ["", "h", "", "i", ""]


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_special_tokens_say_nothing_and_plain_text_comes_back(make: Callable[[], Backend]) -> None:
    fast = PreTrainedTokenizerFast(tokenizer_object=make(), eos_token="<end>")  # type: ignore[no-untyped-call]
    tokenizer = HFTokenizer(fast)
    ids = tokenizer.encode("ab")
    end = fast.convert_tokens_to_ids("<end>")
    assert isinstance(end, int)
    assert "".join(parts(tokenizer.detokenizer(), [*ids, end])) == "ab"


def test_conversation_goes_through_the_models_template() -> None:
    fast = PreTrainedTokenizerFast(tokenizer_object=byte_level(), eos_token="<end>")  # type: ignore[no-untyped-call]
    tokenizer = HFTokenizer(fast)
    messages = [{"role": "user", "content": "hello"}]
    with pytest.raises(ValueError, match="no chat template"):
        tokenizer.encode_chat(messages)
    fast.chat_template = (
        "{% if messages[0].role != 'user' %}{{ raise_exception('user first') }}{% endif %}"
        "{% for m in messages %}{{ m.role }}:{{ m.content }}<end>{% endfor %}"
        "{% if add_generation_prompt %}a:{% endif %}"
    )
    ids = tokenizer.encode_chat(messages)
    assert fast.decode(ids) == "user:hello<end>a:"
    with pytest.raises(ValueError, match="user first"):
        tokenizer.encode_chat([{"role": "system", "content": "x"}])


def test_other_kinds_of_tokenizers_are_refused() -> None:
    backend = Backend(models.WordLevel({"a": 0}, unk_token="a"))
    backend.decoder = decoders.WordPiece()
    with pytest.raises(ValueError, match="WordPiece"):
        pieces_of(backend)
