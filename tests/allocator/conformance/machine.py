"""Random legal calls, and some illegal ones, on an allocator and on its twin: same slots in the same order."""

import json
from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import pytest
import torch
from hypothesis import settings, strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvloom.allocator import (
    AllocatorError,
    AllocatorState,
    BaseTokenToKVPoolAllocator,
    DoubleFree,
    ForeignPage,
    GroupMisuse,
    RecordingAllocator,
    StaleState,
    replay,
)
from kvloom.allocator.kernels import Kernels
from tests.allocator.books import CONTAINERS, Container, books
from tests.allocator.conformance.kinds import WRAPPINGS, Kind
from tests.allocator.twins import Row, TwinAllocator

containers = st.sampled_from(CONTAINERS)
PAGES_MAX = 12


def plain(answer: Any) -> Any:
    """An answer that can be compared with that of another allocator."""
    if isinstance(answer, torch.Tensor):
        return answer.tolist()
    return type(answer) if isinstance(answer, AllocatorError) else None


class AllocatorMachine(RuleBasedStateMachine):
    """One kind of allocator in one wrapping; what wrapping and kernels do must not be seen in any answer."""

    def __init__(self, kind: Kind, wrapping: str, need_sort: bool, kernels: Kernels | None, device: str) -> None:
        super().__init__()
        self.kind, self.wrapping, self.need_sort, self.kernels, self.device = kind, wrapping, need_sort, kernels, device

    @initialize(pages=st.integers(1, PAGES_MAX), window_pages=st.integers(1, PAGES_MAX))
    def make(self, pages: int, window_pages: int) -> None:
        self.sizes = pages, window_pages, self.need_sort
        self.inner = self.fresh()
        self.ours: Any = WRAPPINGS[self.wrapping](self.inner)
        self.twin: TwinAllocator = self.kind.twin(*self.sizes)
        self.rows: list[Row] = []
        self.states: list[tuple[AllocatorState, Any, list[Row]]] = []
        self.answers: list[Any] = []

    def fresh(self) -> BaseTokenToKVPoolAllocator:
        allocator = self.kind.make(*self.sizes, self.device)
        if self.kernels is not None:
            allocator._kernels = self.kernels
        return allocator

    def call(self, verb: str, *arguments: Any) -> Any:
        """What the verb answers; remembered as a log would be replayed."""
        try:
            answer = getattr(self.ours, verb)(*arguments)
        except AllocatorError as error:
            self.answers.append(plain(error))
            raise
        self.answers.append(plain(answer))
        return answer

    def given(self, container: Container, numbers: list[int]) -> Any:
        """As a caller may have them: int32 tensors are on the device."""
        made = container(numbers)
        return made.to(self.device) if isinstance(made, torch.Tensor) and made.dtype == torch.int32 else made

    def refused(self, error: type[AllocatorError], verb: str, *arguments: Any) -> None:
        """It must raise exactly that; that nothing has changed, the next comparison sees."""
        with pytest.raises(error) as caught:
            self.call(verb, *arguments)
        assert type(caught.value) is error

    def cut_off(self, row: Row) -> bool:
        """Its last page has room, but no window page any more."""
        inside = self.kind.has_window and len(row) % self.kind.page_size > 0
        return inside and self.twin.window_slot(row[-1]) == 0

    def some_rows(self, data: st.DataObject) -> list[Row]:
        """Rows that go on, and rows that begin, in any order."""
        able = [row for row in self.rows if not self.cut_off(row)]
        going_on = data.draw(st.lists(st.sampled_from(range(len(able))), unique=True)) if able else []
        begun: list[Row] = [[] for _ in range(data.draw(st.integers(0, 3)))]
        return data.draw(st.permutations([able[i] for i in going_on] + begun))

    @rule(count=st.integers(0, 5), all_there_is=st.booleans())
    def alloc(self, count: int, all_there_is: bool) -> None:
        tokens = self.twin.available_size() if all_there_is else count * self.kind.page_size
        self.compare([[]], self.call("alloc", tokens), self.twin.extend([[]], [tokens]))

    @precondition(lambda self: self.kind.grows_rows)
    @rule(data=st.data(), container=containers)
    def alloc_extend(self, data: st.DataObject, container: Container) -> None:
        rows = self.some_rows(data)
        grown = [data.draw(st.integers(0, 2 * self.kind.page_size + 1)) for _ in rows]
        prefix = [len(row) for row in rows]
        seq = [a + b for a, b in zip(prefix, grown, strict=True)]
        last_loc = self.given(container, [row[-1] if row else -1 for row in rows])
        lengths = self.given(container, prefix), self.given(container, seq)
        slots = self.call("alloc_extend", *lengths, last_loc, sum(grown))
        self.compare(rows, slots, self.twin.extend(rows, grown))

    @precondition(lambda self: self.kind.grows_rows)
    @rule(data=st.data(), container=containers)
    def alloc_decode(self, data: st.DataObject, container: Container) -> None:
        rows = self.some_rows(data)
        last_loc = self.given(container, [row[-1] if row else -1 for row in rows])
        slots = self.call("alloc_decode", self.given(container, [len(row) + 1 for row in rows]), last_loc)
        self.compare(rows, slots, self.twin.extend(rows, [1] * len(rows)))

    def compare(self, rows: list[Row], slots: torch.Tensor | None, expected: list[list[int]] | None) -> None:
        if slots is None or expected is None:
            assert (slots, expected) == (None, None)
            return
        assert (slots.dtype, slots.dim()) == (self.kind.index_dtype, 1)
        assert slots.tolist() == [slot for row in expected for slot in row]
        for row, new in zip(rows, expected, strict=True):
            if not row and new:
                self.rows.append(row)
            row.extend(new)

    @precondition(lambda self: any(map(self.cut_off, self.rows)))
    @rule()
    def go_on_without_a_window_page(self) -> None:
        row = next(filter(self.cut_off, self.rows))
        self.refused(ForeignPage, "alloc_decode", [len(row) + 1], [row[-1]])
        self.refused(ForeignPage, "alloc_extend", [len(row)], [len(row) + 2], [row[-1]], 2)

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), container=containers, whole=st.booleans())
    def free(self, data: st.DataObject, container: Container, whole: bool) -> None:
        """Some rows end; of each page all their slots are named, or any one."""
        ending = data.draw(st.lists(st.sampled_from(range(len(self.rows))), unique=True, min_size=1))
        slots = data.draw(st.permutations([slot for i in ending for slot in self.rows[i]]))
        if not whole:
            slots = list({slot // self.kind.page_size: slot for slot in slots}.values())
        self.call("free", self.given(container, slots))
        self.twin.free(slots)
        self.rows = [row for i, row in enumerate(self.rows) if i not in ending]

    @precondition(lambda self: self.rows and self.kind.has_window)
    @rule(data=st.data(), container=containers)
    def free_swa(self, data: st.DataObject, container: Container) -> None:
        """A window slides past any slots, of pages that may have lost theirs long ago."""
        live = [slot for row in self.rows for slot in row]
        slots = data.draw(st.lists(st.sampled_from(live), min_size=1, max_size=8))
        self.call("free_swa", self.given(container, slots))
        self.twin.free_swa(slots)

    @rule(data=st.data(), begin_again=st.booleans())
    def misuse(self, data: st.DataObject, begin_again: bool) -> None:
        """A slot that the caller does not hold, at any place among some that it does; a group inside a group."""
        if begin_again and self.twin.group is not None:
            self.refused(GroupMisuse, "free_group_begin")
            return
        held = {page for page, holder in self.twin.full.holder.items() if holder >= 0}
        loose = [page for page in range(-1, self.twin.full.pages + 2) if page not in held]
        culprit = data.draw(st.sampled_from(loose))
        error = DoubleFree if 1 <= culprit <= self.twin.full.pages else ForeignPage
        within = data.draw(st.integers(0, self.kind.page_size - 1))
        slots = [row[0] for row in self.rows] + [culprit * self.kind.page_size + within]
        for verb in ("free", "free_swa") if self.kind.has_window else ("free",):
            self.refused(error, verb, data.draw(st.permutations(slots)))

    @rule()
    def group(self) -> None:
        """Begin one, or end the one that is open."""
        if self.twin.group is None:
            self.call("free_group_begin")
            self.twin.begin_group()
        else:
            self.call("free_group_end")
            self.twin.end_group()

    @rule()
    def backup_state(self) -> None:
        self.states.append((self.call("backup_state"), self.twin.backup(), deepcopy(self.rows)))

    @precondition(lambda self: self.states)
    @rule(data=st.data())
    def restore_state(self, data: st.DataObject) -> None:
        """Any that was ever taken, in any order."""
        state, then, rows = data.draw(st.sampled_from(self.states))
        error = self.twin.refuses(then)
        if error is not None:
            self.refused(error, "restore_state", state)
            return
        self.call("restore_state", state)
        self.twin.restore(then)
        self.rows = deepcopy(rows)

    @rule()
    def restore_nothing(self) -> None:
        self.refused(StaleState, "restore_state", None)

    @precondition(lambda self: len(self.rows) > 3)
    @rule()
    def clear(self) -> None:
        self.call("clear")
        self.twin.clear()
        self.rows = []

    @invariant()
    def same(self) -> None:
        ours, twin = self.inner, self.twin
        ours.check()
        assert self.ours.available_size() == twin.available_size()
        for ledger, pool in zip(ours._ledgers(), twin.pools, strict=True):
            assert ledger.free_list().tolist() == pool.free + pool.released
            report = ledger.statistics()
            counts = report.allocated, report.failures, report.groups, report.sorts, report.peak_held
            assert counts == (pool.allocated, pool.failures, pool.groups, pool.sorts, pool.peak)
        live = [slot for row in self.rows for slot in row]
        assert len(set(live)) == len(live)
        if self.kind.has_window:
            everyone = torch.arange(self.ours.size + self.kind.page_size)
            window = list(map(twin.window_slot, range(len(everyone))))
            assert self.ours.translate_loc_from_full_to_swa(everyone).tolist() == window

    def teardown(self) -> None:
        """The log, as lines of JSON, does the same to a fresh one; then every slot is there, once."""
        if not hasattr(self, "ours"):
            return
        if isinstance(self.ours, RecordingAllocator):
            self.replay_the_log([json.loads(json.dumps(entry)) for entry in self.ours.log])
        self.call("free_group_end")
        self.call("free", [slot for row in self.rows for slot in row])
        for ledger in self.inner._ledgers():
            assert sorted(ledger.free_list().tolist()) == list(range(1, ledger.pages + 1))

    def replay_the_log(self, log: Sequence[dict[str, Any]]) -> None:
        again = self.fresh()
        assert list(map(plain, replay(log, again))) == self.answers
        for ours, theirs in zip(self.inner._ledgers(), again._ledgers(), strict=True):
            assert books(ours) == books(theirs)


def check_against_twin(
    kind: Kind,
    wrapping: str = "bare",
    need_sort: bool = False,
    kernels: Kernels | None = None,
    device: str = "cpu",
    *,
    examples: int,
) -> None:
    """That many random streams of up to 30 calls."""

    class Machine(AllocatorMachine):
        def __init__(self) -> None:
            super().__init__(kind, wrapping, need_sort, kernels, device)

    run_state_machine_as_test(Machine, settings=settings(max_examples=examples, stateful_step_count=30, deadline=None))
