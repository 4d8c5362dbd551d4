"""RowAllocator, ledger and table together, against a naive twin; then shortage and misuse."""

from collections.abc import Callable

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvloom.allocator import AllocatorError, DoubleFree, InvalidArgument, PageLedger, RequestTable, Shortfall
from kvloom.allocator.rows import RowAllocator
from tests.allocator.books import books, ints

MAX_ROWS, MAX_PAGES = 5, 6


def make(pages: int, page_size: int) -> RowAllocator:
    return RowAllocator(PageLedger(pages, page_size=page_size), RequestTable(MAX_ROWS, MAX_PAGES))


def all_books(rows: RowAllocator) -> tuple[object, ...]:
    table = rows.table
    counts = (table.free_rows, table.held_rows, table.quarantined_rows)
    arrays = (table.pages, table.page_counts, table.lengths)
    return (*books(rows.ledger), counts, *(array.tolist() for array in arrays))


class RowsMachine(RuleBasedStateMachine):
    """The twin hands out pages one by one from a list, and puts those of a released row back in front of it."""

    @initialize(pages=st.integers(1, 14), page_size=st.sampled_from([1, 2, 3, 16]))
    def make(self, pages: int, page_size: int) -> None:
        self.page_size = page_size
        self.rows = make(pages, page_size)
        self.free = list(range(1, pages + 1))
        self.held: dict[int, list[int]] = {}
        self.lengths: dict[int, int] = {}
        self.waiting: list[tuple[int, int, list[int]]] = []  # (fence, row, pages)
        self.settled = -1
        self.open()
        self.open()

    def some_held(self, data: st.DataObject) -> list[int]:
        return data.draw(st.lists(st.sampled_from(sorted(self.held)), unique=True, min_size=1))

    @rule()
    def open(self) -> None:
        row = self.rows.table.open()
        assert (row is None) == (len(self.held) + len(self.waiting) == MAX_ROWS)
        if row is not None:
            self.held[row] = []
            self.lengths[row] = 0

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def reserve(self, data: st.DataObject) -> None:
        rows = self.some_held(data)
        lengths = [data.draw(st.integers(0, MAX_PAGES * self.page_size)) for _ in rows]
        needs = [
            max(0, len(range(0, length, self.page_size)) - len(self.held[row]))
            for row, length in zip(rows, lengths, strict=True)
        ]
        result = self.rows.reserve(ints(*rows), ints(*lengths))
        if sum(needs) > len(self.free):
            fits = next(n for n in range(len(rows), -1, -1) if sum(needs[:n]) <= len(self.free))
            upto = (len(self.held[rows[fits]]) + len(self.free) - sum(needs[:fits])) * self.page_size
            assert result == Shortfall("full", sum(needs), len(self.free), 0, fits, upto)
            return
        assert result is None
        self.lengths |= {row: max(self.lengths[row], length) for row, length in zip(rows, lengths, strict=True)}
        for row, need in zip(rows, needs, strict=True):
            self.held[row] += self.free[:need]
            self.free = self.free[need:]

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        rows = self.some_held(data)
        fences = [self.settled + data.draw(st.integers(-1, 2)) for _ in rows]
        self.rows.release(ints(*rows), fences, "abort")
        for fence in sorted(set(fences)):
            ending = [(row, self.held.pop(row)) for row, due in zip(rows, fences, strict=True) if due == fence]
            if fence <= self.settled:
                self.free = [page for _, pages in ending for page in pages] + self.free
            else:
                self.waiting += [(fence, row, pages) for row, pages in ending]

    @rule(ahead=st.integers(0, 2))
    def settle(self, ahead: int) -> None:
        self.settled += ahead
        self.rows.ledger.settle(self.settled)
        self.rows.table.settle(self.settled)
        self.waiting = [entry for entry in self.waiting if entry[0] > self.settled]

    @invariant()
    def same(self) -> None:
        ledger, table = self.rows.ledger, self.rows.table
        ledger.check()
        table.check()
        free = ledger.free_list().tolist()
        # Pages that a settled step has set free came in front; the order of the others has not moved.
        assert free[len(free) - len(self.free) :] == self.free
        self.free = free
        waiting = [page for _, _, pages in self.waiting for page in pages]
        held = [page for pages in self.held.values() for page in pages]
        assert sorted(free + waiting + held) == list(range(1, ledger.pages + 1))
        assert ledger.statistics().quarantined == len(waiting)
        assert ledger.held_pages == len(held)
        assert table.free_rows == MAX_ROWS - len(self.held) - len(self.waiting)
        for row, pages in self.held.items():
            assert table.own_pages(ints(row))[0].tolist() == pages
            assert ledger.holders_of(ints(*pages)).tolist() == [row] * len(pages)
            assert table.lengths[row] == self.lengths[row]


