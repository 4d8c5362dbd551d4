"""From logits to tokens: the same row gives the same token, whatever else is in its batch.

Chance comes from the host, one number per row and step, and is turned into a token by the inverse of the cumulative
distribution (inverse transform sampling, Devroye 1986, II.2), in the order of the vocabulary.  No generator of a device
takes part, so neither the place of a row in its batch, nor the device, nor a preemption changes what it says.

Order of what a request asks for, as its users know it: penalties on the raw logits, then temperature, top-k, top-p
(of what top-k left), min-p.  Each filter keeps the tokens down to a threshold, and a token that ties with the last one
kept is kept too: that makes the set a matter of values alone, not of how a sort breaks ties.

Nothing here waits for the device: branches look at host arrays only.
"""

from collections.abc import Iterator
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from kvloom.scheduler.penalties import PenaltyState
from kvloom.scheduler.plan import Sampling
from kvloom.scheduler.uploads import to_device

BAD_TOKEN = -1  # the token of a row whose logits mean nothing; outside every vocabulary


class SampledRows(Protocol):
    """Host arrays: the row slot of each row, and which rows are sampled."""

    @property
    def row_slot(self) -> NDArray[np.int32]: ...
    @property
    def sample_rows(self) -> NDArray[np.int32]: ...


class SampledBatch(Protocol):
    """A batch, as far as sampling is concerned."""

    @property
    def host(self) -> SampledRows: ...
    @property
    def sampling(self) -> Sampling | None: ...


class Sampler:
    """Chooses one token per sampled row.

    A row whose logits mean nothing (NaN or +inf among them, or all of them -inf) gets -1, and its request
    fails when the tokens are on the host; to raise here would mean to wait for the device.

    Holds the token counts of rows with penalties, so one sampler serves one engine, in step order.
    """

    def __init__(self) -> None:
        self._penalties = PenaltyState()

    @torch.no_grad()
    def __call__(self, logits: torch.Tensor, batch: SampledBatch) -> torch.Tensor:
        """int64 [S] on the device of `logits` (float [S, V], any floating dtype; left as they are).

        Ties of a greedy row go to the lowest token id.
        """
        sampling = batch.sampling
        if sampling is None or len(logits) == 0:
            return _best(logits)
        penalties, row_slots = sampling.penalties, batch.host.row_slot[batch.host.sample_rows]
        if penalties is not None:
            logits = self._penalties.apply(logits, row_slots, penalties)
        tokens = _best(logits)
        # The best token alone is what top_k=1 means, also where two tie.
        hot = np.flatnonzero((sampling.temperature > 0) & (sampling.top_k != 1))
        if len(hot) == len(tokens):
            tokens = torch.where(tokens < 0, tokens, _draw(logits, sampling, hot))
        elif len(hot):
            rows = to_device(hot, logits.device)
            drawn = _draw(logits[rows], sampling, hot)
            tokens = tokens.index_copy(0, rows, torch.where(tokens[rows] < 0, tokens[rows], drawn))
        if penalties is not None:
            self._penalties.record(tokens, row_slots, penalties)
        return tokens


def _best(logits: torch.Tensor) -> torch.Tensor:
    """The likeliest token of each row, -1 for a row whose logits mean nothing."""
    # One reduction finds both: NaN and +inf win every comparison, and -inf is the maximum only where all are -inf.
    highest, tokens = logits.max(dim=-1)
    return torch.where(highest.isfinite(), tokens, BAD_TOKEN)


def _draw(logits: torch.Tensor, sampling: "Sampling", rows: NDArray[np.intp]) -> torch.Tensor:
    """One token per row of `logits` [N, V], which are the rows `rows` [N] of `sampling`; int64 [N]."""
    vocab = logits.shape[-1]
    packed = np.stack([array[rows] for array in (sampling.temperature, sampling.uniform, sampling.min_p)])
    temperature, uniform, min_p = to_device(packed, logits.device).unsqueeze(-1)
    scores = logits.float()
    # Relative to the best token, which is 1 then: no temperature, however small, can overflow.
    scores = (scores - scores.amax(dim=-1, keepdim=True)) / temperature.clamp_min(torch.finfo(torch.float32).tiny)
    weights = scores.exp()

    top_k = sampling.top_k[rows].astype(np.int64)
    top_k = np.where((top_k <= 0) | (top_k > vocab), vocab, top_k)
    top_p = sampling.top_p[rows]
    floor = None
    for some in _sort_groups(top_k < vocab, top_p < 1):
        whole = len(some) == len(rows)
        index = None if whole else to_device(some, logits.device)
        found = _floor(
            scores if index is None else scores[index],
            weights if index is None else weights[index],
            top_k[some],
            top_p[some],
        )
        if index is not None:
            found = (scores.new_full((len(rows), 1), -torch.inf) if floor is None else floor).index_copy(
                0, index, found
            )
        floor = found
    if floor is not None:
        weights = weights.masked_fill(scores < floor, 0)
    if sampling.min_p[rows].any():
        weights = weights.masked_fill(weights < min_p, 0)
    return _invert(weights, uniform)


def _sort_groups(has_top_k: NDArray[np.bool_], has_top_p: NDArray[np.bool_]) -> Iterator[NDArray[np.intp]]:
    """Rows to be sorted: those with top-k, of which the first k are enough, apart from those that need everything."""
    for wanted in (has_top_k, has_top_p & ~has_top_k):
        if wanted.any():
            yield np.flatnonzero(wanted)


def _floor(
    scores: torch.Tensor, weights: torch.Tensor, top_k: NDArray[np.int64], top_p: NDArray[np.float32]
) -> torch.Tensor:
    """The lowest score that top-k and top-p keep, float32 [N, 1], of `scores` and their exponentials [N, V]."""
    device, width = scores.device, int(top_k.max())
    last = to_device(top_k[:, None] - 1, device)
    highest = scores.topk(width, dim=-1, sorted=True).values
    floor = highest.gather(1, last)
    if not (top_p < 1).any():
        return floor
    # The mass is summed over all that top-k keeps, ties included: the same number whichever width was sorted.
    mass = weights.masked_fill(scores < floor, 0).sum(dim=-1, keepdim=True, dtype=_wide(device))
    before = highest.exp().cumsum(dim=-1, dtype=_wide(device)) - highest.exp()
    share = to_device(top_p[:, None], device).to(mass.dtype)
    # A token stays while those before it have not reached the share; a share of 1 keeps all.
    kept = ((before < share * mass) | (share >= 1)).sum(dim=-1, keepdim=True)
    return torch.maximum(floor, highest.gather(1, kept.clamp_min(1) - 1))


def _invert(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """The first token at which the summed weights [N, V] exceed `uniform` [N, 1] of their total; int64 [N]."""
    # Double precision: in single, a long tail of unlikely tokens would add up to nothing.
    summed = weights.cumsum(dim=-1, dtype=_wide(weights.device))
    total = summed[:, -1:]
    # Just below the total, a rounded-up target still lands on a token that has weight.
    target = torch.minimum(uniform.to(total.dtype) * total, torch.nextafter(total, torch.zeros_like(total)))
    found = torch.searchsorted(summed, target.contiguous(), right=True)
    return found.squeeze(-1).clamp_max(weights.shape[-1] - 1)


def _wide(device: torch.device) -> torch.dtype:
    """The widest float that a device can add up: Apple's has no doubles."""
    return torch.float32 if device.type == "mps" else torch.float64
