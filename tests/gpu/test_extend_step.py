"""The extend step on a device, replayed or captured: the step that the CPU takes; nothing waits, nothing compiles."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from kvloom.allocator import DecodeStep, ExtendStep, PagedRows, PagedTokenToKVPoolAllocator, RequestTable, Shortfall
from kvloom.allocator.table import RowArray
from tests.allocator.books import ints
from tests.gpu.test_kernels import no_synchronisation

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:Synchronization debug mode"),  # says that it is a prototype
]

ROWS, MAX_PAGES, TOKENS = 12, 40, 1300  # three programs, the last one partly used


class Twins:
    """The same rows on the CPU, where they are launched, and on the device, where they are replayed."""

    def __init__(self, pages: int, page_size: int) -> None:
        self.page_size = page_size
        self.cpu, self.cuda = (self._rows(pages, device) for device in ("cpu", "cuda"))
        self.step = ExtendStep(self.cuda.host, ROWS, TOKENS)
        self.mine = self._opened()

    def _rows(self, pages: int, device: str) -> PagedRows:
        allocator = PagedTokenToKVPoolAllocator(pages * self.page_size, self.page_size, torch.float32, device, None)
        return PagedRows(allocator, RequestTable(ROWS, MAX_PAGES, device))

    def _opened(self) -> RowArray:
        new, others = self.cpu.open_rows(ROWS), self.cuda.open_rows(ROWS)
        assert not isinstance(new, Shortfall)
        assert np.array_equal(new, others)
        return new

    def draw(self, draw: np.random.Generator) -> tuple[RowArray, RowArray]:
        """Some of the rows, and lengths to grow to."""
        some = draw.permutation(self.mine)[: draw.integers(0, ROWS + 1)]
        before = self.cpu.table.lengths[some]
        room = np.minimum(MAX_PAGES * self.page_size - before, TOKENS // max(1, len(some)))
        more = np.where(draw.random(len(some)) < 0.2, room, draw.integers(0, room // draw.choice([1, 20]) + 1))
        return some, (before + more).astype(np.int32)

    def check(self, expected: torch.Tensor) -> None:
        """Slots, padding, the table, and what a model would read."""
        step, table = self.step, self.cuda.table
        assert step.out_loc.tolist() == expected.tolist() + [0] * (TOKENS - len(expected))
        assert step.tokens == len(expected) == int(step.token_start[-1])
        assert (step.seq_lens - step.prefix_lens).tolist() == step.token_start.diff().tolist()
        on_device = table.device_pages.cpu().numpy()
        for row in self.mine.tolist():
            count = table.page_counts[row]
            assert on_device[row, :count].tolist() == table.pages[row, :count].tolist()
        assert not on_device[ROWS].any()
        assert table.pages.tolist() == self.cpu.table.pages.tolist()
        self.cuda.check()

    def start_again(self) -> None:
        for rows in (self.cpu, self.cuda):
            rows.release_rows(self.mine, [-1] * ROWS)
        self.mine = self._opened()


def take_turns(twins: Twins, act: Callable[[RowArray, RowArray], Shortfall | None], turns: int) -> None:
    draw, short = np.random.default_rng(twins.page_size), 0
    for _ in range(turns):
        some, lengths = twins.draw(draw)
        expected = twins.cpu.extend_rows(some, lengths)
        with no_synchronisation():
            answer = act(some, lengths)
        if isinstance(expected, Shortfall):
            assert answer == expected
            short += 1
            twins.start_again()
        else:
            assert answer is None
            twins.check(expected)
    assert short > 1


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_replayed_as_launched_on_the_cpu(page_size: int) -> None:
    twins = Twins(120, page_size)
    take_turns(twins, twins.step.run, 150)


@pytest.mark.parametrize("page_size", [1, 16])
def test_in_a_graph_with_what_follows_it(page_size: int) -> None:
    """Captured once, replayed for other rows and lengths; the "model" reads what the step leaves."""
    twins = Twins(120, page_size)
    step = twins.step
    graph, seen = torch.cuda.CUDAGraph(), torch.zeros(TOKENS + 1, dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        step.launch()
        seen[:-1] = step.out_loc + 1
        seen[-1] = step.token_start[-1]

    def act(some: RowArray, lengths: RowArray) -> Shortfall | None:
        shortfall = step.plan(some, lengths)
        if shortfall is None:
            graph.replay()
        return shortfall

    take_turns(twins, act, 100)
    assert seen[:-1].tolist() == (step.out_loc + 1).tolist()
    assert int(seen[-1]) == int(step.token_start[-1])


def test_many_steps_without_looking() -> None:
    """More than there are blocks, behind a device that is busy: none is written over before it has been read."""
    twins = Twins(100, 16)
    busy = torch.randn(4096, 4096, device="cuda")
    collected, expected = [], []
    torch.cuda.synchronize()
    for turn in range(40):
        length = np.full(ROWS, turn + 1, np.int32)
        slots = twins.cpu.extend_rows(twins.mine, length)
        assert not isinstance(slots, Shortfall)
        busy = (busy @ busy).clamp(-1, 1)
        assert twins.step.run(twins.mine, length) is None
        collected.append(twins.step.out_loc[:ROWS].clone())
        expected.append(slots)
    assert torch.equal(torch.stack(collected).cpu(), torch.stack(expected))


def test_500_shapes_compile_nothing_new(monkeypatch: pytest.MonkeyPatch) -> None:
    import triton

    twins = Twins(200, 16)
    compiled: list[object] = []
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", lambda **what: compiled.append(what["repr"]))
    draw = np.random.default_rng(0)
    for _ in range(500):
        some, lengths = twins.draw(draw)
        expected = twins.cpu.extend_rows(some, lengths)
        with no_synchronisation():
            answer = twins.step.run(some, lengths)
        if isinstance(expected, Shortfall):
            assert answer == expected
            twins.start_again()
        else:
            assert twins.step.out_loc[: len(expected)].tolist() == expected.tolist()
    ExtendStep(twins.cuda.host, 3, 7)  # another size, the same kernel
    torch.cuda.synchronize()
    assert compiled == []


def test_a_replay_that_fails_leaves_rows_and_blocks_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it is the block with the event behind it: those that follow are right."""
    twins = Twins(100, 4)
    step = twins.step
    for turn in range(20):
        some, lengths = twins.mine[:3], np.full(3, turn + 1, np.int32)
        before = twins.cuda.table.lengths.tolist()
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda.CUDAGraph, "replay", lost)
            with pytest.raises(RuntimeError, match="lost"):
                step.run(some, lengths)
        assert twins.cuda.table.lengths.tolist() == before
        expected = twins.cpu.extend_rows(some, lengths)
        assert not isinstance(expected, Shortfall)
        assert step.run(some, lengths) is None
        assert step.out_loc[:3].tolist() == expected.tolist()
        twins.cuda.check()


def lost(_: torch.cuda.CUDAGraph) -> None:
    raise RuntimeError("lost")


def test_prefill_and_decode_on_one_table() -> None:
    """Both kinds of step, one after the other."""
    twins = Twins(100, 4)
    decode = DecodeStep(twins.cuda.host, ROWS)
    some = twins.mine[:3]
    for lengths in (ints(5, 8, 1), ints(16, 9, 20)):
        expected = twins.cpu.extend_rows(some, lengths)
        decoded = twins.cpu.decode_rows(some)
        assert not isinstance(expected, Shortfall)
        assert not isinstance(decoded, Shortfall)
        with no_synchronisation():
            assert twins.step.run(some, lengths) is None
            assert decode.run(some) is None
        assert twins.step.out_loc[: len(expected)].tolist() == expected.tolist()
        assert decode.out_loc[:3].tolist() == decoded.tolist()
