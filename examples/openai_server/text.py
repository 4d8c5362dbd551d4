"""Between text and token ids: what the server asks of a tokenizer, and two of them.

Tokens become text through bytes: every token stands for some, and an incremental UTF-8 decoder joins what is split over
tokens.  So a stream says exactly what a whole answer says, and a replacement mark appears only for bytes that are
invalid or cut.  The obvious way, `tokenizers.decoders.DecodeStream`, gives the same text for byte-level vocabularies,
but holds back a run of invalid bytes for as long as it lasts and decodes all of it anew for each token (5 s of an event
loop for 4,000 of them), has no way to get at what is left at the end, and raises for some sequences of byte-fallback
tokens.
"""

import codecs
import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from tokenizers import Tokenizer as Backend
from tokenizers.pre_tokenizers import ByteLevel

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

BYTE_NAME = re.compile("<0x([0-9A-F]{2})>")  # a token for a byte that no other token holds


class Detokenizer:
    """The text of one stream of tokens, as it grows.  `pieces[token]` are the bytes that a token stands for."""

    def __init__(self, pieces: Sequence[bytes], *, strip_first: bool = False) -> None:
        self._pieces = pieces
        self._strip = strip_first
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: Sequence[int]) -> str:
        """What these tokens add; bytes of a character that is not complete wait for the next ones."""
        pieces, size = self._pieces, len(self._pieces)
        # A model's vocabulary is often padded to a rounder number than its tokenizer's; those tokens say nothing.
        data = b"".join([pieces[token] for token in token_ids if token < size])
        if self._strip and data:
            self._strip = False
            data = data.removeprefix(b" ")
        return self._utf8.decode(data)

    def finish(self) -> str:
        """What was waiting: a replacement mark if a character has been cut, else nothing."""
        return self._utf8.decode(b"", True)


class Tokenizer(Protocol):
    """What the server needs.  The first two run in worker threads, several at once."""

    def encode(self, text: str) -> list[int]:
        """A plain prompt, with the tokens that the model wants in front.  Raises ValueError."""

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """A conversation up to where the assistant speaks.  Raises ValueError, which the client gets to read."""

    def detokenizer(self) -> Detokenizer:
        """A new one, for one answer."""


class ByteTokenizer:
    """Token n is byte n, as `ToyRunner` speaks; ids from 256 on (an end token) say nothing."""

    def __init__(self) -> None:
        self._pieces = [bytes([value]) for value in range(256)]

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        return self.encode("".join(f"{each['role']}: {each['content']}\n" for each in messages) + "assistant: ")

    def detokenizer(self) -> Detokenizer:
        return Detokenizer(self._pieces)


class HFTokenizer:
    """A fast tokenizer of Hugging Face: byte-level (GPT-2, Llama 3, Qwen, SmolLM) or in the manner of SentencePiece.

    Raises ValueError for one of another kind.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerFast") -> None:
        self._template = tokenizer
        # A copy: calls on the original from elsewhere may change its padding, and fail if we encode at that moment.
        self._backend = Backend.from_str(tokenizer.backend_tokenizer.to_str())
        self._backend.no_truncation()
        self._backend.no_padding()
        self._pieces, self._strip_first = pieces_of(self._backend)

    def encode(self, text: str) -> list[int]:
        return self._encode(text, special=True)

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        from jinja2 import TemplateError  # noqa: PLC0415 - optional: only templates need it

        if not self._template.chat_template:
            raise ValueError("this model has no chat template; use /v1/completions")
        try:
            text = self._template.apply_chat_template(
                [dict(each) for each in messages], tokenize=False, add_generation_prompt=True
            )
        except TemplateError as error:  # many templates refuse a conversation by raising one
            raise ValueError(f"the model's chat template refuses them: {error}") from error
        return self._encode(str(text), special=False)

    def detokenizer(self) -> Detokenizer:
        return Detokenizer(self._pieces, strip_first=self._strip_first)

    def _encode(self, text: str, *, special: bool) -> list[int]:
        # `encode` keeps the interpreter lock while it works, seconds for a long text; the one for batches releases it.
        return list(self._backend.encode_batch_fast([text], add_special_tokens=special)[0].ids)


def pieces_of(backend: Backend) -> tuple[list[bytes], bool]:
    """The bytes of every token (none for special ones), and whether a space at the very start is to be left out."""
    decoder = json.loads(backend.to_str())["decoder"] or {}
    steps = decoder["decoders"] if decoder.get("type") == "Sequence" else [decoder]
    kinds: dict[str, Mapping[str, Any]] = {step.get("type", ""): step for step in steps}
    vocabulary = backend.get_vocab(with_added_tokens=True)
    pieces = [b""] * (max(vocabulary.values(), default=-1) + 1)
    special = {token for token, added in backend.get_added_tokens_decoder().items() if added.special}
    if "ByteLevel" in kinds:
        letters = _byte_letters()
        for name, token in vocabulary.items():
            # Added tokens are written as they are, not in the alphabet.
            known = all(letter in letters for letter in name)
            pieces[token] = bytes([letters[letter] for letter in name]) if known else name.encode()
    elif "ByteFallback" in kinds or "Metaspace" in kinds:
        for name, token in vocabulary.items():
            byte = BYTE_NAME.fullmatch(name)
            pieces[token] = bytes.fromhex(byte[1]) if byte else name.replace("\u2581", " ").encode()
    else:
        raise ValueError(f"a tokenizer with the decoder {list(kinds)} is not supported")
    for token in special:
        pieces[token] = b""
    return pieces, _strips_first(kinds)


def _strips_first(kinds: Mapping[str, Mapping[str, Any]]) -> bool:
    if "Metaspace" in kinds:
        return bool(kinds["Metaspace"].get("prepend_scheme", "always") != "never")
    return bool("Strip" in kinds and kinds["Strip"].get("start", 0))


def _byte_letters() -> dict[str, int]:
    """The alphabet in which byte-level vocabularies are written, backwards: letter -> byte.

    GPT-2's rule: a byte that is a visible character of Latin-1 stands for itself, the others follow from 256 on.
    """
    alphabet = set(ByteLevel.alphabet())
    visible = {value for value in range(256) if chr(value) in alphabet}
    hidden = [value for value in range(256) if value not in visible]
    return {chr(value): value for value in visible} | {chr(256 + place): value for place, value in enumerate(hidden)}
