"""The sampler: what each parameter keeps, chance from the host, and rows that do not feel each other."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from numpy.typing import NDArray

from kvloom.scheduler.plan import Sampling
from kvloom.scheduler.sampler import Sampler
from tests.scheduler.runners.by_hand import decode_batch

VOCAB = 97
GRID = 4096  # uniform numbers, evenly spread: counts then differ from the expected ones by rounding, not by chance


def sampling(rows: int, **params: float) -> Sampling:
    """The same parameters for each row; off where not given."""
    values = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "uniform": 0.5, **params}
    arrays: dict[str, Any] = {
        name: np.full(rows, value, np.int32 if name == "top_k" else np.float32) for name, value in values.items()
    }
    return Sampling(**arrays, penalties=None)


def drawn(logits: torch.Tensor, how: Sampling | None) -> list[int]:
    """One token per row, by a sampler of its own."""
    tokens: list[int] = Sampler()(logits, decode_batch(range(len(logits)), how)).tolist()
    return tokens


def counts(logits: torch.Tensor, **params: float) -> NDArray[np.int64]:
    """How often each token comes, over the grid."""
    how = replace(sampling(GRID, **params), uniform=((np.arange(GRID) + 0.5) / GRID).astype(np.float32))
    return np.bincount(drawn(logits.expand(GRID, -1), how), minlength=logits.shape[-1])


def test_greedy_is_argmax_and_ties_go_to_the_lowest_token() -> None:
    logits = torch.randn(64, VOCAB)
    logits[5, 7] = logits[5, 70] = 50
    assert drawn(logits, None) == logits.argmax(-1).tolist()
    assert drawn(logits, None)[5] == 7
    assert drawn(torch.zeros(64, VOCAB), None) == [0] * 64


def test_temperature_zero_and_top_k_one_are_greedy_whatever_else_is_asked() -> None:
    logits = torch.randn(6, VOCAB)
    best = logits.argmax(-1).tolist()
    assert drawn(logits, sampling(6, temperature=0, top_k=3, top_p=0.5, min_p=0.5, uniform=0.99)) == best
    assert drawn(logits, sampling(6, top_k=1, uniform=0.99)) == best
    assert drawn(logits, sampling(6, temperature=1e-44, uniform=0.99)) == best  # too small to divide by
    assert drawn(torch.zeros(1, VOCAB), sampling(1, top_k=1, uniform=0.99)) == [0]


def test_the_logits_are_left_as_they_are() -> None:
    logits = torch.randn(6, VOCAB)
    before = logits.clone()
    drawn(logits, sampling(6, top_k=5, top_p=0.9, min_p=0.1))
    assert torch.equal(logits, before)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_evenly_spread_numbers_give_the_softmax(temperature: float, dtype: torch.dtype) -> None:
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(1)).to(dtype)
    expected = torch.softmax(logits[0].double() / temperature, -1).numpy() * GRID
    seen = counts(logits, temperature=temperature)
    assert np.abs(seen - expected).max() <= 1.01
    assert float(((seen - expected) ** 2 / expected).sum()) < 49  # chi-square at its mean, of 49 degrees of freedom


def test_a_long_tail_keeps_its_mass() -> None:
    """Half of the probability in tokens of 1e-6 each: added up in single precision, much of it would vanish."""
    vocab = 500_001
    logits = torch.zeros(1, vocab)
    logits[0, 0] = math.log(vocab - 1)
    uniform = np.array([0.49, 0.51, 0.75, 0.999], np.float32)
    tokens = drawn(logits.expand(4, -1), replace(sampling(4), uniform=uniform))
    assert tokens == pytest.approx([0, 0.02 * vocab, 0.5 * vocab, 0.998 * vocab], abs=30)


@pytest.mark.parametrize("extra", [{}, {"top_k": 50}, {"top_p": 0.99}, {"min_p": 0.01}])
def test_the_ends_of_the_range_land_on_likely_tokens(extra: dict[str, float]) -> None:
    logits = torch.full((1, VOCAB), -math.inf)
    logits[0, 3:6] = 0
    almost_one = float(np.nextafter(np.float32(1), np.float32(0)))
    assert drawn(logits, sampling(1, uniform=almost_one, **extra)) == [5]
    assert drawn(logits, sampling(1, uniform=0, **extra)) == [3]


def kept_by_hand(logits: NDArray[np.float32], temperature: float, top_k: int, top_p: float, min_p: float) -> set[int]:
    """The same filters, one token at a time."""
    scores = logits.astype(np.float64) / temperature
    order = np.argsort(-scores, kind="stable").tolist()
    if top_k:
        order = order[:top_k]
    weights = {token: math.exp(scores[token] - scores.max()) for token in order}
    total, before, nucleus = sum(weights.values()), 0.0, []
    for token in order:
        if before < top_p * total:
            nucleus.append(token)
        before += weights[token]
    return {token for token in nucleus if weights[token] >= min_p}


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [
        (0, 1, 0),
        (5, 1, 0),
        (200, 1, 0),
        (0, 0.6, 0),
        (0, 0.01, 0),
        (0, 1, 0.2),
        (8, 0.7, 0),
        (9, 0.9, 0.3),
        (0, 0.9, 1),
    ],
)
@pytest.mark.parametrize("temperature", [0.7, 1.9])
def test_filters_keep_exactly_the_right_tokens(top_k: int, top_p: float, min_p: float, temperature: float) -> None:
    logits = torch.randn(1, 40, generator=torch.Generator().manual_seed(2)) * 2
    seen = counts(logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    kept = kept_by_hand(logits[0].numpy(), temperature, top_k, top_p, min_p)
    weights = torch.softmax(logits[0].double() / temperature, -1).numpy()
    weights[[token not in kept for token in range(40)]] = 0
    assert set(np.flatnonzero(seen).tolist()) <= kept
    assert np.abs(seen - weights / weights.sum() * GRID).max() <= 1.01


def test_tokens_that_tie_with_the_last_one_kept_are_kept() -> None:
    logits = torch.tensor([[3.0, 1.0, 2.0, 2.0, 2.0, 0.0]])
    assert np.flatnonzero(counts(logits, top_k=2)).tolist() == [0, 2, 3, 4]
    assert np.flatnonzero(counts(logits, top_p=0.6)).tolist() == [0, 2, 3, 4]


ROW = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.3, 1.0, 3.0]),
        "top_k": st.sampled_from([0, 1, 2, 7, 30, VOCAB, 1000]),
        "top_p": st.sampled_from([1.0, 0.95, 0.5, 1e-6]),
        "min_p": st.sampled_from([0.0, 0.05, 1.0]),
        "uniform": st.floats(0, 1, exclude_max=True, width=32),
    }
)


def asked(rows: list[dict[str, float]]) -> Sampling:
    arrays: dict[str, Any] = {
        name: np.array([row[name] for row in rows], np.int32 if name == "top_k" else np.float32) for name in rows[0]
    }
    return Sampling(**arrays, penalties=None)


@settings(max_examples=100, deadline=None)
@given(rows=st.lists(ROW, min_size=2, max_size=9), seed=st.integers(0, 2**31), ties=st.booleans())
def test_a_row_does_not_feel_its_neighbours(rows: list[dict[str, float]], seed: int, ties: bool) -> None:
    logits = torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(seed)) * 4
    if ties:
        logits = logits.round()
    together = drawn(logits, asked(rows))
    assert together == [drawn(logits[i : i + 1], asked([row]))[0] for i, row in enumerate(rows)]
    order = np.random.default_rng(seed).permutation(len(rows)).tolist()
    assert drawn(logits[order], asked([rows[i] for i in order])) == [together[i] for i in order]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("filters", [{}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.1}])
def test_a_row_without_meaning_is_reported_alone(temperature: float, filters: dict[str, float]) -> None:
    logits = torch.randn(6, VOCAB)
    how = sampling(6, temperature=temperature, **filters)
    good = drawn(logits, how)
    logits[1, 3] = math.nan
    logits[2] = math.nan
    logits[3, 50] = math.inf
    logits[4] = -math.inf
    assert drawn(logits, how) == [good[0], -1, -1, -1, -1, good[5]]
    assert drawn(logits, None)[1:5] == [-1] * 4


def test_excluded_tokens_are_fine() -> None:
    logits = torch.full((1, VOCAB), -math.inf)
    logits[0, [4, 8]] = torch.tensor([0.0, 1.0])
    assert np.flatnonzero(counts(logits)).tolist() == [4, 8]


def test_a_step_that_samples_nothing() -> None:
    for how in (None, sampling(0)):
        batch = decode_batch([0], how)
        batch.host.sample_rows = np.empty(0, np.int32)
        tokens = Sampler()(torch.empty(0, VOCAB), batch)
        assert tokens.tolist() == []
        assert tokens.dtype == torch.int64
