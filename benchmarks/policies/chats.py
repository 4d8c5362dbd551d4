"""A synthetic day in the life of a server: the chats and batch jobs of many tenants, the same for the same seed.

Each tenant has a system prompt in front of all its conversations, and few tenants have most of them.  Each turn of a
conversation repeats all before it, a new question behind it; between turns the user reads and thinks while others are
served.  Batch jobs come in bursts: the same instruction, then a document that nobody sends again.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvloom.allocator.prefix.base import TokenArray


@dataclass(frozen=True)
class Shape:
    """Parameters of a trace.  Pairs are bounds, both inclusive; medians are those of lognormal distributions.

    Lengths in tokens, times in seconds.  `important`: tenants by rank of popularity whose requests have priority 1.
    """

    seed: int = 7
    page_size: int = 16
    vocabulary: int = 150_000
    tenants: int = 40
    zipf: float = 1.0  # conversations of the tenant of rank r: as 1 / r ** zipf
    important: tuple[int, ...] = (5, 15, 25, 35)
    system_tokens: tuple[int, int] = (300, 3_000)
    conversations: int = 1_500
    span: float = 3_600.0  # in which they begin
    more_turns: float = 0.75  # chance of another turn
    turns_max: int = 10
    question_median: float = 60.0
    answer_median: float = 200.0
    length_sigma: float = 0.8
    length_max: int = 2_000
    think_median: float = 40.0
    think_sigma: float = 1.0
    token_seconds: float = 0.02  # for each token of an answer
    bursts: int = 12
    burst_requests: int = 100
    burst_span: float = 60.0
    batch_tenants: int = 3  # the last in rank
    instruction_tokens: tuple[int, int] = (200, 400)
    document_tokens: tuple[int, int] = (500, 4_000)
    batch_answer_tokens: tuple[int, int] = (20, 100)


class Request(NamedTuple):
    """`tokens`, int32: `prompt` tokens of prompt, then the answer.  `at`: seconds since the start."""

    at: float
    tenant: int
    priority: int
    prompt: int
    tokens: TokenArray


class Crowd:
    """All tenants, and one source of chance for everything they do."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self._rng = np.random.default_rng(shape.seed)
        self._systems = [self._text(self._between(shape.system_tokens)) for _ in range(shape.tenants)]
        self._instructions = [self._text(self._between(shape.instruction_tokens)) for _ in range(shape.batch_tenants)]

    def requests(self) -> list[Request]:
        """All requests, in the order of their arrival."""
        shape = self._shape
        weights = 1 / np.arange(1, shape.tenants + 1) ** shape.zipf
        tenants = self._rng.choice(shape.tenants, shape.conversations, p=weights / weights.sum())
        requests = [request for tenant in tenants.tolist() for request in self._conversation(tenant)]
        for burst in range(shape.bursts):
            requests += self._burst(burst)
        return sorted(requests, key=lambda request: request.at)

    def _conversation(self, tenant: int) -> list[Request]:
        shape, rng = self._shape, self._rng
        at = float(rng.uniform(0, shape.span))
        parts, length = [self._systems[tenant]], len(self._systems[tenant])
        turns: list[tuple[float, int, int]] = []  # when it comes, where its prompt and its answer end
        while len(turns) < shape.turns_max and (not turns or rng.random() < shape.more_turns):
            question, answer = self._length(shape.question_median), self._length(shape.answer_median)
            parts.append(self._text(question + answer))
            turns.append((at, length + question, length + question + answer))
            length += question + answer
            at += answer * shape.token_seconds + float(rng.lognormal(np.log(shape.think_median), shape.think_sigma))
        tokens, priority = np.concatenate(parts), int(tenant + 1 in shape.important)
        return [Request(begin, tenant, priority, prompt, tokens[:end]) for begin, prompt, end in turns]

    def _burst(self, number: int) -> list[Request]:
        shape = self._shape
        job = number % shape.batch_tenants
        begin = float(self._rng.uniform(0, shape.span))
        requests = []
        for at in self._rng.uniform(begin, begin + shape.burst_span, shape.burst_requests).tolist():
            document = self._text(self._between(shape.document_tokens))
            answer = self._text(self._between(shape.batch_answer_tokens))
            tokens = np.concatenate((self._instructions[job], document, answer))
            tenant = shape.tenants - 1 - job
            requests.append(Request(at, tenant, 0, len(tokens) - len(answer), tokens))
        return requests

    def _text(self, tokens: int) -> TokenArray:
        return self._rng.integers(0, self._shape.vocabulary, tokens, dtype=np.int32)

    def _between(self, bounds: tuple[int, int]) -> int:
        return int(self._rng.integers(*bounds, endpoint=True))

    def _length(self, median: float) -> int:
        length = int(self._rng.lognormal(np.log(median), self._shape.length_sigma))
        return min(max(1, length), self._shape.length_max)
