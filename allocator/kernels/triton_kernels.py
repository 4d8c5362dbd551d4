# mypy: allow-untyped-defs
"""The kernels in Triton; equal, number for number, to `torch_kernels.py`.  The only file that imports triton.

Rules of this file:
- One launch per verb.  The extend kernels spread over blocks of output tokens, so one row of a million tokens is as
  parallel as a thousand rows; each lane finds its row by binary search in the offsets that the host sent along.
- Nothing about a batch is a constant to the compiler: no specialisation on sizes, on the number 1, or on the alignment
  of a slice.  A variant is a kernel and the dtypes of its tensors, whence `warm_up` can compile them all.
- No kernel takes a `constexpr` argument, so that a compiled kernel is launched with the same arguments in every triton.
- A masked load names what its dead lanes read, and slots are computed in int64.

Kernel bodies are Triton's language rather than Python; they carry no annotations, which Triton would interpret.
"""

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

TOKENS = tl.constexpr(512)  # output slots per program when extending
ROWS = tl.constexpr(128)  # rows per program when decoding
WIDTH = tl.constexpr(512)  # elements (or words) of one token per program when storing
WORD = 8  # bytes


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
def _extend(last_loc, prefix_lens, new_pages, page_start, token_start, out, rows_n, halvings, tokens_n, page_size):
    token, live, row, nth, position, _, at, new = _place(
        prefix_lens, page_start, token_start, rows_n, halvings, tokens_n, page_size
    )
    page = tl.load(new_pages + at, mask=new, other=0).to(tl.int64)
    last = tl.load(last_loc + row, mask=live & (new == 0), other=0).to(tl.int64)
    slot = tl.where(new, page * page_size + position % page_size, last + 1 + nth)
    tl.store(out + token, slot.to(out.dtype.element_ty), mask=live)


@_jit
def _extend_rows(
    table, rows, prefix_lens, new_pages, page_start, token_start, out,
    table_width, rows_n, halvings, tokens_n, page_size,
):  # fmt: skip
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
    tl.store(out + token, (page.to(tl.int64) * page_size + within).to(out.dtype.element_ty), mask=live)


@_jit
def _decode(last_loc, new_pages, out, rows_n, page_size):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = row < rows_n
    page = tl.load(new_pages + row, mask=live, other=0).to(tl.int64)
    last = tl.load(last_loc + row, mask=live, other=0).to(tl.int64)
    tl.store(out + row, tl.where(page > 0, page * page_size, last + 1).to(out.dtype.element_ty), mask=live)


@_jit
def _decode_rows(table, rows, seq_lens, new_pages, out, table_width, rows_n, page_size):
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
def _store_words(key_buffer, value_buffer, loc, key, value, width, key_stride, value_stride):
    unit = tl.pointer_type(tl.int64)
    slot = tl.load(loc + tl.program_id(0)).to(tl.int64)
    _copy_token(key.to(unit), key_stride, key_buffer.to(unit), slot, width)
    _copy_token(value.to(unit), value_stride, value_buffer.to(unit), slot, width)


@_jit
def _store_bytes(key_buffer, value_buffer, loc, key, value, width, key_stride, value_stride):
    unit = tl.pointer_type(tl.int8)
    slot = tl.load(loc + tl.program_id(0)).to(tl.int64)
    _copy_token(key.to(unit), key_stride, key_buffer.to(unit), slot, width)
    _copy_token(value.to(unit), value_stride, value_buffer.to(unit), slot, width)


