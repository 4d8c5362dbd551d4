"""How a request wants its tokens chosen."""

from dataclasses import dataclass
from numbers import Integral

import numpy as np

from kvloom.scheduler.errors import InvalidRequest

SEED_MAX = 2**63 - 1
STOP_IDS_MAX = 64  # every running row is compared with as many in every step


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling and stop conditions of one request.

    max_new_tokens      None: as many as the model's context and the pool allow
    temperature         0 is greedy
    top_k               0 keeps all tokens
    top_p               keep the most likely tokens that together reach this probability (Holtzman et al. 2019,
                        arXiv:1904.09751)
    min_p               keep tokens at least this fraction as likely as the best one (Nguyen et al. 2024,
                        arXiv:2407.01082)
    seed                the same seed and prompt give the same tokens, whatever else runs; None: the engine draws one
    repetition_penalty  divides (or multiplies, below 0) the logits of tokens seen in prompt or output (Keskar et al.
                        2019, arXiv:1909.05858); 1 is off, 0.01 is the least
    presence_penalty, frequency_penalty
                        taken off the logits of tokens in the output, once, or once per time; 0 is off
    stop_token_ids      end with `stop`, beside the model's own end tokens; at most 64 different ones
    ignore_eos          the model's own end tokens do not stop
    min_new_tokens      no stop before this many

    Raises `InvalidRequest` that names the field.
    """

    max_new_tokens: int | None = None
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    n: int = 1
    logprobs: int | None = None
    min_new_tokens: int = 0

    def __post_init__(self) -> None:
        if self.max_new_tokens is not None:
            _whole("max_new_tokens", self.max_new_tokens, 1, 2**31 - 1)
        _number("temperature", self.temperature, 0.0, 100.0)
        _whole("top_k", self.top_k, 0, 2**31 - 1)
        _number("top_p", self.top_p, 0.0, 1.0, above=True)
        _number("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            _whole("seed", self.seed, -SEED_MAX - 1, SEED_MAX)
        _number("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        _number("presence_penalty", self.presence_penalty, -100.0, 100.0)
        _number("frequency_penalty", self.frequency_penalty, -100.0, 100.0)
        _whole("min_new_tokens", self.min_new_tokens, 0, 2**31 - 1)
        if self.max_new_tokens is not None and self.min_new_tokens > self.max_new_tokens:
            raise InvalidRequest(
                "min_new_tokens", f"{self.min_new_tokens} is more than max_new_tokens={self.max_new_tokens}"
            )
        if not isinstance(self.stop_token_ids, tuple | list):
            raise InvalidRequest("stop_token_ids", f"{self.stop_token_ids!r} is no row of token ids")
        for token in self.stop_token_ids:
            _whole("stop_token_ids", token, 0, 2**31 - 1)
        different = tuple(dict.fromkeys(self.stop_token_ids))  # a tuple: a list could change under way
        if len(different) > STOP_IDS_MAX:
            raise InvalidRequest("stop_token_ids", f"{len(different)} different ids; at most {STOP_IDS_MAX}")
        object.__setattr__(self, "stop_token_ids", different)
        if not isinstance(self.ignore_eos, bool):
            raise InvalidRequest("ignore_eos", f"{self.ignore_eos!r} is neither True nor False")
        _whole("n", self.n, 1, 2**31 - 1)
        if self.n != 1:
            raise InvalidRequest("n", f"{self.n!r}: only 1 completion per request is supported")
        if self.logprobs is not None:
            raise InvalidRequest("logprobs", "not supported")

    @property
    def penalised(self) -> bool:
        """Whether any penalty is on."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


def _whole(field: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral) or not low <= int(value) <= high:
        raise InvalidRequest(field, f"{value!r} is not a whole number from {low} to {high}")


def _number(field: str, value: object, low: float, high: float, *, above: bool = False) -> None:
    # Not math.isnan, which fails for a whole number too large for a float.
    not_a_number = value != value  # noqa: PLR0124
    if isinstance(value, bool) or not isinstance(value, int | float | np.number) or not_a_number:
        raise InvalidRequest(field, f"{value!r} is not a number")
    if value < low or value > high or (above and value == low):
        raise InvalidRequest(field, f"{value!r} is not {'above' if above else 'from'} {low} up to {high}")
