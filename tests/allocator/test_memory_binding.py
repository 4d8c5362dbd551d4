"""KVMemory.bind on the host and as on a device: slots and page tables over random histories, token by token."""

import random
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
import torch

from kvloom.allocator import InvalidArgument, PoolSpec, RequestTable
from kvloom.allocator.kernels import torch_kernels
from kvloom.allocator.step_binding import DeviceStepBinding
from tests.allocator.books import ints
from tests.allocator.memories import IntArray, Step, admitted, bound, make


def as_on_a_device(tables: Mapping[str, RequestTable], page_size: int, device: torch.device) -> DeviceStepBinding:
    """The way of a device, with device tables of their own, on the CPU."""
    for table in tables.values():
        table.device_pages = torch.full_like(table.device_pages, -1)
    return DeviceStepBinding(tables, page_size, torch_kernels, device)


FULL, SWA = PoolSpec(), PoolSpec("swa", layers=(1,), window=7)
SAID = (11, 12, 13, 11, 12, 14) * 20  # what all prompts begin with, more or less of it


class Bindings:
    """A random history over one memory: rows enter, many on what others have computed, grow, publish and leave."""

    def __init__(self, pools: Sequence[PoolSpec], page_size: int) -> None:
        self.draw = random.Random(page_size)
        self.memory = make(
            pages=max(12, 160 // page_size), page_size=page_size, max_rows=6, max_seq=120, pools=pools
        )  # fmt: skip
        self.prompts: dict[int, int] = {}
        self.lengths: dict[int, int] = {}  # tokens whose KV is there
        self.tokens: dict[int, IntArray] = {}
        self.seen: set[str] = set()  # kinds of steps, and what else must have happened

    def enter(self) -> None:
        draw, length = self.draw, self.draw.randint(1, 60)
        common = draw.randint(0, length)
        tokens = ints(*SAID[:common], *(draw.randrange(20, 90) for _ in range(120 - common)))
        match = self.memory.match(tokens[:length])
        row = self.memory.admit(match, length)
        if row is not None:
            self.prompts[row], self.lengths[row], self.tokens[row] = length, match.tokens, tokens
            self.seen |= {"reused"} if match.tokens else set()

    def got(self, rows: list[int], stops: list[int]) -> bool:
        return self.memory.reserve(ints(*rows), ints(*stops)) is None

    def step(self) -> None:
        draw, lengths, prompts = self.draw, self.lengths, self.prompts
        running = [row for row in lengths if lengths[row] >= prompts[row] and lengths[row] < 119]
        decode = {row: lengths[row] for row in running if draw.random() < 0.8}
        filling = [row for row in lengths if lengths[row] < prompts[row] and draw.random() < 0.6]
        prefill = {row: (lengths[row], draw.randint(lengths[row] + 1, prompts[row])) for row in filling}
        if not self.got(list(decode), [length + 1 for length in decode.values()]):
            decode = {}
        if not self.got(list(prefill), [stop for _, stop in prefill.values()]):
            prefill = {}
        if decode or prefill:
            self.seen.add(bound(self.memory, decode, prefill).kind)
        lengths |= {row: length + 1 for row, length in decode.items()}
        lengths |= {row: stop for row, (_, stop) in prefill.items()}

    def settle(self) -> None:
        """What was computed is settled: perhaps published, always trimmed."""
        rows = ints(*self.lengths)
        settled = ints(*self.lengths.values())
        before = sum(report.freed.get("rollback", 0) for report in self.memory.statistics().pools.values())
        if self.draw.random() < 0.5:
            self.memory.publish(rows, settled, self.tokens_of)
        self.memory.trim(rows, settled, self.tokens_of)
        self.require_windows(rows, settled)
        after = sum(report.freed.get("rollback", 0) for report in self.memory.statistics().pools.values())
        self.seen |= {"twice"} if after > before else set()
        self.seen |= {"trimmed"} if any(table.first[rows].any() for table in self.memory.tables.values()) else set()

    def require_windows(self, rows: IntArray, settled: IntArray) -> None:
        """A row keeps what a token behind its last whole page would see, and nothing left of it.

        Where the first pool has a window, one page of the cache more may stay, for the next one to hang on.
        """
        size, pages_hang_on_windows = self.memory.page_size, self.memory.specs[0].window is not None
        for pool in self.memory.specs:
            seen_from = 0 if pool.window is None else np.maximum(settled // size * size + 1 - pool.window, 0)
            left, first = seen_from // size, self.memory.tables[pool.name].first[rows]
            assert (first <= left).all()
            if not pages_hang_on_windows:
                assert (first == left).all()

    def tokens_of(self, row: int, start: int, stop: int) -> IntArray:
        return self.tokens[row][start:stop]

    def leave(self, step: int) -> None:
        for row in [row for row in self.lengths if self.draw.random() < 0.08]:
            self.memory.release([row], [self.draw.choice([-1, step, step + 1])])
            del self.prompts[row], self.lengths[row], self.tokens[row]


@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
@pytest.mark.parametrize("pools", [(FULL,), (FULL, SWA), (SWA, FULL), (SWA,)], ids=["full", "both", "swa first", "swa"])
@pytest.mark.parametrize("page_size", [1, 2, 3, 16, 100])
def test_bind_over_a_random_history(
    page_size: int, pools: tuple[PoolSpec, ...], on_device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if on_device:
        monkeypatch.setattr("kvloom.allocator.memory.step_binding_for", as_on_a_device)
    history = Bindings(pools, page_size)
    for step in range(200):
        history.enter()
        history.step()
        history.memory.check()
        history.settle()
        history.leave(step)
        history.memory.settle(step - 1)
        history.memory.check()
    assert {"decode", "prefill", "mixed"} <= history.seen
    if page_size <= 3:  # two of 16 are rarely alike
        assert {"reused", "twice"} <= history.seen
        assert ("trimmed" in history.seen) == (SWA in pools)


def test_the_page_table_of_a_batch_stays_when_its_row_is_given_on() -> None:
    memory = make()
    row = admitted(memory, 9)
    table = bound(memory, prefill={row: (0, 9)}).page_table["full"]
    before = table.tolist()
    memory.release([row], [-1])
    admitted(memory, 1)
    assert table.tolist() == before == [[1, 2, 3]]


def test_tokens_in_flight_keep_their_source() -> None:
    memory = make()
    row = admitted(memory, 3)
    assert memory.reserve(ints(row), ints(4)) is None
    plan = Step(7, ints(row), ints(3), ints(1), 1, ints(0), ints(0), token_src=ints(row))
    batch = memory.bind(plan)
    assert (batch.step, batch.has_token_src, batch.token_src.tolist()) == (7, True, [row])
    batch.replace_token_ids(torch.tensor([42], dtype=torch.int32))
    assert batch.token_ids.tolist() == [42]


def test_a_plan_beyond_what_was_reserved_is_refused() -> None:
    memory = make()
    row = admitted(memory, 3)
    with pytest.raises(InvalidArgument, match=f"row {row} up to token 9; 3 are reserved"):  # else: the dump page
        memory.bind(Step(0, ints(row), ints(0), ints(9), 0, ints(*range(9)), ints(0)))
