# mypy: allow-untyped-defs
"""The kernels in Triton; equal, number for number, to `torch_kernels.py`.  The only file that imports triton.

Rules of this file:
- One launch per verb (`triton_launches.py`).  The extend kernels spread over blocks of output tokens, so one row of a
  million tokens is as parallel as a thousand rows; each lane finds its row by binary search in the offsets that the
  host sent along.
- Nothing about a batch is a constant to the compiler: no specialisation on sizes, on the number 1, or on the alignment
  of a slice.  A variant is a kernel and the dtypes of its tensors, whence `warm_up` can compile them all.
- No kernel takes a `constexpr` argument, so that a compiled kernel is launched with the same arguments in every triton.
- A masked load names what its dead lanes read, and slots are computed in int64.

Kernel bodies are Triton's language rather than Python; they carry no annotations, which Triton would interpret.
"""

import inspect
from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

TOKENS = tl.constexpr(512)  # output slots per program when extending
ROWS = tl.constexpr(128)  # rows per program when decoding
WIDTH = tl.constexpr(512)  # elements (or words) of one token per program when storing


def _jit(body: Callable[..., None]) -> Any:
    return triton.jit(body, do_not_specialize=list(inspect.signature(body).parameters))


@_jit
def _row_of(token, live, token_start, rows_n, halvings):
    """The last row that begins at or before `token`, which is the one that has it: empty rows end where they begin."""
    low = tl.zeros_like(token)
    high = low + rows_n
    for _ in range(halvings):
        middle = (low + high) // 2
        begun = tl.load(token_start + middle, mask=live, other=0) <= token
        low = tl.where(begun, middle, low)
        high = tl.where(begun, high, middle)
    return low


@_jit
def _place(prefix_lens, page_start, token_start, rows_n, halvings, tokens_n, page_size):
    """Per lane: token, whether it is one, its row, position, page index, and place in `new_pages` (at `new`)."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    live = token < tokens_n
    row = _row_of(token, live, token_start, rows_n, halvings)
    nth = token - tl.load(token_start + row, mask=live, other=0)
    prefix = tl.load(prefix_lens + row, mask=live, other=0)
    position = prefix + nth
    page_index = position // page_size
    nth_page = page_index - (prefix + page_size - 1) // page_size
    new = live & (nth_page >= 0)
    return token, live, row, nth, position, page_index, nth_page + tl.load(page_start + row, mask=new, other=0), new


@_jit
def extend(last_loc, prefix_lens, new_pages, page_start, token_start, out, rows_n, halvings, tokens_n, page_size):
    """See `Kernels.extend`."""
    token, live, row, nth, position, _, at, new = _place(
        prefix_lens, page_start, token_start, rows_n, halvings, tokens_n, page_size
    )
    page = tl.load(new_pages + at, mask=new, other=0).to(tl.int64)
    last = tl.load(last_loc + row, mask=live & (new == 0), other=0).to(tl.int64)
    slot = tl.where(new, page * page_size + position % page_size, last + 1 + nth)
    tl.store(out + token, slot.to(out.dtype.element_ty), mask=live)


@_jit
def _enter(
    table, rows, prefix_lens, new_pages, page_start, token_start, out,
    table_width, rows_n, halvings, tokens_n, out_n, page_size,
):  # fmt: skip
    """Slots to `out`, 0 behind the last token, and new pages to `table`."""
    token, live, row, _, position, page_index, at, new = _place(
        prefix_lens, page_start, token_start, rows_n, halvings, tokens_n, page_size
    )
    entry = table + tl.load(rows + row, mask=live, other=0).to(tl.int64) * table_width + page_index
    page = tl.load(new_pages + at, mask=new, other=0)
    # Only entries below the row's first new page are read here, so no program reads what another writes.
    page += tl.load(entry, mask=live & (new == 0), other=0)
    within = position % page_size
    # The first token of each new page is among these: its lane makes the entry.
    tl.store(entry, page, mask=new & (within == 0))
    slot = tl.where(live, page.to(tl.int64) * page_size + within, 0)
    tl.store(out + token, slot.to(out.dtype.element_ty), mask=token < out_n)


@_jit
def extend_rows(
    table, rows, prefix_lens, new_pages, page_start, token_start, out,
    table_width, rows_n, halvings, tokens_n, page_size,
):  # fmt: skip
    """See `Kernels.extend_rows`."""
    _enter(
        table, rows, prefix_lens, new_pages, page_start, token_start, out,
        table_width, rows_n, halvings, tokens_n, tokens_n, page_size,
    )  # fmt: skip


@_jit
def extend_step(
    table, sizes, rows, prefix_lens, new_pages, page_start, token_start, out, table_width, out_n, page_size
):
    """See `Kernels.extend_step`."""
    _enter(
        table, rows, prefix_lens, new_pages, page_start, token_start, out,
        table_width, tl.load(sizes), tl.load(sizes + 1), tl.load(sizes + 2), out_n, page_size,
    )  # fmt: skip


@_jit
def decode(last_loc, new_pages, out, rows_n, page_size):
    """See `Kernels.decode`."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = row < rows_n
    page = tl.load(new_pages + row, mask=live, other=0).to(tl.int64)
    last = tl.load(last_loc + row, mask=live, other=0).to(tl.int64)
    tl.store(out + row, tl.where(page > 0, page * page_size, last + 1).to(out.dtype.element_ty), mask=live)


@_jit
def decode_rows(table, rows, seq_lens, new_pages, out, table_width, rows_n, page_size):
    """See `Kernels.decode_rows`."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = row < rows_n
    position = tl.load(seq_lens + row, mask=live, other=1) - 1
    entry = table + tl.load(rows + row, mask=live, other=0).to(tl.int64) * table_width + position // page_size
    page = tl.load(new_pages + row, mask=live, other=0)
    new = page > 0
    tl.store(entry, page, mask=new)
    page += tl.load(entry, mask=live & (new == 0), other=0)
    slot = page.to(tl.int64) * page_size + position % page_size
    tl.store(out + row, slot.to(out.dtype.element_ty), mask=live)


@_jit
def _copy_token(tokens, stride, buffer, slot, width):
    """One block of one token's units, which are whatever the pointers say; `stride` and `width` count them."""
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    kept = column < width
    units = tl.load(tokens + tl.program_id(0).to(tl.int64) * stride + column, mask=kept, other=0)
    tl.store(buffer + slot * width + column, units, mask=kept)


# Both move bits, so one compiled kernel serves all KV dtypes.
@_jit
def store_words(key_buffer, value_buffer, loc, key, value, width, key_stride, value_stride):
    """`Kernels.store_kv`, in words."""
    unit = tl.pointer_type(tl.int64)
    slot = tl.load(loc + tl.program_id(0)).to(tl.int64)
    _copy_token(key.to(unit), key_stride, key_buffer.to(unit), slot, width)
    _copy_token(value.to(unit), value_stride, value_buffer.to(unit), slot, width)


@_jit
def store_bytes(key_buffer, value_buffer, loc, key, value, width, key_stride, value_stride):
    """`Kernels.store_kv`, in bytes."""
    unit = tl.pointer_type(tl.int8)
    slot = tl.load(loc + tl.program_id(0)).to(tl.int64)
    _copy_token(key.to(unit), key_stride, key_buffer.to(unit), slot, width)
    _copy_token(value.to(unit), value_stride, value_buffer.to(unit), slot, width)
