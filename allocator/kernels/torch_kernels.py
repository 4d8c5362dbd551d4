"""The specification of the kernels: torch operations, on any device.

None of them waits for a device: all shapes follow from the arguments' shapes, which the host knows.
"""

from functools import cache

import torch
from torch import Tensor


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
    _fill(last_loc + 1, prefix_lens, seq_lens, new_pages, page_start, out, page_size)


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
    owner, nth = _owners(page_start, new_pages.shape[0])
    table[rows[owner], _pages_before(prefix_lens, page_size)[owner] + nth] = new_pages
    # A full row has no page at its end, nor a token to put there: any entry will do.
    page = table[rows, (prefix_lens // page_size).clamp(max=table.shape[1] - 1)].to(torch.int64)
    _fill(page * page_size + prefix_lens % page_size, prefix_lens, seq_lens, new_pages, page_start, out, page_size)


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
    tokens_n, token = sizes[2], torch.arange(out.shape[0], device=out.device)
    # What is no token does again what the last token does; where there is none, it writes back what it reads.
    at = torch.minimum(token, (tokens_n - 1).clamp(min=0)).to(torch.int32)
    row = torch.searchsorted(token_start[1:], at, right=True).clamp(max=rows.shape[0] - 1)
    position = prefix_lens[row].to(torch.int64) + at - token_start[row]
    page_index = position // page_size
    nth = page_index - _pages_before(prefix_lens, page_size)[row]
    entry = rows[row].to(torch.int64) * table.shape[1] + page_index.clamp(max=table.shape[1] - 1)
    entries = table.view(-1)
    page = torch.where(
        (nth >= 0) & (tokens_n > 0),
        new_pages[(page_start[row] + nth).clamp(0, new_pages.shape[0] - 1)],
        entries.index_select(0, entry),
    )
    entries.scatter_(0, entry, page)
    slot = page.to(torch.int64) * page_size + position % page_size
    out.copy_(torch.where(token < tokens_n, slot, 0))


def decode(last_loc: Tensor, new_pages: Tensor, out: Tensor, page_size: int) -> None:
    """See `Kernels.decode`."""
    first_slots = new_pages.to(torch.int64) * page_size
    out.copy_(torch.where(new_pages > 0, first_slots, last_loc + 1))


def decode_rows(table: Tensor, rows: Tensor, seq_lens: Tensor, new_pages: Tensor, out: Tensor, page_size: int) -> None:
    """See `Kernels.decode_rows`."""
    # On the CPU each operation has its price, whatever the batch: hence operands of one dtype, constants made once,
    # flat indices, and writing all entries, most of them as they were, rather than picking out the new ones.
    position = seq_lens - _constant(1)
    page_index = torch.floor_divide(position, _constant(page_size))
    entry = torch.add(page_index, rows.to(torch.int64), alpha=table.shape[1])
    entries = table.view(-1)
    page = torch.where(new_pages > _constant(0), new_pages, entries.index_select(0, entry))
    entries.scatter_(0, entry, page)
    # page * page_size + position % page_size
    torch.add(position, torch.sub(page, page_index).to(torch.int64), alpha=page_size, out=out)


def store_kv(key_buffer: Tensor, value_buffer: Tensor, loc: Tensor, key: Tensor, value: Tensor) -> None:
    """See `Kernels.store_kv`."""
    # Not index_copy_: it wants int64 indices and knows no 8-bit floats on the CPU.
    key_buffer[loc] = key.to(key_buffer.dtype)
    value_buffer[loc] = value.to(value_buffer.dtype)


def _fill(
    first: Tensor,
    prefix_lens: Tensor,
    seq_lens: Tensor,
    new_pages: Tensor,
    page_start: Tensor,
    out: Tensor,
    page_size: int,
) -> None:
    """Write the slots of all new tokens to `out`; `first` [N] is where each row goes on in the last page that it has.

    Slots come in runs: for each row one of what fits into its last page, then one per new page.  That is N + M runs,
    whose number the host knows, some of them empty.
    """
    room = torch.minimum(-prefix_lens % page_size, seq_lens - prefix_lens)
    owner, nth = _owners(page_start, new_pages.shape[0])
    begin = (_pages_before(prefix_lens, page_size)[owner] + nth) * page_size  # position of each new page's first token
    filled = (seq_lens[owner] - begin).clamp(max=page_size)
    head = page_start[:-1] + torch.arange(len(first), device=out.device)
    tail = torch.arange(1, len(owner) + 1, device=out.device) + owner
    run = out.new_empty(len(first) + len(owner), dtype=torch.int64)
    length = torch.empty_like(run)
    run[head], run[tail] = first.to(torch.int64), new_pages.to(torch.int64) * page_size
    length[head], length[tail] = room.to(torch.int64), filled
    run -= length.cumsum(0) - length  # less its place in `out`, so that what is added below is the same for all
    torch.add(
        torch.repeat_interleave(run, length, output_size=out.shape[0]),
        torch.arange(out.shape[0], device=out.device),
        out=out,
    )


def _owners(page_start: Tensor, pages_n: int) -> tuple[Tensor, Tensor]:
    """For each of the new pages: the row it belongs to, and its place among that row's; both int64 [M]."""
    begins = page_start[:-1].to(torch.int64)
    rows = torch.arange(len(begins), device=begins.device)
    owner = torch.repeat_interleave(rows, page_start.diff(), output_size=pages_n)
    return owner, torch.arange(pages_n, device=begins.device) - begins[owner]


def _pages_before(prefix_lens: Tensor, page_size: int) -> Tensor:
    """ceil(prefix / page_size): index of the first page that the row does not have yet.  int64 [N]."""
    return (prefix_lens.to(torch.int64) + (page_size - 1)) // page_size


@cache
def _constant(value: int) -> Tensor:
    """A scalar operand, int32 [] on the CPU, whatever the other operand's device.

    torch wraps a Python number anew for each operation, which costs as much as the operation.
    """
    return torch.tensor(value, dtype=torch.int32, device="cpu")
