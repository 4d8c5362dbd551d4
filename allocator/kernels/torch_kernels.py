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
    if out.shape[0] == 0:
        return
    row, nth = _spread(token_start, out.shape[0])
    slots = last_loc.to(torch.int64)[row] + 1 + nth  # right as long as the row's last page has room
    if new_pages.shape[0]:
        position = prefix_lens[row] + nth
        nth_page = position // page_size - _pages_before(prefix_lens, page_size)[row]
        page = new_pages[(page_start[row] + nth_page).clamp(min=0)].to(torch.int64)
        slots = torch.where(nth_page < 0, slots, page * page_size + position % page_size)
    out.copy_(slots)


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
    if out.shape[0] == 0:
        return
    row, nth = _spread(page_start, new_pages.shape[0])
    table[rows[row], _pages_before(prefix_lens, page_size)[row] + nth] = new_pages
    row, nth = _spread(token_start, out.shape[0])
    position = prefix_lens[row] + nth
    page = table[rows[row], position // page_size].to(torch.int64)
    out.copy_(page * page_size + position % page_size)


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


def _spread(starts: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """For each of `total` items: the row it belongs to, and its place within that row; both int64 [total].

    starts int32 [N + 1]: where each row's items begin, and `total`.
    """
    begins = starts[:-1].to(torch.int64)
    row = torch.repeat_interleave(torch.arange(len(begins), device=starts.device), starts.diff(), output_size=total)
    return row, torch.arange(total, device=starts.device) - begins[row]


def _pages_before(prefix_lens: Tensor, page_size: int) -> Tensor:
    """ceil(prefix / page_size): index of the first page that the row does not have yet.  int64 [N]."""
    return (prefix_lens.to(torch.int64) + (page_size - 1)) // page_size


@cache
def _constant(value: int) -> Tensor:
    """A scalar operand, int32 [] on the CPU, whatever the other operand's device.

    torch wraps a Python number anew for each operation, which costs as much as the operation.
    """
    return torch.tensor(value, dtype=torch.int32, device="cpu")
