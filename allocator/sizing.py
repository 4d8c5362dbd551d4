"""How many slots each pool of a memory gets."""

from collections.abc import Mapping, Sequence
from numbers import Real

import torch

from kvloom.allocator.errors import InvalidArgument
from kvloom.allocator.indices import whole
from kvloom.allocator.memory_pool import least_window_pages
from kvloom.allocator.ports import RunnerNeeds
from kvloom.allocator.spec import PoolSpec

USUAL_LENGTH = 2048  # tokens of a request when nobody says


def pages_of_mix(pools: Sequence[PoolSpec], page_size: int, lengths: Sequence[int]) -> dict[str, float]:
    """Mean pages that a request holds in each pool at its end, over requests of these lengths in tokens.

    In a window pool that is the window, and on the average one page more, for it lies across pages.
    Raises InvalidArgument unless there is a length, all from 1 up.
    """
    if not isinstance(lengths, Sequence) or isinstance(lengths, str):
        raise InvalidArgument(f"lengths={lengths!r} must be a row of lengths")
    tokens = [whole("length", length) for length in lengths]
    if not tokens or min(tokens) < 1:
        raise InvalidArgument(f"lengths={tokens[:8]}: a mix is of at least one length, all from 1 up")
    pages = [-(-length // page_size) for length in tokens]
    means = {}
    for pool in pools:
        most = float("inf") if pool.window is None else -(-pool.window // page_size) + 1
        means[pool.name] = sum(min(count, most) for count in pages) / len(pages)
    return means


def pool_tokens(
    pools: Sequence[PoolSpec],
    page_size: int,
    capacity_tokens: int | Mapping[str, int],
    max_seq: int | None,
    lengths: Sequence[int],
) -> dict[str, int]:
    """Slots of each pool, in whole pages.

    `capacity_tokens` by pool; or one number: that many in the largest pool, in the others what the same requests need.
    Raises InvalidArgument when pools are missing, named twice or less than a page.
    """
    names = [pool.name for pool in pools]
    if not pools or len(set(names)) < len(names):
        raise InvalidArgument(f"pools {names}; at least one, each with a name of its own")
    if isinstance(capacity_tokens, Mapping):
        given = dict(capacity_tokens)
    else:
        capacity = whole("capacity_tokens", capacity_tokens)
        longest = max(1, capacity if max_seq is None else min(capacity, max_seq))
        means = pages_of_mix(pools, page_size, lengths or [min(longest, USUAL_LENGTH)])
        requests = capacity / page_size / max(means.values())
        given = {pool.name: _tokens(pool, page_size, means[pool.name] * requests, capacity) for pool in pools}
    if set(given) != set(names) or any(whole(name, tokens) < page_size for name, tokens in given.items()):
        raise InvalidArgument(f"capacity_tokens={given}: each of the pools {names} must hold a page of {page_size}")
    return {name: tokens // page_size * page_size for name, tokens in given.items()}


def longest_row(pools: Sequence[PoolSpec], tokens: Mapping[str, int], max_seq: int | None, pinned: int) -> int:
    """Tokens of the longest sequence: what the pools that keep all of it can hold; through a window it only passes.

    `pinned` tokens of each pool nobody can count on.  Raises InvalidArgument when that is all.
    """
    keep_all = [tokens[pool.name] - pinned for pool in pools if pool.window is None]
    if keep_all and min(keep_all) < 1:
        raise InvalidArgument(f"pins may keep {pinned} tokens, which is all of a pool: {dict(tokens)}")
    bounds = keep_all if max_seq is None else [*keep_all, max_seq]
    return min(bounds) if bounds else max(tokens.values())


def tokens_for_bytes(pools: Sequence[PoolSpec], page_size: int, nbytes: int, lengths: Sequence[int]) -> dict[str, int]:
    """Slots of each pool, in whole pages, that together take at most `nbytes`, for as many requests as possible.

    All pools are full at the same number of requests: any other split leaves one idle while another is short.
    Raises InvalidArgument when that is less than a page each, or when the pools keep no KV.
    """
    means = pages_of_mix(pools, page_size, lengths)
    page_bytes = {pool.name: pool.bytes_per_token * page_size for pool in pools}
    per_request = sum(means[name] * page_bytes[name] for name in means)
    if per_request == 0:
        raise InvalidArgument("the runner keeps no KV, so bytes say nothing; give capacity_tokens")
    requests = (nbytes - sum(page_bytes.values())) / per_request  # a dump page each
    if min(means.values()) * requests < 1:
        raise InvalidArgument(f"{nbytes} bytes hold less than a page of each pool: {page_bytes}")
    return {pool.name: int(means[pool.name] * requests) * page_size for pool in pools}


def runner_tokens(
    spec: RunnerNeeds,
    page_size: int,
    capacity_tokens: int | Mapping[str, int] | None,
    memory_bytes: int | None,
    memory_fraction: float | None,
    lengths: Sequence[int],
) -> int | Mapping[str, int]:
    """What was asked for, one of three, as tokens.  Raises InvalidArgument when it is none or several of them."""
    given = {
        name: value
        for name, value in (
            ("capacity_tokens", capacity_tokens),
            ("memory_bytes", memory_bytes),
            ("memory_fraction", memory_fraction),
        )
        if value is not None
    }
    if len(given) != 1:
        raise InvalidArgument(f"one of capacity_tokens, memory_bytes, memory_fraction says how large; got {given}")
    if capacity_tokens is not None:
        return capacity_tokens
    if memory_fraction is not None:
        if not isinstance(memory_fraction, Real) or not 0 < memory_fraction <= 1:
            raise InvalidArgument(f"memory_fraction={memory_fraction} must be above 0, at most 1")
        memory_bytes = int(free_bytes(spec.device) * memory_fraction)
    return tokens_for_bytes(
        spec.pools, page_size, whole("memory_bytes", memory_bytes or 0), lengths or [min(spec.max_seq, USUAL_LENGTH)]
    )


def free_bytes(device: torch.device) -> int:
    """Bytes of memory that are free on a device.  Raises InvalidArgument where torch cannot say."""
    if device.type != "cuda":
        raise InvalidArgument(f"memory_fraction is for CUDA devices, not for {device}: give memory_bytes")
    return int(torch.cuda.mem_get_info(device)[0])


def _tokens(pool: PoolSpec, page_size: int, pages: float, most: int) -> int:
    """Never less than one row needs, nor more than there is to attend to."""
    return min(max(int(pages), least_window_pages(pool.window, page_size)) * page_size, most)
