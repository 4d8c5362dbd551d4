"""The public allocators on a device: the twins' answers, no synchronisation, no late compile, far slots."""

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from kvloom.allocator import (
    AscendPagedTokenToKVPoolAllocator,
    MHATokenToKVPool,
    PagedTokenToKVPoolAllocator,
    TokenToKVPoolAllocator,
)
from kvloom.allocator.kernels import Kernels, kernels_for, torch_kernels, warm_up
from tests.allocator.conformance.kinds import KINDS, WRAPPINGS, Kind
from tests.allocator.conformance.machine import check_against_twin
from tests.allocator.test_cases import taken
from tests.gpu.test_kernels import no_synchronisation

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:Synchronization debug mode"),  # says that it is a prototype
]

INDEX_DTYPES = (torch.int64, torch.int32)


@pytest.fixture(scope="module")
def cuda() -> torch.device:
    device = torch.device("cuda", torch.cuda.current_device())
    warm_up(device, INDEX_DTYPES)
    return device


def paged(cuda: torch.device, pages: int, page_size: int) -> PagedTokenToKVPoolAllocator:
    return PagedTokenToKVPoolAllocator(pages * page_size, page_size, torch.float16, cuda, None)


@pytest.mark.parametrize("wrapping", WRAPPINGS)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_same_as_the_twin(cuda: torch.device, kind: Kind, wrapping: str) -> None:
    check_against_twin(kind, wrapping, device=str(cuda), examples=4)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_d4_d5_no_verb_waits_for_the_device(cuda: torch.device, kind: Kind) -> None:
    """Lengths and freed slots on the host, in whatever make; last slots on the host, or where they came from."""
    pool: Any = kind.make(60, 60, False, str(cuda))
    size = kind.page_size
    for given in (list, torch.tensor):  # the second time with all memory in place
        pool.clear()
        with no_synchronisation():
            slots = taken(pool.alloc(2 * size))
            pool.free(given([size]))
            with pool.free_group():
                pool.free(given([2 * size]))
            if kind.grows_rows:
                prompts = taken(pool.alloc_extend(given([0, 0, 0]), given([5, 0, 9]), given([-1, -1, -1]), 14))
                answers = taken(pool.alloc_decode(given([6, 10]), prompts[4::9]))
                pool.alloc_extend(given([6, 10]), given([8, 40]), answers, 32)
            state = pool.backup_state()
            pool.alloc(3 * size)
            pool.restore_state(state)
        assert slots.tolist() == list(range(size, 3 * size))


