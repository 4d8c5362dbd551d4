"""PagedRows against plain lists, with real KV: after every verb each row finds its own tokens in its slots."""

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvloom.allocator import (
    DecodeStep,
    DoubleFree,
    InvalidArgument,
    MHATokenToKVPool,
    PagedRows,
    PagedTokenToKVPoolAllocator,
    RequestTable,
    Shortfall,
)
from tests.allocator.books import ints

MAX_ROWS, MAX_PAGES = 5, 6


def make(pages: int, page_size: int, max_pages: int = MAX_PAGES) -> PagedRows:
    size = pages * page_size
    storage = MHATokenToKVPool(size, page_size, torch.float32, 1, 1, 1, "cpu")
    allocator = PagedTokenToKVPoolAllocator(size, page_size, torch.float32, "cpu", storage)
    return PagedRows(allocator, RequestTable(MAX_ROWS, max_pages))


class PagedRowsMachine(RuleBasedStateMachine):
    """The twin is a list of numbers per row, written to the storage as they come."""

    @initialize(pages=st.integers(1, 14), page_size=st.sampled_from([1, 2, 3, 4]))
    def make(self, pages: int, page_size: int) -> None:
        self.page_size = page_size
        self.rows = make(pages, page_size)
        self.said: dict[int, list[float]] = {}
        self.newest = 0.0
        self.settled = -1

    def some(self, data: st.DataObject) -> list[int]:
        return data.draw(st.lists(st.sampled_from(sorted(self.said)), unique=True, min_size=1))

    def write(self, slots: torch.Tensor | Shortfall, rows: list[int], counts: list[int]) -> None:
        if isinstance(slots, Shortfall):
            assert slots.need > slots.free == self.rows.allocator.ledger.free_pages
            return
        values = [self.newest + i for i in range(sum(counts))]
        self.newest += len(values)
        tensor = torch.tensor(values).view(-1, 1, 1)
        storage = self.rows.allocator.get_kvcache()
        assert storage is not None
        storage.set_kv_buffer(0, slots, tensor, -tensor)
        for row, count in zip(rows, counts, strict=True):
            self.said[row] += values[:count]
            values = values[count:]

    @rule(count=st.integers(0, 2))
    def open(self, count: int) -> None:
        rows = self.rows.open_rows(count)
        if not isinstance(rows, Shortfall):
            self.said |= {row: [] for row in rows.tolist()}

    @precondition(lambda self: self.said)
    @rule(data=st.data())
    def extend(self, data: st.DataObject) -> None:
        rows = self.some(data)
        room = [MAX_PAGES * self.page_size - len(self.said[row]) for row in rows]
        counts = [data.draw(st.integers(0, most)) for most in room]
        lengths = [len(self.said[row]) + count for row, count in zip(rows, counts, strict=True)]
        self.write(self.rows.extend_rows(ints(*rows), ints(*lengths)), rows, counts)

    @precondition(lambda self: self.said)
    @rule(data=st.data(), several=st.booleans())
    def decode(self, data: st.DataObject, several: bool) -> None:
        rows = [row for row in self.some(data) if len(self.said[row]) + 3 <= MAX_PAGES * self.page_size]
        counts = [data.draw(st.integers(0, 3)) if several else 1 for _ in rows]
        slots = self.rows.decode_rows(ints(*rows), ints(*counts) if several else None)
        self.write(slots, rows, counts)

    @precondition(lambda self: self.said)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        rows = self.some(data)
        lengths = [data.draw(st.integers(0, len(self.said[row]))) for row in rows]
        fences = [self.settled + data.draw(st.integers(0, 2)) for _ in rows]
        table, size = self.rows.table, self.page_size
        ends = [table.pages[row, n // size] for row, n in zip(rows, lengths, strict=True) if n % size]
        others = [table.pages_of(ints(row))[0].tolist() for row in self.said]
        if any(sum(page in pages for pages in others) > 1 for page in ends):
            with pytest.raises(InvalidArgument, match="share"):
                self.rows.truncate_rows(ints(*rows), ints(*lengths), fences)
            return
        self.rows.truncate_rows(ints(*rows), ints(*lengths), fences)
        for row, length in zip(rows, lengths, strict=True):
            del self.said[row][length:]

    @precondition(lambda self: self.said)
    @rule(data=st.data(), count=st.integers(1, 3))
    def fork(self, data: st.DataObject, count: int) -> None:
        row = data.draw(st.sampled_from(sorted(self.said)))
        forks = self.rows.fork_row(row, count)
        if not isinstance(forks, Shortfall):
            self.said |= {new: list(self.said[row]) for new in forks.tolist()}

    @precondition(lambda self: self.said)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        rows = self.some(data)
        self.rows.release_rows(ints(*rows), [self.settled + data.draw(st.integers(-1, 2)) for _ in rows])
        for row in rows:
            del self.said[row]

    @rule(ahead=st.integers(0, 2))
    def settle(self, ahead: int) -> None:
        self.settled += ahead
        self.rows.settle(self.settled)

    @invariant()
    def each_finds_its_own(self) -> None:
        self.rows.check()
        table, size = self.rows.table, self.page_size
        storage = self.rows.allocator.get_kvcache()
        assert storage is not None
        keys = storage.get_key_buffer(0).flatten()
        users: Counter[int] = Counter()
        for row, said in self.said.items():
            position = np.arange(len(said))
            slots = table.pages[row, position // size].astype(np.int64) * size + position % size
            assert keys[torch.from_numpy(slots)].tolist() == said
            users.update(table.pages_of(ints(row))[0].tolist())
        assert self.rows.allocator.statistics().held == len(users)

    def teardown(self) -> None:
        if self.said:
            self.rows.release_rows(ints(*self.said), [self.settled] * len(self.said))
        self.rows.settle(10**6)
        self.rows.check()
        statistics = self.rows.allocator.statistics()
        assert statistics.free == statistics.capacity


TestPagedRows = PagedRowsMachine.TestCase
TestPagedRows.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)


def test_a_page_that_several_use_waits_for_the_last_fence() -> None:
    rows = make(8, 4)
    (row,) = opened(rows, 1)
    assert not isinstance(rows.extend_rows(ints(row), ints(8)), Shortfall)
    forks = rows.fork_row(row, 2)
    assert not isinstance(forks, Shortfall)
    assert rows.allocator.statistics().held == 2
    rows.release_rows(ints(row), [9])  # in flight for longer than the others
    rows.release_rows(forks[:1], [-1])
    assert rows.allocator.statistics().held == 2
    rows.release_rows(forks[1:], [3])
    rows.settle(8)
    assert (rows.allocator.statistics().free, rows.allocator.statistics().quarantined) == (6, 2)
    rows.settle(9)
    assert rows.allocator.statistics().free == 8
    rows.check()


def opened(rows: PagedRows, count: int) -> list[int]:
    new = rows.open_rows(count)
    assert not isinstance(new, Shortfall)
    return [int(row) for row in new]


def test_misuse_changes_nothing() -> None:
    rows = make(8, 4)
    first, second = opened(rows, 2)
    rows.extend_rows(ints(first, second), ints(6, 4))
    before = (rows.table.pages.tolist(), rows.table.lengths.tolist(), rows.allocator.ledger.free_list().tolist())
    for misuse, error in (
        (lambda: rows.open_rows(-1), InvalidArgument),
        (lambda: rows.extend_rows(ints(first), ints(5)), InvalidArgument),  # shrinks
        (lambda: rows.extend_rows(ints(first), ints(7, 8)), InvalidArgument),
        (lambda: rows.extend_rows(ints(first), ints(25)), InvalidArgument),
        (lambda: rows.extend_rows(ints(first, first), ints(7, 7)), DoubleFree),
        (lambda: rows.decode_rows(ints(4)), DoubleFree),
        (lambda: rows.decode_rows(ints(-1)), InvalidArgument),
        (lambda: rows.decode_rows(ints(99)), InvalidArgument),
        (lambda: rows.decode_rows(ints(first), ints(-1)), InvalidArgument),
        (lambda: rows.truncate_rows(ints(first), ints(7), [0]), InvalidArgument),
        (lambda: rows.truncate_rows(ints(first), ints(-1), [0]), InvalidArgument),
        (lambda: rows.truncate_rows(ints(first), ints(1), []), InvalidArgument),
        (lambda: rows.truncate_rows(ints(3), ints(0), [0]), DoubleFree),
        (lambda: rows.fork_row(3, 1), DoubleFree),
        (lambda: rows.fork_row(first, 0), InvalidArgument),
    ):
        with pytest.raises(error):
            misuse()
    after = (rows.table.pages.tolist(), rows.table.lengths.tolist(), rows.allocator.ledger.free_list().tolist())
    assert after == before


def test_a_decode_step_in_fixed_buffers_is_the_same_step() -> None:
    """Rows come and go; behind them stands padding, which writes into the dump."""
    draw = np.random.default_rng(3)
    plain, fixed = make(40, 4, 20), make(40, 4, 20)
    step = DecodeStep(fixed.host, max_rows=4)
    buffers = (step.row_slot, step.seq_lens, step.new_pages, step.out_loc)
    addresses = [buffer.data_ptr() for buffer in buffers]
    for rows in (plain, fixed):
        rows.extend_rows(ints(*opened(rows, 4)), ints(1, 4, 7, 8))
    for _ in range(12):
        some = draw.permutation(4)[: draw.integers(1, 5)].astype(np.int32)
        slots = plain.decode_rows(some)
        assert not isinstance(slots, Shortfall)
        assert step.plan(some) is None
        step.launch()
        assert step.out_loc.tolist() == slots.tolist() + [0] * (4 - len(some))
        assert step.row_slot[len(some) :].tolist() == [MAX_ROWS] * (4 - len(some))
        assert fixed.table.pages.tolist() == plain.table.pages.tolist()
        fixed.check()
    assert [buffer.data_ptr() for buffer in buffers] == addresses


def test_a_decode_step_that_is_short_changes_nothing() -> None:
    rows = make(2, 4)
    step = DecodeStep(rows.host, max_rows=2)
    first, second = opened(rows, 2)
    rows.extend_rows(ints(first, second), ints(4, 3))
    sent = step.seq_lens.tolist()
    assert step.plan(ints(first)) == Shortfall("full", 1, 0, 0, 0)
    assert (step.seq_lens.tolist(), rows.table.lengths[:2].tolist()) == (sent, [4, 3])
    assert step.plan(ints(second)) is None
    with pytest.raises(InvalidArgument, match="3 rows in a step of at most 2"):
        step.plan(ints(0, 1, 2))
    with pytest.raises(InvalidArgument, match="max_rows=0"):
        DecodeStep(rows.host, max_rows=0)
