"""SWATokenToKVPoolAllocator: its own verbs, refusals and sizes; random calls on it are in `conformance`."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from kvloom.allocator import (
    AllocatorError,
    BrokenInvariant,
    DoubleFree,
    ForeignPage,
    InvalidArgument,
    StaleState,
    SWATokenToKVPoolAllocator,
)
from tests.allocator.swa_books import balanced, make, refused, swa_books, taken


@pytest.mark.parametrize(
    ("misuse", "error"),
    [
        (lambda a: a.alloc(-4), InvalidArgument),
        (lambda a: a.alloc(6), InvalidArgument),
        (lambda a: a.alloc_extend([6], [9], [13], 2), InvalidArgument),
        (lambda a: a.alloc_extend([6], [9], [12], 3), InvalidArgument),
        (lambda a: a.alloc_extend([2], [9], [5], 7), ForeignPage),  # the window page of its last page is gone
        (lambda a: a.alloc_decode([3], [5]), ForeignPage),  # likewise
        (lambda a: a.alloc_decode([7], [17]), ForeignPage),  # in a page that waits in the group
        *((lambda a, verb=verb: getattr(a, verb)([8, 3]), ForeignPage) for verb in ("free", "free_swa")),
        *((lambda a, verb=verb: getattr(a, verb)([8, 36]), ForeignPage) for verb in ("free", "free_swa")),
        *((lambda a, verb=verb: getattr(a, verb)([8, -1]), ForeignPage) for verb in ("free", "free_swa")),
        *((lambda a, verb=verb: getattr(a, verb)([8, 35]), DoubleFree) for verb in ("free", "free_swa")),
        *((lambda a, verb=verb: getattr(a, verb)([8, 18]), DoubleFree) for verb in ("free", "free_swa")),
        *((lambda a, verb=verb: getattr(a, verb)([8.0]), InvalidArgument) for verb in ("free", "free_swa")),
    ],
)
@pytest.mark.parametrize("need_sort", [False, True])
def test_misuse_changes_nothing(
    misuse: Callable[[SWATokenToKVPoolAllocator], object], error: type[AllocatorError], need_sort: bool
) -> None:
    """A row of 6 tokens in slots 8 to 13; page 1 beside it without its window page; page 4 in an open group."""
    allocator = make(8, 8, 4, need_sort)
    assert taken(allocator.alloc(4)) == [4, 5, 6, 7]
    assert taken(allocator.alloc_extend([0], [6], [-1], 6)) == [8, 9, 10, 11, 12, 13]
    allocator.alloc(4)
    allocator.free_swa([4])
    allocator.free_group_begin()
    allocator.free([16])
    with refused(allocator, error):
        misuse(allocator)
    allocator.free_group_end()
    allocator.free([4, 8, 12])
    balanced(allocator)


def test_a_row_at_a_page_boundary_goes_on_without_its_window() -> None:
    allocator = make()
    row = taken(allocator.alloc(8))
    allocator.free_swa(row)
    assert taken(allocator.alloc_decode([9], [row[-1]])) == [12]
    assert allocator.translate_loc_from_full_to_swa(torch.tensor([11, 12])).tolist() == [0, 4]


def test_last_slots_on_a_device_are_trusted() -> None:
    """The meta device stands in: what lies there cannot be read."""
    allocator = make()
    prefix, last_loc = np.array([6]), torch.empty(1, dtype=torch.int64, device="meta")
    assert allocator._require_last_loc(last_loc, prefix) is None


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_window_slots_are_int32_of_the_shape_asked_for(index_dtype: torch.dtype) -> None:
    allocator = make(page_size=1)
    slots = torch.tensor(taken(allocator.alloc(4)), dtype=index_dtype).view(2, 2)
    window = allocator.translate_loc_from_full_to_swa(slots)
    assert (window.dtype, window.tolist()) == (torch.int32, [[1, 2], [3, 4]])


def test_sizes_and_reports() -> None:
    allocator = SWATokenToKVPoolAllocator(27, 13, torch.float16, "cpu", None, page_size=4)
    assert (allocator.size, allocator.size_full, allocator.size_swa, allocator.page_size) == (27, 27, 13, 4)
    assert (allocator.full_available_size(), allocator.swa_available_size(), allocator.available_size()) == (24, 12, 12)
    slots = taken(allocator.alloc(12))
    allocator.free_swa(slots[:4])
    full, swa = allocator.statistics(), allocator.swa_statistics()
    assert (full.pool, full.capacity, full.held, full.free) == ("full", 6, 3, 3)
    assert (swa.pool, swa.capacity, swa.held, swa.free, swa.freed) == ("swa", 3, 2, 1, {"finish": 1})
    line = allocator.debug_print()
    assert "\n" not in line
    for part in ("size=27", "size_swa=13", " available=4", "full_available=12", "swa_available=4", "swa_held=8"):
        assert part in line


@pytest.mark.parametrize(
    ("size", "size_swa", "page_size"),
    [(0, 8, 1), (3, 8, 4), (8, 3, 4), (8, 0, 1), (8, -4, 4), (8, 8, 0), (8, 2**31, 1), (8, 2**31 - 3, 4)],
)
def test_sizes_that_make_no_sense(size: int, size_swa: int, page_size: int) -> None:
    with pytest.raises(InvalidArgument, match=f"{size_swa}|{size}|{page_size}"):
        SWATokenToKVPoolAllocator(size, size_swa, torch.float16, "cpu", None, page_size=page_size)


def test_an_upload_or_launch_that_fails_takes_no_pages_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_memory(*_: object, **__: object) -> torch.Tensor:
        raise MemoryError

    verbs: list[tuple[str, Callable[[], object]]] = [
        ("where", lambda: allocator.alloc(8)),  # while the mapping is written
        ("from_numpy", lambda: allocator.alloc(8)),
        ("empty", lambda: allocator.alloc_extend([0, 4], [6, 5], [-1, 7], 7)),  # after that
        ("empty", lambda: allocator.alloc_decode([5], [7])),
    ]
    allocator = make(4, 4)
    allocator.alloc(4)
    for function, verb in verbs:
        with monkeypatch.context() as patch:
            patch.setattr(torch, function, out_of_memory)
            with pytest.raises(MemoryError):
                verb()
        allocator.check()
        for ledger in (allocator.ledger, allocator.swa_ledger):
            assert ledger.free_list().tolist() == [2, 3, 4]
    assert taken(allocator.alloc(12)) == list(range(8, 20))
    assert allocator.full_to_swa_index_mapping[8:].tolist() == list(range(8, 20))
    allocator.free(range(4, 20))
    balanced(allocator)


@pytest.mark.parametrize("in_group", [False, True])
def test_b11_a_snapshot_is_of_both_pools_and_the_mapping(in_group: bool) -> None:
    allocator = make()
    row = taken(allocator.alloc_extend([0], [14], [-1], 14))
    allocator.free_swa(row[:4])
    if in_group:
        allocator.free_group_begin()
        allocator.free_swa(row[4:8])
    mapping, before = allocator.full_to_swa_index_mapping, swa_books(allocator)
    state = allocator.backup_state()
    more = taken(allocator.alloc_extend([14, 0], [19, 6], [row[-1], -1], 11))
    allocator.free_swa(more[5:])  # taken and given back since: of no concern
    assert swa_books(allocator) != before
    allocator.restore_state(state)
    allocator.check()
    assert swa_books(allocator) == before
    assert allocator.full_to_swa_index_mapping is mapping
    allocator.free(row)
    allocator.free_group_end()
    balanced(allocator)


def test_b11_a_window_page_given_back_since_is_not_lost() -> None:
    """The state that held it can no longer be restored, in either pool."""
    allocator = make()
    row = taken(allocator.alloc(8))
    state = allocator.backup_state()
    allocator.free_swa(row[:4])
    allocator.alloc(4)
    with refused(allocator, StaleState):
        allocator.restore_state(state)


@pytest.mark.parametrize(
    "damage",
    [
        lambda a: a._peer.__setitem__(1, 0),  # a window page that backs nobody
        lambda a: a._peer.__setitem__(1, a._peer[2]),  # one that backs two
        lambda a: a._peer.__setitem__(1, 4),  # one that is free
        lambda a: a._peer.__setitem__(4, 3),  # behind a page that is free
        lambda a: a.swa_ledger.release(np.array([1], np.int32)),
        lambda a: a.ledger.release(np.array([1], np.int32)),
    ],
)
def test_the_check_finds_pools_that_do_not_pair_up(damage: Callable[[SWATokenToKVPoolAllocator], None]) -> None:
    allocator = make(4, 4)
    allocator.alloc(12)
    allocator.free_swa([12])
    allocator.check()
    damage(allocator)
    with pytest.raises(BrokenInvariant):
        allocator.check()