class TritonKernels:
    """See `Kernels`; for tensors on `device`, whichever device is the current one.

    Any thread may use it once it is warm: `_compiled` is only read then.

    A variant's first launch compiles it; later ones hand the arguments straight to what was compiled, which saves the
    better part of a launch's host time.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._compiled: dict[tuple[Any, ...], Any] = {}

    @property
    def variants(self) -> int:
        """Compiled variants so far.  It does not move while serving if `warm_up` named the dtypes in use."""
        return len(self._compiled)

    def extend(
        self,
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
        tokens_n, rows_n = out.shape[0], prefix_lens.shape[0]
        if tokens_n:
            self._launch(
                _extend, ("extend", last_loc.dtype, out.dtype), (-(-tokens_n // TOKENS.value), 1, 1),
                last_loc, prefix_lens, new_pages, page_start, token_start, out,
                rows_n, (rows_n - 1).bit_length(), tokens_n, page_size,
            )  # fmt: skip

    def extend_rows(
        self,
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
        tokens_n, rows_n = out.shape[0], rows.shape[0]
        if tokens_n:
            self._launch(
                _extend_rows, ("extend_rows", out.dtype), (-(-tokens_n // TOKENS.value), 1, 1),
                table, rows, prefix_lens, new_pages, page_start, token_start, out,
                table.shape[1], rows_n, (rows_n - 1).bit_length(), tokens_n, page_size,
            )  # fmt: skip

    def decode(self, last_loc: Tensor, new_pages: Tensor, out: Tensor, page_size: int) -> None:
        """See `Kernels.decode`."""
        rows_n = out.shape[0]
        if rows_n:
            self._launch(
                _decode, ("decode", last_loc.dtype, out.dtype), (-(-rows_n // ROWS.value), 1, 1),
                last_loc, new_pages, out, rows_n, page_size,
            )  # fmt: skip

    def decode_rows(
        self, table: Tensor, rows: Tensor, seq_lens: Tensor, new_pages: Tensor, out: Tensor, page_size: int
    ) -> None:
        """See `Kernels.decode_rows`."""
        rows_n = out.shape[0]
        if rows_n:
            self._launch(
                _decode_rows, ("decode_rows", out.dtype), (-(-rows_n // ROWS.value), 1, 1),
                table, rows, seq_lens, new_pages, out, table.shape[1], rows_n, page_size,
            )  # fmt: skip

    def store_kv(self, key_buffer: Tensor, value_buffer: Tensor, loc: Tensor, key: Tensor, value: Tensor) -> None:
        """See `Kernels.store_kv`."""
        # A kernel rather than two index_copy_: one launch per layer instead of two, in words instead of elements, with
        # either index dtype and any KV dtype.
        tokens_n, width = loc.shape[0], key_buffer.shape[1] * key_buffer.shape[2] * key_buffer.element_size()
        if tokens_n == 0 or width == 0:
            return
        key, value = _dense_tokens(key.to(key_buffer.dtype)), _dense_tokens(value.to(value_buffer.dtype))
        strides = key.stride(0) * key.element_size(), value.stride(0) * value.element_size()
        addresses = key_buffer.data_ptr() | value_buffer.data_ptr() | key.data_ptr() | value.data_ptr()
        in_words = (addresses | width | strides[0] | strides[1]) % WORD == 0
        unit = WORD if in_words else 1
        self._launch(
            _store_words if in_words else _store_bytes, ("store_kv", in_words, loc.dtype),
            (tokens_n, -(-width // (unit * WIDTH.value)), 1),
            key_buffer, value_buffer, loc, key, value, width // unit, strides[0] // unit, strides[1] // unit,
        )  # fmt: skip

    def warm_up(self, index_dtypes: Iterable[torch.dtype]) -> int:
        """Compile and load all variants for slots of these dtypes, int64 or int32; the number of variants so far.

        Launches each verb on scratch tensors.
        """
        one, zero, starts = self._ints([1]), self._ints([0]), self._ints([0, 1])
        table = zero[None]
        kv = torch.zeros(2, 1, WORD + 1, dtype=torch.uint8, device=self.device)
        for index_dtype in index_dtypes:
            out = torch.empty(1, dtype=index_dtype, device=self.device)
            for last_loc in (one, one.long()):
                self.extend(last_loc, one, one + 1, zero, starts, starts, out, 16)
                self.decode(last_loc, zero, out, 16)
            self.extend_rows(table, zero, one, one + 1, zero, starts, starts, out, 16)
            self.decode_rows(table, zero, one, zero, out, 16)
            for units in (kv.view(-1)[: 2 * WORD].view(2, 1, WORD), kv):
                self.store_kv(units, units, out.zero_(), units[1:], units[1:])
        return self.variants

    def _ints(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def _launch(self, kernel: Any, variant: tuple[Any, ...], grid: tuple[int, int, int], *arguments: Any) -> None:
        # Triton launches on the current device.
        if self.device.type == "cuda" and self.device.index != torch.cuda.current_device():
            with torch.cuda.device(self.device):
                self._launch(kernel, variant, grid, *arguments)
            return
        compiled = self._compiled.get(variant)
        if compiled is not None:
            compiled[grid](*arguments)
            return
        # False is what all these kernels need, and spares the host a warning about what the default will be.
        compiled = kernel[grid](*arguments, enable_fp_fusion=False)
        if compiled is not None:  # None: Triton's interpreter, which compiles nothing
            self._compiled[variant] = compiled


def _dense_tokens(tokens: Tensor) -> Tensor:
    """`tokens` [T, heads, dim] with each token's elements in one piece; the tokens may lie apart."""
    _, head_stride, stride = tokens.stride()
    return tokens if stride == 1 and head_stride == tokens.shape[2] else tokens.contiguous()