TestRows = RowsMachine.TestCase
TestRows.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def used() -> RowAllocator:
    """Pages of 4; row 0 holds 6 tokens, row 1 holds 4, row 2 waits for step 5, rows 3 and 4 are free; 3 pages left."""
    rows = make(8, 4)
    for _ in range(3):
        rows.table.open()
    assert rows.reserve(ints(0, 1, 2), ints(6, 4, 8)) is None
    rows.release(ints(2), [5], "finish")
    return rows


@pytest.mark.parametrize(
    ("misuse", "error"),
    [
        (lambda rows: rows.reserve(ints(0, 3), ints(7, 4)), DoubleFree),  # not opened
        (lambda rows: rows.reserve(ints(2), ints(4)), DoubleFree),  # given back
        (lambda rows: rows.reserve(ints(1, 1), ints(8, 8)), DoubleFree),
        (lambda rows: rows.reserve(ints(MAX_ROWS), ints(4)), InvalidArgument),  # the pad row
        (lambda rows: rows.reserve(ints(-1), ints(4)), InvalidArgument),
        (lambda rows: rows.reserve(ints(1, 0), ints(8, 25)), InvalidArgument),  # wider than the table
        (lambda rows: rows.release(ints(0, 0), [1, 1], "finish"), DoubleFree),
        (lambda rows: rows.release(ints(0, 2), [1, 1], "finish"), DoubleFree),
        (lambda rows: rows.release(ints(0, 4), [1, 1], "finish"), DoubleFree),
        (lambda rows: rows.release(ints(0, MAX_ROWS), [1, 1], "finish"), InvalidArgument),
        (lambda rows: rows.release(ints(0, -1), [1, 1], "finish"), InvalidArgument),
        (lambda rows: rows.release(ints(0, 1), [1], "finish"), InvalidArgument),
        (lambda rows: rows.release(ints(0, 1), [], "finish"), InvalidArgument),
        (lambda rows: rows.release(ints(0), [1, 2], "finish"), InvalidArgument),
    ],
)
def test_misuse_changes_nothing(misuse: Callable[[RowAllocator], object], error: type[AllocatorError]) -> None:
    rows = used()
    before = all_books(rows)
    with pytest.raises(error) as caught:
        misuse(rows)
    assert type(caught.value) is error
    assert all_books(rows) == before
    rows.table.check()
    rows.ledger.check()


def test_a_shortage_says_how_much_and_for_how_many_and_changes_nothing() -> None:
    rows = used()
    before = all_books(rows)
    assert rows.reserve(ints(1, 0), ints(16, 12), "prefill") == Shortfall("full", 4, 3, 0, 1, 8)
    assert rows.reserve(ints(0, 1), ints(24, 8)) == Shortfall("full", 5, 3, 0, 0, 20)
    after = all_books(rows)
    assert after[1:] == before[1:]
    assert rows.ledger.statistics().failures == 2
    assert rows.reserve(ints(1, 0), ints(12, 12)) is None
    assert rows.ledger.free_pages == 0


def test_a_row_that_needs_less_stays_as_it_is() -> None:
    rows = used()
    assert rows.reserve(ints(0), ints(2)) is None
    assert (rows.table.page_counts[0], rows.table.lengths[0]) == (2, 6)


def test_reasons_are_counted_in_pages() -> None:
    rows = used()
    rows.release(ints(0, 1), [-1, 3], "preempt")
    assert rows.ledger.statistics().freed == {"finish": 2, "preempt": 3}
    assert rows.ledger.free_pages == 5


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (4, 1), (5, 2), (4001, 1001)])
def test_pages_for(tokens: int, pages: int) -> None:
    assert make(1, 4).pages_for(tokens) == pages
