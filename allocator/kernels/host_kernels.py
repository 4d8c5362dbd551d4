"""The kernels of the CPU: in numpy where torch would cost a step more than it should.

A decode step of a few rows is a dozen operations on tiny arrays, for each of which torch takes two to five microseconds
and numpy one; extending takes a third of torch's time.  The arrays share the tensors' memory.
"""

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kvloom.allocator.kernels.torch_kernels import decode, store_kv

__all__ = ["decode", "decode_rows", "extend", "extend_rows", "extend_step", "store_kv"]

Ints = NDArray[np.int32]
Slots = NDArray[np.int64]


def extend(
    last_loc: Tensor,
    prefix_lens: Tensor,
    seq_lens: Tensor,
    new_pages: Tensor,
    page_start: Tensor,
    token_start: Tensor,
    out: Tensor,
    page_size: int,
) -> None:
    """See `Kernels.extend`."""
    prefix, seq, pages, begins = prefix_lens.numpy(), seq_lens.numpy(), new_pages.numpy(), page_start.numpy()
    owner, index = _new_entries(prefix, begins, page_size)
    _fill(last_loc.numpy() + np.int64(1), prefix, seq, pages, begins, owner, index, out.numpy(), page_size)


def extend_rows(
    table: Tensor,
    rows: Tensor,
    prefix_lens: Tensor,
    seq_lens: Tensor,
    new_pages: Tensor,
    page_start: Tensor,
    token_start: Tensor,
    out: Tensor,
    page_size: int,
) -> None:
    """See `Kernels.extend_rows`."""
    prefix, seq, pages, begins = prefix_lens.numpy(), seq_lens.numpy(), new_pages.numpy(), page_start.numpy()
    entries, lines = table.numpy(), rows.numpy()
    owner, index = _new_entries(prefix, begins, page_size)
    entries[lines[owner], index] = pages
    # A full row has no page at its end, nor a token to put there: any entry will do.
    last_page = entries[lines, np.minimum(prefix // page_size, entries.shape[1] - 1)]
    first = last_page * np.int64(page_size) + prefix % page_size
    _fill(first, prefix, seq, pages, begins, owner, index, out.numpy(), page_size)


def extend_step(
    table: Tensor,
    sizes: Tensor,
    rows: Tensor,
    prefix_lens: Tensor,
    seq_lens: Tensor,
    new_pages: Tensor,
    page_start: Tensor,
    token_start: Tensor,
    out: Tensor,
    page_size: int,
) -> None:
    """See `Kernels.extend_step`."""
    rows_n, _, tokens_n = sizes.tolist()
    extend_rows(
        table,
        rows[:rows_n],
        prefix_lens[:rows_n],
        seq_lens[:rows_n],
        new_pages[: int(page_start[rows_n])],
        page_start[: rows_n + 1],
        token_start[: rows_n + 1],
        out[:tokens_n],
        page_size,
    )
    out[tokens_n:] = 0


def decode_rows(table: Tensor, rows: Tensor, seq_lens: Tensor, new_pages: Tensor, out: Tensor, page_size: int) -> None:
    """See `Kernels.decode_rows`."""
    entries, new = table.numpy().reshape(-1), new_pages.numpy()
    position = seq_lens.numpy() - 1
    page_index = position // page_size
    entry = rows.numpy() * np.int64(table.shape[1])
    entry += page_index
    page = np.where(new, new, entries.take(entry))
    entries.put(entry, page)
    # page * page_size + position % page_size
    slots = np.subtract(page, page_index, dtype=np.int64)
    slots *= page_size
    np.add(slots, position, out=out.numpy(), casting="same_kind")


def _new_entries(prefix: Ints, begins: Ints, page_size: int) -> tuple[Slots, Slots]:
    """For each new page: the row it belongs to, and its index among all pages of that row; both [M]."""
    owner = np.repeat(np.arange(len(prefix)), np.diff(begins))
    return owner, np.arange(len(owner)) + (-(-prefix // page_size) - begins[:-1])[owner]


def _fill(
    first: Slots,
    prefix: Ints,
    seq: Ints,
    pages: Ints,
    begins: Ints,
    owner: Slots,
    index: Slots,
    out: NDArray[np.integer],
    page_size: int,
) -> None:
    """Run by run, as in `torch_kernels`: what fits into each row's last page, from slot `first`, then its new pages."""
    heads = begins[:-1] + np.arange(len(first))
    tails = owner + np.arange(1, len(owner) + 1)
    run, length = np.empty((2, len(first) + len(owner)), np.int64)
    run[heads], run[tails] = first, pages * np.int64(page_size)
    length[heads], length[tails] = np.minimum(-prefix % page_size, seq - prefix), seq[owner] - index * page_size
    np.minimum(length, page_size, out=length)
    run -= length.cumsum() - length
    np.add(run.repeat(length), np.arange(len(out)), out=out, casting="same_kind")
