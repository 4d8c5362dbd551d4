"""Batches for the kernels, with the answers worked out token by token in plain Python."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvloom.allocator.kernels import Kernels

PAGE_SIZES = (1, 3, 4, 16, 24)
UNTOUCHED = -7
MARGIN = 3  # odd, so that slices begin where no vector load would like them to


@dataclass(frozen=True)
class Batch:
    """Rows of a page table about to grow, and what must come of it."""

    page_size: int
    table: list[list[int]]  # before; behind each row's pages stands what an earlier owner left
    rows: list[int]
    prefix_lens: list[int]
    seq_lens: list[int]
    last_loc: list[int]
    new_pages: list[int]
    page_start: list[int]
    token_start: list[int]
    slots: list[int]
    table_after: list[list[int]]


def grow(page_size: int, lengths: Sequence[tuple[int, int]], seed: int = 0, first_page: int = 1) -> Batch:
    """Rows that hold `lengths[i][0]` tokens and get `lengths[i][1]` more; pages and rows are drawn at random."""
    rng = random.Random(seed)
    longest = max((prefix + more for prefix, more in lengths), default=0)
    width = max(1, -(-longest // page_size) + rng.randint(0, 1))
    height = len(lengths) + rng.randint(1, 3)
    rows = rng.sample(range(height), len(lengths))
    free = list(range(first_page, first_page + width * height))
    rng.shuffle(free)
    table = [[rng.randint(1, 10**6) for _ in range(width)] for _ in range(height)]
    table_after = [list(line) for line in table]
    last_loc, new_pages, slots, page_start, token_start = [], list[int](), list[int](), [0], [0]
    for row, (prefix, more) in zip(rows, lengths, strict=True):
        pages = [free.pop() for _ in range(-(-prefix // page_size))]
        table[row][: len(pages)] = pages
        last_loc.append(pages[-1] * page_size + (prefix - 1) % page_size if prefix else -1)
        for position in range(prefix, prefix + more):
            if position == len(pages) * page_size:
                pages.append(free.pop())
                new_pages.append(pages[-1])
            slots.append(pages[position // page_size] * page_size + position % page_size)
        table_after[row][: len(pages)] = pages
        page_start.append(len(new_pages))
        token_start.append(len(slots))
    prefix_lens = [prefix for prefix, _ in lengths]
    seq_lens = [prefix + more for prefix, more in lengths]
    return Batch(
        page_size, table, rows, prefix_lens, seq_lens, last_loc, new_pages, page_start, token_start, slots, table_after
    )


def random_lengths(rng: random.Random, page_size: int, rows: int, longest: int) -> list[tuple[int, int]]:
    """Lengths of all kinds: empty rows, rows at a page's edge, rows that add nothing or stay in their page."""

    def one() -> int:
        length = rng.randint(0, longest)
        return rng.choice((0, length, length // page_size * page_size, rng.randint(0, 2)))

    return [(one(), one()) for _ in range(rows)]


def decode_lengths(rng: random.Random, page_size: int, rows: int, longest: int) -> list[tuple[int, int]]:
    return [(prefix, 1) for prefix, _ in random_lengths(rng, page_size, rows, longest)]


def ints(values: Sequence[int] | Sequence[Sequence[int]], device: torch.device, dtype: torch.dtype) -> Tensor:
    """`values` on the device, as a slice out of the middle of something larger when they are a flat row."""
    whole = torch.tensor(values, dtype=dtype, device=device)
    if whole.dim() != 1:
        return whole
    margin = whole.new_full((MARGIN,), 99)
    return torch.cat((margin, whole, margin))[MARGIN : MARGIN + len(whole)]


class Run:
    """A batch as tensors on a device.  Each verb runs there and is held against the answers."""

    def __init__(self, batch: Batch, device: torch.device, index_dtype: torch.dtype = torch.int64) -> None:
        self.batch = batch
        self.index_dtype = index_dtype
        self.table = ints(batch.table, device, torch.int32)
        self.last_loc = ints(batch.last_loc, device, index_dtype)
        self.out = torch.full((len(batch.slots) + 2 * MARGIN,), UNTOUCHED, dtype=index_dtype, device=device)
        names = ("rows", "prefix_lens", "seq_lens", "new_pages", "page_start", "token_start")
        self.sent = {name: ints(getattr(batch, name), device, torch.int32) for name in names}
        new = dict.fromkeys(range(len(batch.rows)), 0)
        for row in new:
            for page in batch.new_pages[batch.page_start[row] : batch.page_start[row + 1]]:
                new[row] = page
        self.decode_pages = ints(list(new.values()), device, torch.int32)

    @property
    def slots(self) -> Tensor:
        return self.out[MARGIN : len(self.batch.slots) + MARGIN]

    def extend(self, kernels: Kernels) -> None:
        sent = {name: tensor for name, tensor in self.sent.items() if name != "rows"}
        kernels.extend(self.last_loc, **sent, out=self.slots, page_size=self.batch.page_size)

    def extend_rows(self, kernels: Kernels) -> None:
        kernels.extend_rows(self.table, **self.sent, out=self.slots, page_size=self.batch.page_size)

    def extend_step(self, kernels: Kernels, rows_max: int, tokens_max: int) -> None:
        """In a block for more rows and tokens, where something is left of the step before; checks what is behind."""
        rows_n, tokens_n, longer = len(self.batch.rows), len(self.batch.slots), self.batch.rows or [0]
        behind = {"rows": longer[-1], "prefix_lens": 1, "seq_lens": 9, "page_start": 9, "token_start": tokens_n}
        sent = {
            name: torch.cat((tensor, tensor.new_full((rows_max - rows_n,), behind.get(name, 7))))
            for name, tensor in self.sent.items()
        }
        sizes = ints([rows_n, (rows_n - 1).bit_length(), tokens_n], self.out.device, torch.int32)
        out = torch.full((tokens_max,), UNTOUCHED, dtype=self.index_dtype, device=self.out.device)
        kernels.extend_step(self.table, sizes, **sent, out=out, page_size=self.batch.page_size)
        self.slots.copy_(out[:tokens_n])
        assert not out[tokens_n:].any()

    def decode(self, kernels: Kernels) -> None:
        kernels.decode(self.last_loc, self.decode_pages, self.slots, self.batch.page_size)

    def decode_rows(self, kernels: Kernels) -> None:
        kernels.decode_rows(
            self.table, self.sent["rows"], self.sent["seq_lens"], self.decode_pages, self.slots, self.batch.page_size
        )

    def check(self, table: list[list[int]]) -> None:
        """The slots are right, nothing beside them was written, and the table is `table`."""
        edge = [UNTOUCHED] * MARGIN
        assert self.out.tolist() == edge + self.batch.slots + edge
        assert self.table.tolist() == table


Verb = Callable[[Run, Kernels], None]
EXTENDING: tuple[Verb, ...] = (Run.extend, Run.extend_rows)
DECODING: tuple[Verb, ...] = (Run.decode, Run.decode_rows)  # of batches in which each row grows by 1


def check_extend(kernels: Kernels, batch: Batch, device: torch.device, index_dtype: torch.dtype) -> None:
    """All extend verbs give the batch's answers."""
    for verb, after in zip(EXTENDING, (batch.table, batch.table_after), strict=True):
        run = Run(batch, device, index_dtype)
        verb(run, kernels)
        run.check(after)
    for more in (1, 600):
        run = Run(batch, device, index_dtype)
        run.extend_step(kernels, len(batch.rows) + more, len(batch.slots) + more)
        run.check(batch.table_after)


def check_decode(kernels: Kernels, batch: Batch, device: torch.device, index_dtype: torch.dtype) -> None:
    """Both decode verbs give the batch's answers."""
    for verb, after in zip(DECODING, (batch.table, batch.table_after), strict=True):
        run = Run(batch, device, index_dtype)
        verb(run, kernels)
        run.check(after)


def check_store(kernels: Kernels, key: Tensor, value: Tensor, loc: Tensor, dtype: torch.dtype) -> None:
    """store_kv writes the slots `loc` (distinct) of zeroed buffers of `dtype` and no others."""
    _, heads, dim = key.shape
    buffers = torch.zeros(2, 1 + int(loc.max()) + 2, heads, dim, dtype=dtype, device=key.device)
    expected = buffers.float()
    for token, slot in enumerate(loc.tolist()):
        expected[0, slot] = key[token].to(dtype).float()
        expected[1, slot] = value[token].to(dtype).float()
    kernels.store_kv(buffers[0], buffers[1], loc, key, value)
    assert torch.equal(buffers.float(), expected)
