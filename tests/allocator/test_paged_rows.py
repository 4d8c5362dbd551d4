"""PagedRows against plain lists, with real KV: after every verb each row finds its own tokens in its slots."""

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvloom.allocator import (
    AscendPagedTokenToKVPoolAllocator,
    DecodeStep,
    DoubleFree,
    ForeignPage,
    InvalidArgument,
    MHATokenToKVPool,
    PagedRows,
    PagedTokenToKVPoolAllocator,
    RequestTable,
    Shortfall,
    SWATokenToKVPoolAllocator,
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
        others = [table.own_pages(ints(row))[0].tolist() for row in self.said]
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
            users.update(table.own_pages(ints(row))[0].tolist())
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
    assert step.plan(ints(first)) == Shortfall("full", 1, 0, 0, 0, 4)
    assert (step.seq_lens.tolist(), rows.table.lengths[:2].tolist()) == (sent, [4, 3])
    assert step.plan(ints(second)) is None
    with pytest.raises(InvalidArgument, match="3 rows in a step of at most 2"):
        step.plan(ints(0, 1, 2))
    with pytest.raises(InvalidArgument, match="max_rows=0"):
        DecodeStep(rows.host, max_rows=0)


def test_only_what_knows_its_rows() -> None:
    """Rows have no window pages, and int64 slots: an allocator that promises other things is refused."""
    for allocator in (
        SWATokenToKVPoolAllocator(16, 8, torch.float32, "cpu", None, page_size=4),
        AscendPagedTokenToKVPoolAllocator(16, 4, torch.float32, "cpu", None),
    ):
        with pytest.raises(InvalidArgument, match="PagedTokenToKVPoolAllocator"):
            PagedRows(allocator, RequestTable(2, 4))


def test_arrays_of_any_make() -> None:
    """Strides, byte orders, 64 bits, lists, arrays that are not to be written; floats and such are refused."""
    rows = make(40, 4)
    mine = ints(*opened(rows, 2))
    frozen = mine.copy()
    frozen.setflags(write=False)
    lengths = 0
    for given in (mine[::-1], mine.astype(">i4"), mine.astype(np.int64), mine.tolist(), frozen):
        lengths += 2
        slots = rows.extend_rows(given, np.full(4, lengths, np.int32)[::2])
        assert not isinstance(slots, Shortfall)
        assert len(slots) == 4
        assert len(rows.decode_rows(given, [1, 0])) == 1
        lengths = int(rows.table.lengths[mine].max())
        rows.extend_rows(mine, np.full(2, lengths, np.int32))
    before = (rows.table.lengths.tolist(), rows.allocator.ledger.free_pages, rows.table.free_rows)
    for misuse in (
        lambda: rows.decode_rows(np.array([0.7])),
        lambda: rows.decode_rows(np.array([True])),
        lambda: rows.decode_rows(np.array([[0]], np.int32)),
        lambda: rows.decode_rows(mine, ints(2)),
        lambda: rows.extend_rows(mine, ints(2**31 - 1, 2**31 - 1)),
        lambda: rows.open_rows(1.5),  # type: ignore[arg-type]
        lambda: rows.fork_row(0, True),
        lambda: rows.release_rows(mine, [None, None]),  # type: ignore[list-item]
        lambda: rows.release_rows(mine, [0.5, 1]),  # type: ignore[list-item]
        lambda: rows.truncate_rows(mine, ints(0, 0), ["x", "x"]),  # type: ignore[list-item]
    ):
        with pytest.raises(InvalidArgument):
            misuse()
        rows.check()
    assert before == (rows.table.lengths.tolist(), rows.allocator.ledger.free_pages, rows.table.free_rows)


def test_a_launch_that_fails_leaves_rows_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = make(20, 4)
    mine = ints(*opened(rows, 2))
    rows.extend_rows(mine, ints(4, 6))
    step = DecodeStep(rows.host, 2)
    before = (rows.table.lengths.tolist(), rows.allocator.ledger.free_pages, rows.table.free_rows)

    def lost(*_: object, **__: object) -> None:
        raise RuntimeError("no memory")

    storage = rows.allocator.get_kvcache()
    assert storage is not None
    monkeypatch.setattr(rows._binding, "extend", lost)
    monkeypatch.setattr(rows._binding, "decode", lost)
    monkeypatch.setattr(step, "launch", lost)
    monkeypatch.setattr(storage, "copy_slots", lost)
    for failing in (
        lambda: rows.extend_rows(mine, ints(9, 9)),
        lambda: rows.decode_rows(mine),
        lambda: step.run(mine),
        lambda: rows.fork_row(int(mine[1]), 2),
    ):
        with pytest.raises(RuntimeError, match="no memory"):
            failing()
        rows.check()
        assert before == (rows.table.lengths.tolist(), rows.allocator.ledger.free_pages, rows.table.free_rows)


def test_states_and_rows_do_not_mix() -> None:
    """A restored pool would hand out the pages of rows that do not hear of it."""
    rows = make(20, 4)
    state = rows.allocator.backup_state()
    mine = ints(*opened(rows, 1))
    rows.extend_rows(mine, ints(4))
    with pytest.raises(ForeignPage, match="1 pages belong to rows"):
        rows.allocator.restore_state(state)
    with pytest.raises(ForeignPage, match="1 pages belong to rows"):
        rows.allocator.clear()
    rows.check()


def test_remembered_rows_are_compared() -> None:
    """By what they are, not by which array they are in: somebody may have kept a way to write it."""
    rows = make(40, 4)
    mine = ints(*opened(rows, 3))
    rows.extend_rows(mine, ints(1, 5, 9))
    named = ints(0, 1)
    view = named[:]
    named.setflags(write=False)
    rows.decode_rows(named)
    view[0] = 2
    rows.decode_rows(named)
    assert rows.table.lengths[:3].tolist() == [2, 7, 10]
    view[0] = 1
    with pytest.raises(DoubleFree):
        rows.decode_rows(named)


def test_a_storage_must_have_room_for_the_pool() -> None:
    for size, page_size in ((8, 4), (64, 1)):
        storage = MHATokenToKVPool(size, page_size, torch.float32, 1, 1, 1, "cpu")
        with pytest.raises(InvalidArgument, match=f"{size} tokens on pages of {page_size} for 64 on pages of 4"):
            PagedTokenToKVPoolAllocator(64, 4, torch.float32, "cpu", storage)
    storage = MHATokenToKVPool(8, 4, torch.float32, 1, 1, 1, "cpu")
    copy = storage.get_cpu_copy(torch.tensor([4]))
    with pytest.raises(InvalidArgument, match="slots run from 0 to 11"):
        storage.load_cpu_copy(copy, torch.tensor([-1]))
