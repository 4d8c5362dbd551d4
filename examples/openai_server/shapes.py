"""The JSON of answers, whole and in chunks."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

Json = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Totals:
    """What a request has cost."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    def as_json(self) -> Json:
        """OpenAI's `usage`."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


class Shape(Protocol):
    """How one route spells its answers."""

    def opening(self) -> Json | None:
        """The chunk before the first piece of text, if there is one."""

    def piece(self, text: str) -> Json:
        """A chunk with text."""

    def closing(self, reason: str) -> Json:
        """The chunk after the last piece of text."""

    def usage(self, totals: Totals) -> Json:
        """The chunk for those who asked what it cost."""

    def whole(self, text: str, reason: str, totals: Totals) -> Json:
        """An answer that is not streamed."""


class ChatShape:
    """/v1/chat/completions"""

    def __init__(self, request_id: str, model: str) -> None:
        self._head = {"id": f"chatcmpl-{request_id}", "created": int(time.time()), "model": model}

    def opening(self) -> Json:
        return self._chunk({"role": "assistant", "content": ""}, None)

    def piece(self, text: str) -> Json:
        return self._chunk({"content": text}, None)

    def closing(self, reason: str) -> Json:
        return self._chunk({}, reason)

    def usage(self, totals: Totals) -> Json:
        return {**self._head, "object": "chat.completion.chunk", "choices": [], "usage": totals.as_json()}

    def whole(self, text: str, reason: str, totals: Totals) -> Json:
        message = {"role": "assistant", "content": text}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": reason}
        return {**self._head, "object": "chat.completion", "choices": [choice], "usage": totals.as_json()}

    def _chunk(self, delta: Json, reason: str | None) -> Json:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
        return {**self._head, "object": "chat.completion.chunk", "choices": [choice]}


class CompletionShape:
    """/v1/completions: chunks look like whole answers"""

    def __init__(self, request_id: str, model: str) -> None:
        self._head = {
            "id": f"cmpl-{request_id}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }

    def opening(self) -> None:
        return None

    def piece(self, text: str) -> Json:
        return self._with(text, None)

    def closing(self, reason: str) -> Json:
        return self._with("", reason)

    def usage(self, totals: Totals) -> Json:
        return {**self._head, "choices": [], "usage": totals.as_json()}

    def whole(self, text: str, reason: str, totals: Totals) -> Json:
        return {**self._with(text, reason), "usage": totals.as_json()}

    def _with(self, text: str, reason: str | None) -> Json:
        return {**self._head, "choices": [{"index": 0, "text": text, "logprobs": None, "finish_reason": reason}]}