class CanaryKernels:
    """Kernels whose new pages lie between ids of pages that do not exist, and whose output lies between marks."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self.launches = 0

    def extend(self, last_loc: Tensor, *, new_pages: Tensor, out: Tensor, **others: Any) -> None:
        with self._between_canaries(new_pages, out) as (pages, room):
            self._kernels.extend(last_loc, new_pages=pages, out=room, **others)

    def decode(self, last_loc: Tensor, new_pages: Tensor, out: Tensor, page_size: int) -> None:
        with self._between_canaries(new_pages, out) as (pages, room):
            self._kernels.decode(last_loc, pages, room, page_size)

    @contextmanager
    def _between_canaries(self, new_pages: Tensor, out: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        self.launches += 1
        pages, room = new_pages.new_full((len(new_pages) + 6,), 2**30), out.new_full((len(out) + 6,), -7)
        pages[3:-3] = new_pages
        yield pages[3:-3], room[3:-3]
        assert [*room[:3].tolist(), *room[-3:].tolist()] == [-7] * 6
        out.copy_(room[3:-3])


def test_case_b04_with_canaries(cuda: torch.device) -> None:
    """Short of pages nothing is launched; else nothing beyond the new pages is read, nor beyond the output written."""
    for kernels in (kernels_for(cuda), torch_kernels):
        pool, watched = paged(cuda, 4, 16), CanaryKernels(kernels)
        canaries: Any = watched
        pool._kernels = canaries
        full = taken(pool.alloc(48))
        assert pool.alloc_extend([0, 0], [17, 16], [-1, -1], 33) is None
        assert watched.launches == 0
        assert pool.available_size() == 16
        last = taken(pool.alloc_extend([0], [16], [-1], 16))
        assert last.tolist() == list(range(64, 80))
        assert pool.alloc_decode([17], last[-1:]) is None
        assert watched.launches == 1
        assert taken(pool.alloc_decode([15], last[13:14])).tolist() == [78]  # no page is needed, and none is there
        pool.free(full[:32])
        ragged = taken(pool.alloc_extend([16, 48, 3], [16, 49, 9], [79, 63, 66], 7))
        assert ragged.tolist() == [16, 67, 68, 69, 70, 71, 72]
        assert taken(pool.alloc_decode([2, 17], [16, 79])).tolist() == [17, 32]
        for empty in (pool.alloc_extend([], [], [], 0), pool.alloc_decode([], []), pool.alloc(0)):
            assert taken(empty).shape == (0,)
        pool.free([])
        assert watched.launches == 4


@pytest.mark.parametrize("cls", [PagedTokenToKVPoolAllocator, AscendPagedTokenToKVPoolAllocator])
@pytest.mark.parametrize(("pages", "tokens"), [(70_000, 1_048_577), (200_000, 3_000_000)])
def test_case_b06_one_prompt(
    cuda: torch.device, cls: type[PagedTokenToKVPoolAllocator], pages: int, tokens: int
) -> None:
    pool = cls(pages * 16, 16, torch.float16, cuda, None)
    before = pool.available_size()
    slots = taken(pool.alloc_extend([0], [tokens], [-1], tokens))
    assert torch.equal(slots, torch.arange(16, 16 + tokens, dtype=cls.index_dtype, device=cuda))
    assert before - pool.available_size() == -(-tokens // 16) * 16


def test_case_b06_no_size_compiles_anew(cuda: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """D8 and D9 too: 300 calls of all sizes after odd and even numbers of pages; none takes long."""
    import triton

    compiled: list[object] = []
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", lambda **what: compiled.append(what["repr"]))
    variants = warm_up(cuda, INDEX_DTYPES)
    pool = paged(cuda, 1_000_000, 16)
    rng = random.Random(0)
    slowest = 0.0
    for call in range(300):
        rows, length = rng.randint(1, 64), rng.choice((1, 2, 3, 5, 17, 300, 4096, 200_000))
        if call % 10 == 0:
            pool.clear()
        pool.alloc(rng.randint(0, 3) * 16)
        torch.cuda.synchronize()
        start = time.perf_counter()
        slots = pool.alloc_extend([0] * rows, [length] * rows, [-1] * rows, rows * length)
        torch.cuda.synchronize()
        slowest = max(slowest, time.perf_counter() - start)
        if slots is not None:
            pool.alloc_decode([length + 1] * rows, slots[length - 1 :: length])
    torch.cuda.synchronize()
    assert warm_up(cuda, INDEX_DTYPES) == variants
    assert compiled == []
    assert slowest < 0.05


FAR = 8_388_607  # with 256 slots a page, the next page begins at 2^31


def test_case_b07_slots_and_bytes_past_2_to_31(cuda: torch.device) -> None:
    """What is written to slots around 2^31 is read there, and nowhere else."""
    size = (FAR + 2) * 256
    storage = MHATokenToKVPool(size, 256, torch.uint8, 1, 1, 1, cuda)
    pool = PagedTokenToKVPoolAllocator(size, 256, torch.uint8, cuda, storage)
    pool.ledger.take(FAR - 1)
    slots = taken(pool.alloc_extend([0], [300], [-1], 300))
    assert slots.tolist() == list(range(2_147_483_392, 2_147_483_692))
    assert taken(pool.alloc_decode([301], slots[-1:])).tolist() == [2_147_483_692]
    key = torch.arange(300, device=cuda).remainder(250).add(1).to(torch.uint8).view(300, 1, 1)
    storage.set_kv_buffer(0, slots, key, key + 1)
    keys, values = storage.get_kv_buffer(0)
    assert torch.equal(keys[slots], key)
    assert torch.equal(values[slots], key + 1)
    assert int(keys.any(dim=2).sum()) == 300
    copy = pool.get_cpu_copy(slots)
    keys[slots] = 0
    pool.load_cpu_copy(copy, slots)
    assert torch.equal(keys[slots], key)
    pool.free(slots)
    assert pool.ledger.free_list().tolist() == [FAR, FAR + 1, FAR + 2]


def test_case_b07_a_token_pool_of_wide_rows(cuda: torch.device) -> None:
    """Slot 4,000,000 of rows of 576 bytes lies past 2^31 bytes."""
    storage = MHATokenToKVPool(4_000_000, 1, torch.uint8, 1, 576, 1, cuda)
    pool = TokenToKVPoolAllocator(4_000_000, torch.uint8, cuda, storage)
    pool.ledger.take(3_999_998)
    slots = taken(pool.alloc(2))
    assert slots.tolist() == [3_999_999, 4_000_000]
    key = torch.randint(1, 255, (2, 1, 576), dtype=torch.uint8, device=cuda)
    storage.set_kv_buffer(0, slots, key, key + 1)
    keys, values = storage.get_kv_buffer(0)
    assert torch.equal(keys[slots], key)
    assert torch.equal(values[slots], key + 1)
    assert int(keys.any(dim=2).sum()) == 2
