"""RequestTable against a naive twin, then what it refuses and what its check finds."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvloom.allocator import AllocatorError, BrokenInvariant, DoubleFree, InvalidArgument, RequestTable
from tests.allocator.books import ints

MAX_PAGES = 6


class TableMachine(RuleBasedStateMachine):
    """The twin: a dict of held rows with their page ids, sets of free rows, a list of waiting ones."""

    @initialize(max_rows=st.integers(1, 5))
    def make(self, max_rows: int) -> None:
        self.table = RequestTable(max_rows, MAX_PAGES)
        self.held: dict[int, list[int]] = {}
        self.lengths: dict[int, int] = {}
        self.free = set(range(max_rows))
        self.waiting: list[tuple[int, int]] = []
        self.settled = -1
        self.next_page = 1
        self.open()

    def some_held(self, data: st.DataObject) -> list[int]:
        return data.draw(st.lists(st.sampled_from(sorted(self.held)), unique=True)) if self.held else []

    @rule()
    def open(self) -> None:
        row = self.table.open()
        if row is None:
            assert not self.free
            return
        self.free.remove(row)  # a KeyError here: it was not free
        self.held[row] = []
        self.lengths[row] = 0

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def append(self, data: st.DataObject) -> None:
        rows = [row for row in self.some_held(data) if len(self.held[row]) < MAX_PAGES]
        each = data.draw(st.sampled_from([1, MAX_PAGES]))
        counts = [data.draw(st.integers(1, min(each, MAX_PAGES - len(self.held[row])))) for row in rows]
        pages = list(range(self.next_page, self.next_page + sum(counts)))
        self.table.append(ints(*rows), ints(*counts), ints(*pages))
        self.next_page += len(pages)
        for row, count in zip(rows, counts, strict=True):
            self.held[row] += pages[:count]
            pages = pages[count:]

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def note_lengths(self, data: st.DataObject) -> None:
        rows = self.some_held(data)
        lengths = [data.draw(st.integers(0, 99)) for _ in rows]
        self.table.lengths[rows] = lengths
        self.lengths |= zip(rows, lengths, strict=True)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        rows = self.some_held(data)
        fence = self.settled + data.draw(st.integers(-2, 2))
        self.table.close(ints(*rows), fence)
        for row in rows:
            del self.held[row], self.lengths[row]
            if fence <= self.settled:
                self.free.add(row)
            else:
                self.waiting.append((fence, row))

    @rule(ahead=st.integers(-1, 2))
    def settle(self, ahead: int) -> None:
        step = self.settled + ahead
        self.table.settle(step)
        self.settled = max(self.settled, step)
        self.free |= {row for fence, row in self.waiting if fence <= self.settled}
        self.waiting = [(fence, row) for fence, row in self.waiting if fence > self.settled]

    @precondition(lambda self: self.free or self.waiting)
    @rule(data=st.data())
    def misuse(self, data: st.DataObject) -> None:
        """A row that nobody holds, or one named twice, among rows in use."""
        rows = self.some_held(data)
        loose = [*self.free, *(row for _, row in self.waiting), *rows]
        given = data.draw(st.permutations([*rows, data.draw(st.sampled_from(loose))]))
        with unchanged(self.table, DoubleFree):
            self.table.close(ints(*given), -1)

    @invariant()
    def same(self) -> None:
        table = self.table
        table.check()
        assert table.held_rows == len(self.held)
        assert table.quarantined_rows == len(self.waiting)
        assert table.free_rows == len(self.free)
        for row in range(table.max_rows + 1):
            pages = self.held.get(row, [])
            assert table.page_counts[row] == len(pages)
            assert table.lengths[row] == self.lengths.get(row, 0)
            assert table.pages[row].tolist() == pages + [0] * (MAX_PAGES - len(pages))
        assert table.slack_tokens(16) == 16 * sum(map(len, self.held.values())) - sum(self.lengths.values())
        pages_of, owners = table.own_pages(ints(*self.held))
        assert list(zip(owners.tolist(), pages_of.tolist(), strict=True)) == [
            (row, page) for row, pages in self.held.items() for page in pages
        ]


TestTable = TableMachine.TestCase
TestTable.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


class unchanged:  # noqa: N801 - reads as a statement
    """The block must raise exactly `error` and leave the table as it was."""

    def __init__(self, table: RequestTable, error: type[AllocatorError]) -> None:
        self.table, self.error = table, error

    def books(self) -> list[object]:
        table = self.table
        arrays = (table.pages, table.page_counts, table.lengths)
        counts = [table.free_rows, table.held_rows, table.quarantined_rows, table.slack_tokens(1)]
        return counts + [array.tolist() for array in arrays]

    def __enter__(self) -> None:
        self.before = self.books()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        assert kind is self.error, f"{kind} instead of {self.error}"
        assert self.books() == self.before
        self.table.check()
        return True


def used() -> RequestTable:
    """Rows 0 and 1 held, with two pages and one; row 2 waits for step 5; row 3 is free."""
    table = RequestTable(4, 3)
    rows = [table.open() for _ in range(3)]
    assert rows == [0, 1, 2]
    table.append(ints(0, 1), ints(2, 1), ints(7, 8, 9))
    table.lengths[:2] = 30, 3
    table.close(ints(2), 5)
    table.check()
    return table


@pytest.mark.parametrize(
    ("rows", "error"),
    [
        ([3], DoubleFree),
        ([2], DoubleFree),
        ([0, 1, 0], DoubleFree),
        ([4], InvalidArgument),  # the pad row
        ([-1], InvalidArgument),
        ([0, 99], InvalidArgument),
    ],
)
def test_closing_what_is_not_open(rows: list[int], error: type[AllocatorError]) -> None:
    table = used()
    with unchanged(table, error):
        table.close(ints(*rows), 1)


@pytest.mark.parametrize(("max_rows", "max_pages"), [(0, 4), (4, 0), (-1, 4), (4, -2)])
def test_a_table_that_makes_no_sense(max_rows: int, max_pages: int) -> None:
    with pytest.raises(InvalidArgument):
        RequestTable(max_rows, max_pages)


def test_a_row_behind_a_fence_is_not_handed_out() -> None:
    table = RequestTable(1, 1)
    assert table.open() == 0
    table.close(ints(0), 4)
    table.settle(3)
    assert table.open() is None
    table.settle(4)
    assert table.open() == 0


def test_a_row_given_back_at_once_is_the_next_to_go() -> None:
    table = RequestTable(1, 1)
    for _ in range(3):
        assert table.open() == 0
        table.close(ints(0), -1)


def test_on_the_cpu_the_devices_table_is_the_hosts() -> None:
    table = used()
    assert table.device_pages.tolist() == table.pages.tolist()
    table.append(ints(1), ints(1), ints(5))
    assert table.device_pages[1].tolist() == [9, 5, 0]


def write(array: str, at: int | tuple[int, int], value: int) -> Callable[[RequestTable], None]:
    def damage(table: RequestTable) -> None:
        found: np.ndarray[tuple[int, ...], np.dtype[np.int32]] = getattr(
            table if hasattr(table, array) else table.slots, array
        )
        found[at] = value

    return damage


@pytest.mark.parametrize(
    "damage",
    [
        lambda table: table.slots._free.append(3),
        lambda table: table.slots._free.append(0),
        lambda table: table.slots._free.append(2),
        lambda table: table.slots._free.append(4),
        lambda table: table.slots._free.clear(),
        lambda table: table.slots._waiting.clear(),
        lambda table: table.slots._waiting.append((5, [1])),
        write("_held", 1, False),
        write("_held", 3, True),
        write("_held", 4, True),
        write("page_counts", 3, 1),
        write("page_counts", 2, 1),
        write("page_counts", 4, 1),
        write("pages", (4, 0), 7),
        write("lengths", 3, 5),
        write("lengths", 4, 5),
        write("page_counts", 0, 4),
        write("page_counts", 0, -1),
    ],
)
def test_check_finds_damaged_books(damage: Callable[[RequestTable], None]) -> None:
    table = used()
    damage(table)
    with pytest.raises(BrokenInvariant):
        table.check()


def test_frozen_rows_are_looked_at_again_when_rows_come_or_go() -> None:
    table = RequestTable(4, 3)
    assert [table.open() for _ in range(3)] == [0, 1, 2]
    rows = ints(0, 1, 2)
    rows.setflags(write=False)
    for _ in range(2):
        assert table.slots.index_of_held(rows).tolist() == [0, 1, 2]
    table.close(ints(1), -1)
    with pytest.raises(DoubleFree):
        table.slots.index_of_held(rows)
    assert table.open() == 1
    assert table.slots.index_of_held(rows).tolist() == [0, 1, 2]
    view = np.arange(3, dtype=np.int32)[:2]
    view.setflags(write=False)
    table.slots.index_of_held(view)
    assert view.base is not None
    view.base[0] = 3  # a view can change under our eyes
    with pytest.raises(DoubleFree):
        table.slots.index_of_held(view)
