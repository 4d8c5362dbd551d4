"""From the tokens of one request to the text its client gets: stop strings, stop tokens, and counting."""

from collections.abc import Collection, Sequence

from examples.openai_server.text import Detokenizer


class StopStrings:
    """Ends a text before the first of `stops`, however it is cut into parts.

    Only what may still become one of them is held back: the longest end of the text with which one begins (Knuth,
    Morris and Pratt).  Letter by letter, so that the result does not depend on where the parts were cut; when two stop
    strings end at the same letter, the longer one counts, and no part of any is said.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.found = False
        self._stops = [(stop, _borders(stop)) for stop in stops]
        self._matched = [0] * len(stops)
        self._held = ""

    def feed(self, text: str) -> str:
        """What can be said for sure after `text`."""
        if not self._stops or self.found:
            return "" if self.found else text
        text = self._held + text
        for place in range(len(self._held), len(text)):
            if length := self._advance(text[place]):
                self.found = True
                self._held = ""
                return text[: place + 1 - length]
        keep = len(text) - max(self._matched)
        self._held = text[keep:]
        return text[:keep]

    def finish(self) -> str:
        """Nothing follows: what was held back is no stop string."""
        held, self._held = self._held, ""
        return held

    def _advance(self, letter: str) -> int:
        """Take one letter; the length of the longest stop string that ends with it, or 0."""
        ended = 0
        for index, (stop, borders) in enumerate(self._stops):
            matched = self._matched[index]
            while matched and stop[matched] != letter:
                matched = borders[matched - 1]
            matched += stop[matched] == letter
            self._matched[index] = matched
            if matched == len(stop):
                ended = max(ended, matched)
        return ended


def _borders(stop: str) -> list[int]:
    """For each beginning of `stop`, the length of its longest proper end with which it also begins."""
    borders = [0] * len(stop)
    length = 0
    for place in range(1, len(stop)):
        while length and stop[place] != stop[length]:
            length = borders[length - 1]
        length += stop[place] == stop[length]
        borders[place] = length
    return borders


class Transcript:
    """What one request says.

    stop_token_ids  the token that ends a request with one of these is not part of the text (the model's own end tokens
                    have no text anyway)
    min_tokens      stop strings are looked for only in what comes after that many tokens

    `tokens` counts those that have been read; the ones behind a stop string, which the engine may have made meanwhile,
    are not, so usage does not depend on how fast the client reads.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        stops: Sequence[str] = (),
        stop_token_ids: Collection[int] = (),
        min_tokens: int = 0,
    ) -> None:
        self.tokens = 0
        self._detokenizer = detokenizer
        self._stops = StopStrings(stops)
        self._stop_ids = frozenset(stop_token_ids)
        self._min_tokens = min_tokens
        self._one_by_one = bool(stops or stop_token_ids)
        self._pending: int | None = None  # a stop token, which may be the last one

    @property
    def stopped(self) -> bool:
        """Whether a stop string has come: the request can be aborted."""
        return self._stops.found

    def feed(self, token_ids: Sequence[int]) -> str:
        """What these tokens add to the text."""
        if not self._one_by_one:
            self.tokens += len(token_ids)
            return self._detokenizer.push(token_ids)
        said = []
        for token in token_ids:
            said.append(self._say_pending())  # it was followed by another one, so it has ended nothing
            if not self.stopped:
                self.tokens += 1
                if token in self._stop_ids:
                    self._pending = token
                else:
                    said.append(self._say(token))
        return "".join(said)

    def finish(self, *, stopped: bool) -> str:
        """The rest of the text; `stopped`: the engine ended the request with a stop token."""
        said = "" if stopped else self._say_pending()
        return said + self._stops.feed(self._detokenizer.finish()) + self._stops.finish()

    def _say(self, token: int) -> str:
        text = self._detokenizer.push((token,))
        return text if self.tokens <= self._min_tokens else self._stops.feed(text)

    def _say_pending(self) -> str:
        token, self._pending = self._pending, None
        return "" if token is None else self._say(token)
