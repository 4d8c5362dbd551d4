"""Row verbs on a device: the same slots as on the CPU, nothing waits, and the decode step lives in a CUDA graph."""

import numpy as np
import pytest
import torch

from kvloom.allocator import DecodeStep, MHATokenToKVPool, PagedRows, PagedTokenToKVPoolAllocator, RequestTable
from kvloom.allocator.reports import Shortfall
from tests.allocator.books import ints
from tests.gpu.test_kernels import no_synchronisation

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:Synchronization debug mode"),  # says that it is a prototype
]

ROWS, MAX_PAGES = 12, 20


def make(device: str, pages: int, page_size: int) -> PagedRows:
    size = pages * page_size
    storage = MHATokenToKVPool(size, page_size, torch.float32, 1, 1, 1, device)
    allocator = PagedTokenToKVPoolAllocator(size, page_size, torch.float32, device, storage)
    return PagedRows(allocator, RequestTable(ROWS, MAX_PAGES, device))


def same(one: torch.Tensor | Shortfall, other: torch.Tensor | Shortfall) -> None:
    if isinstance(one, Shortfall) or isinstance(other, Shortfall):
        assert one == other
    else:
        assert one.tolist() == other.tolist()


def table_matches(rows: PagedRows) -> None:
    """The device has what the host has, as far as each row goes."""
    on_device = rows.table.device_pages.cpu().numpy()
    for row in range(ROWS):
        count = rows.table.page_counts[row]
        assert on_device[row, :count].tolist() == rows.table.pages[row, :count].tolist()


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_random_verbs_as_on_the_cpu(page_size: int) -> None:
    draw = np.random.default_rng(page_size)
    cpu, cuda = make("cpu", 90, page_size), make("cuda", 90, page_size)
    both = (cpu, cuda)
    live: list[int] = []
    kinds = set()
    got: list[torch.Tensor | Shortfall]
    for step in range(300):
        verb = draw.choice(["open", "extend", "decode", "several", "truncate", "fork", "release", "settle"])
        with no_synchronisation():
            if verb == "open" or not live:
                new = [rows.open_rows(1) for rows in both]
                if not isinstance(new[0], Shortfall):
                    live += new[0].tolist()
                continue
            some = draw.permutation(live)[: draw.integers(1, len(live) + 1)].astype(np.int32)
            room = MAX_PAGES * page_size - cpu.table.lengths[some]
            if verb == "extend":
                lengths = cpu.table.lengths[some] + draw.integers(0, np.minimum(room, 40) + 1).astype(np.int32)
                got = [rows.extend_rows(some, lengths) for rows in both]
            elif verb in ("decode", "several"):
                some = some[room >= 3]
                counts = draw.integers(0, 4, len(some)).astype(np.int32) if verb == "several" else None
                got = [rows.decode_rows(some, counts) for rows in both]
            elif verb == "fork":
                forks = [rows.fork_row(int(some[0]), 2) for rows in both]
                got = [torch.from_numpy(new) if isinstance(new, np.ndarray) else new for new in forks]
                if not isinstance(got[0], Shortfall):
                    live += got[0].tolist()
            elif verb == "truncate":
                alone = [row for row in some.tolist() if not cpu.host.shares.users(cpu.table.pages[row]).any()]
                lengths = (cpu.table.lengths[alone] * draw.random(len(alone))).astype(np.int32)
                for rows in both:
                    rows.truncate_rows(ints(*alone), lengths, [step] * len(alone))
                continue
            elif verb == "release":
                for rows in both:
                    rows.release_rows(some, [step] * len(some))
                live = [row for row in live if row not in some]
                continue
            else:
                for rows in both:
                    rows.settle(step)
                continue
        kinds.add(verb)
        same(*got)
        table_matches(cuda)
        cuda.check()
    assert kinds == {"extend", "decode", "several", "fork"}


def test_a_fork_copies_the_half_filled_page() -> None:
    rows = make("cuda", 20, 4)
    mine = rows.open_rows(1)
    assert not isinstance(mine, Shortfall)
    slots = rows.extend_rows(mine, ints(6))
    assert not isinstance(slots, Shortfall)
    storage = rows.allocator.get_kvcache()
    assert storage is not None
    values = torch.arange(1.0, 7.0, device="cuda").view(-1, 1, 1)
    storage.set_kv_buffer(0, slots, values, -values)
    with no_synchronisation():
        forks = rows.fork_row(int(mine[0]), 2)
    assert not isinstance(forks, Shortfall)
    for fork in forks.tolist():
        pages = rows.table.device_pages[fork, :2].long()
        place = torch.arange(6, device="cuda")
        at = pages[place // 4] * 4 + place % 4
        assert storage.get_key_buffer(0)[at].flatten().tolist() == [1, 2, 3, 4, 5, 6]
        assert storage.get_value_buffer(0)[at].flatten().tolist() == [-1, -2, -3, -4, -5, -6]
    assert len({*rows.table.pages[[mine[0], *forks], 1].tolist()}) == 3


def test_the_decode_step_in_a_graph_with_what_follows_it() -> None:
    """Captured once, replayed for other rows each time; the "model" reads the slots and writes KV there."""
    cpu, cuda = make("cpu", 90, 4), make("cuda", 90, 4)
    for rows in (cpu, cuda):
        opened = rows.open_rows(8)
        assert not isinstance(opened, Shortfall)
        assert not isinstance(rows.extend_rows(opened, np.arange(1, 9, dtype=np.int32)), Shortfall)
    step = DecodeStep(cuda.host, max_rows=8)
    storage = cuda.allocator.get_kvcache()
    assert storage is not None
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step.launch()
        lengths = step.seq_lens.float().view(-1, 1, 1)
        storage.set_kv_buffer(0, step.out_loc, lengths, -lengths)
    draw = np.random.default_rng(0)
    for _ in range(40):
        some = draw.permutation(8)[: draw.integers(1, 9)].astype(np.int32)
        expected = cpu.decode_rows(some)
        with no_synchronisation():
            shortfall = step.plan(some)
            graph.replay()
        assert shortfall is None
        assert not isinstance(expected, Shortfall)
        assert step.out_loc.tolist() == expected.tolist() + [0] * (8 - len(some))
        keys = storage.get_key_buffer(0)[step.out_loc[: len(some)]].flatten()
        assert keys.tolist() == cuda.table.lengths[some].tolist()
        table_matches(cuda)
