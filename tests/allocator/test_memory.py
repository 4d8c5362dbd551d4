"""KVMemory: its verbs, what it binds a plan to (against slots computed one by one), and what its check finds."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from kvloom.allocator import (
    AllocatorError,
    Batch,
    BrokenInvariant,
    DoubleFree,
    InvalidArgument,
    KVMemory,
    Match,
    PoolSpec,
    RequestTable,
    Shortfall,
)
from kvloom.allocator.binding import DeviceBinding
from kvloom.allocator.kernels import torch_kernels
from tests.allocator.books import ints, memory_books, memory_refuses

NOTHING = Match(0, ints())
IntArray = NDArray[np.int32]


@dataclass
class Step:
    """A plan, as far as memory reads it."""

    step: int
    rows: IntArray
    prefix_lens: IntArray
    q_lens: IntArray
    decode_rows: int
    token_ids: IntArray
    sample_rows: IntArray
    token_src: IntArray | None = None
    sampling: None = None
    request_ids: Sequence[str] = field(default_factory=list)

    @property
    def seq_lens(self) -> IntArray:
        return self.prefix_lens + self.q_lens


def make(
    pages: int = 8, page_size: int = 4, max_rows: int = 4, max_seq: int | None = None, pool: PoolSpec | None = None
) -> KVMemory:
    return KVMemory(
        [pool or PoolSpec()],
        capacity_tokens=pages * page_size,
        page_size=page_size,
        max_rows=max_rows,
        max_seq=max_seq,
        needs=frozenset({"page_table"}),
    )


def admitted(memory: KVMemory, length: int) -> int:
    row = memory.admit(NOTHING, length)
    assert row is not None
    return row


# ---- who may enter, and what shortage looks like ----


def test_a_row_comes_with_the_pages_of_its_length() -> None:
    memory = make()
    rows = [admitted(memory, length) for length in (9, 4, 1)]
    assert len(set(rows)) == 3
    assert [int(memory.table.page_counts[row]) for row in rows] == [3, 1, 1]
    assert [int(memory.table.lengths[row]) for row in rows] == [9, 4, 1]
    memory.check()


@pytest.mark.parametrize(("length", "spare"), [(32, 1), (29, 1), (1, 8), (0, 9)])
def test_who_does_not_fit_now_changes_nothing(length: int, spare: int) -> None:
    memory = make(pages=8)
    before = memory_books(memory)
    assert memory.admit(NOTHING, length, spare) is None
    assert memory_books(memory) == before


def test_spare_pages_stay_free() -> None:
    memory = make(pages=8)
    assert memory.admit(NOTHING, 16, 4) is not None
    assert memory.admit(NOTHING, 1, 4) is None
    assert memory.admit(NOTHING, 4, 3) is not None


def test_without_a_row_nobody_enters() -> None:
    memory = make(max_rows=2)
    admitted(memory, 1)
    admitted(memory, 1)
    before = memory_books(memory)
    assert memory.admit(NOTHING, 1) is None
    assert memory_books(memory) == before


def test_a_shortage_is_a_value_with_everything_in_it() -> None:
    memory = make(pages=4)
    rows = ints(admitted(memory, 6), admitted(memory, 4))
    before = memory_books(memory)
    assert memory.reserve(rows, ints(9, 5)) == Shortfall("full", 2, 1, 0, 1)
    assert memory.statistics().pools["full"].failures == 1
    assert memory_books(memory)[3:] == before[3:]
    assert memory.reserve(rows[:1], ints(9)) is None
    memory.check()


def test_what_is_given_back_waits_for_its_step() -> None:
    memory = make(pages=4, max_rows=2)
    first, second = admitted(memory, 8), admitted(memory, 8)
    memory.release([first, second], [3, 4], "abort")
    report = memory.statistics()
    assert (report.pools["full"].quarantined, report.rows_quarantined, report.rows_held) == (4, 2, 0)
    assert memory.admit(NOTHING, 1) is None
    memory.settle(3)
    memory.check()
    assert admitted(memory, 8) == first
    assert memory.admit(NOTHING, 1) is None
    memory.settle(4)
    assert admitted(memory, 8) == second
    assert memory.statistics().pools["full"].freed == {"abort": 4}


def test_statistics_add_up() -> None:
    memory = make(pages=8, page_size=4)
    rows = [admitted(memory, 5), admitted(memory, 4), admitted(memory, 1)]
    memory.release(rows[1:2], [7])
    report = memory.statistics()
    pool = report.pools["full"]
    assert (pool.free, pool.held, pool.cached, pool.quarantined) == (4, 3, 0, 1)
    assert pool.capacity == pool.free + pool.held + pool.cached + pool.quarantined
    assert (pool.page_size, pool.slack_tokens, pool.allocated, pool.peak_held) == (4, 12 - 6, 4, 4)
    assert (report.rows_capacity, report.rows_held, report.rows_quarantined) == (4, 2, 1)


# ---- misuse ----


@pytest.mark.parametrize(
    ("misuse", "error"),
    [
        (lambda m: m.admit(NOTHING, -3), InvalidArgument),
        (lambda m: m.admit(NOTHING, 4, -1), InvalidArgument),
        (lambda m: m.admit(NOTHING, 21), InvalidArgument),  # longer than max_seq: never
        (lambda m: m.admit(Match(4, ints(1)), 8), InvalidArgument),
        (lambda m: m.reserve(ints(0, 1), ints(5, 21)), InvalidArgument),
        (lambda m: m.reserve(ints(0, 2), ints(9, 8)), DoubleFree),
        (lambda m: m.reserve(ints(0, -1), ints(9, 8)), InvalidArgument),
        (lambda m: m.reserve(ints(0, 0), ints(9, 9)), DoubleFree),
        (lambda m: m.release([0, 2], [-1, -1]), DoubleFree),
        (lambda m: m.release([0, 1, 0], [-1, -1, -1]), DoubleFree),
        (lambda m: m.release([0, 4], [-1, -1]), InvalidArgument),
        (lambda m: m.release([0, 1], [-1]), InvalidArgument),
        (lambda m: m.release([0], []), InvalidArgument),
    ],
)
def test_misuse_changes_nothing(misuse: Callable[[KVMemory], object], error: type[AllocatorError]) -> None:
    memory = make(max_seq=20)
    for _ in range(3):
        admitted(memory, 5)
    memory.release([2], [8])
    with memory_refuses(memory, error):
        misuse(memory)


@pytest.mark.parametrize(
    "wrong",
    [
        {"page_size": 0},
        {"page_size": -4},
        {"capacity_tokens": 0},
        {"capacity_tokens": 3},
        {"max_rows": 0},
        {"max_seq": 0},
        {"max_seq": -1},
        {"pools": []},
        {"pools": [PoolSpec(), PoolSpec(name="swa", window=8)]},
    ],
)
def test_numbers_that_make_no_sense(wrong: dict[str, int]) -> None:
    numbers: dict[str, int] = {"capacity_tokens": 32, "page_size": 4, "max_rows": 4}
    with pytest.raises(InvalidArgument):
        KVMemory(**{**numbers, **wrong})  # type: ignore[arg-type]


def swap_holders(memory: KVMemory) -> None:
    pages = memory.table.pages
    pages[0, 0], pages[1, 0] = pages[1, 0], pages[0, 0]


def write(name: str, value: int) -> Callable[[KVMemory], None]:
    def damage(memory: KVMemory) -> None:
        getattr(memory.table, name)[1] = value

    return damage


@pytest.mark.parametrize(
    "damage",
    [
        swap_holders,
        lambda memory: memory.allocator.alloc(4),
        lambda memory: memory.allocator.ledger.release(ints(3), 1),
        lambda memory: memory.allocator.ledger.cache(ints(3), 1),
        write("page_counts", 0),
        write("page_counts", 2),
        write("lengths", 5),
        write("lengths", -1),
        lambda memory: memory.table.close(ints(1), -1),
    ],
)
def test_check_finds_damaged_books(damage: Callable[[KVMemory], None]) -> None:
    memory = make()
    admitted(memory, 8)
    assert admitted(memory, 3) == 1
    memory.check()
    damage(memory)
    with pytest.raises(BrokenInvariant):
        memory.check()


# ---- what a runner gets ----


@dataclass
class Needs:
    pools: tuple[PoolSpec, ...]
    max_seq: int = 24
    device: torch.device = torch.device("cpu")
    needs: frozenset[str] = frozenset()


@dataclass
class Runner:
    spec: Needs


def test_for_a_runner_memory_is_what_its_spec_says() -> None:
    pool = PoolSpec("global", layers=(1, 3), kv_heads=2, head_dim=4, dtype=torch.float16)
    memory = KVMemory.for_runner(Runner(Needs((pool,))), capacity_tokens=35, page_size=8, max_rows=3)
    assert (memory.capacity_tokens, memory.max_rows, memory.table.max_pages) == (32, 3, 3)
    storage = memory.pools["global"]
    assert storage is memory.allocator.get_kvcache()
    assert storage.layers == (1, 3)
    assert storage.get_key_buffer(3).shape == (40, 2, 4)
    assert storage.get_key_buffer(3).dtype == torch.float16
    assert list(memory.statistics().pools) == ["global"]
    assert not bound(memory, prefill={admitted(memory, 3): (0, 3)}).page_table


def bound(
    memory: KVMemory, decode: dict[int, int] | None = None, prefill: dict[int, tuple[int, int]] | None = None
) -> Batch:
    """The batch of a step: rows with their length that take one token, then rows with start and stop of a chunk."""
    spans = [(row, length, length + 1) for row, length in (decode or {}).items()]
    spans += [(row, start, stop) for row, (start, stop) in (prefill or {}).items()]
    rows, start, stop = (ints(*column) for column in zip(*spans, strict=True))
    total = int((stop - start).sum())
    sampled = ints(*range(0, len(rows), 2))
    plan = Step(0, rows, start, stop - start, len(decode or {}), ints(*range(50, 50 + total)), sampled)
    plan.request_ids = [f"r{row}" for row in rows]
    batch = memory.bind(plan)
    compare(memory, spans, batch)
    return batch


def compare(memory: KVMemory, spans: list[tuple[int, int, int]], batch: Batch) -> None:
    """Every field against what the table and the spans say, token by token."""
    size, pages = memory.page_size, {row: memory.table.pages_of(ints(row))[0].tolist() for row, _, _ in spans}
    tokens = [(row, position) for row, start, stop in spans for position in range(start, stop)]
    slots = [pages[row][position // size] * size + position % size for row, position in tokens]
    out_loc = batch.out_loc[memory.pool.name]
    assert out_loc.dtype == torch.int64
    assert out_loc.tolist() == slots
    assert batch.positions.tolist() == [position for _, position in tokens]
    assert batch.row_slot.tolist() == [row for row, _, _ in spans]
    assert batch.prefix_lens.tolist() == [start for _, start, _ in spans]
    assert batch.q_lens.tolist() == [stop - start for _, start, stop in spans]
    assert batch.seq_lens.tolist() == [stop for _, _, stop in spans]
    ends = np.cumsum([stop - start for _, start, stop in spans]).tolist()
    assert batch.q_start.tolist() == [0, *ends]
    assert batch.logits_idx.tolist() == [ends[row] - 1 for row in batch.sample_rows.tolist()]
    assert batch.token_ids.tolist() == list(range(50, 50 + len(tokens)))
    assert batch.token_src.tolist() == [-1] * len(tokens)
    assert not batch.has_token_src
    assert (batch.rows, batch.tokens) == (len(spans), len(tokens))
    assert batch.max_q == max(stop - start for _, start, stop in spans)
    assert batch.max_seq == max(stop for _, _, stop in spans)
    assert batch.pad_slot == memory.max_rows
    assert list(batch.request_ids) == [f"r{row}" for row, _, _ in spans]
    for name in ("positions", "row_slot", "q_start", "logits_idx", "token_ids", "token_src", "seq_lens"):
        assert batch.tensor(name).dtype == torch.int32
    if table := batch.page_table:
        assert table[memory.pool.name].dtype == torch.int32
        for (row, _, stop), line in zip(spans, table[memory.pool.name].tolist(), strict=True):
            used = -(-stop // size)
            assert line[:used] == pages[row][:used]


def as_on_a_device(table: RequestTable, page_size: int, device: torch.device) -> DeviceBinding:
    """The way of a device, with a device table of its own, on the CPU."""
    table.device_pages = torch.full_like(table.device_pages, -1)
    return DeviceBinding(table, page_size, torch_kernels, device)


@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
@pytest.mark.parametrize("page_size", [1, 2, 3, 16, 100])
def test_bind_over_a_random_history(page_size: int, on_device: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if on_device:
        monkeypatch.setattr("kvloom.allocator.memory.binding_for", as_on_a_device)
    draw = random.Random(page_size)
    memory = make(pages=max(12, 160 // page_size), page_size=page_size, max_rows=6, max_seq=120)
    prompts: dict[int, int] = {}
    lengths: dict[int, int] = {}  # tokens whose KV is there
    kinds: set[str] = set()
    for step in range(80):
        if (row := memory.admit(NOTHING, prompt := draw.randint(1, 60))) is not None:
            prompts[row], lengths[row] = prompt, 0
        running = [row for row in lengths if lengths[row] >= prompts[row] and lengths[row] < 119]
        decode = {row: lengths[row] for row in running if draw.random() < 0.8}
        grown = ints(*(length + 1 for length in decode.values()))
        if memory.reserve(ints(*decode), grown) is not None:
            decode = {}
        filling = [row for row in lengths if lengths[row] < prompts[row] and draw.random() < 0.6]
        prefill = {row: (lengths[row], draw.randint(lengths[row] + 1, prompts[row])) for row in filling}
        if decode or prefill:
            kinds.add(bound(memory, decode, prefill).kind)
        lengths |= {row: length + 1 for row, length in decode.items()} | {
            row: stop for row, (_, stop) in prefill.items()
        }
        for row in [row for row in lengths if draw.random() < 0.08]:
            memory.release([row], [draw.choice([-1, step, step + 1])])
            del prompts[row], lengths[row]
        memory.settle(step - 1)
        memory.check()
    assert kinds == {"decode", "prefill", "mixed"}


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


def test_the_report_says_who_holds_what() -> None:
    memory = KVMemory(capacity_tokens=64, page_size=4, max_rows=8)
    first, second = admitted(memory, 6), admitted(memory, 4)
    memory.release([admitted(memory, 9)], [5])
    report = memory.statistics()
    pool = report.pools["full"]
    assert memory.holders() == {first: 2, second: 1}
    assert (pool.held, pool.quarantined, pool.peak_held, pool.slack_tokens) == (3, 3, 6, 2)
    assert pool.fragmentation == 2 / 12
    assert str(report) == (
        "pool 'full' of 16 pages of 4: 10 free, 3 held by requests (at most 6 so far; 2 slots unused), 0 by the prefix "
        "cache, 3 waiting for a step in flight; 2 of 8 rows held, 1 waiting"
    )
    memory.release([first, second], [-1, -1])
    assert memory.statistics().pools["full"].fragmentation == 0
