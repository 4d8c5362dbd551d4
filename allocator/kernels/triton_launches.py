"""The Triton kernels as `Kernels`: what is launched, over how many programs, and what is compiled when."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from kvloom.allocator.kernels import triton_kernels
from kvloom.allocator.kernels.triton_kernels import ROWS, TOKENS, WIDTH

WORD = 8  # bytes


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
                triton_kernels.extend, ("extend", last_loc.dtype, out.dtype), (-(-tokens_n // TOKENS.value), 1, 1),
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
                triton_kernels.extend_rows, ("extend_rows", out.dtype), (-(-tokens_n // TOKENS.value), 1, 1),
                table, rows, prefix_lens, new_pages, page_start, token_start, out,
                table.shape[1], rows_n, (rows_n - 1).bit_length(), tokens_n, page_size,
            )  # fmt: skip

    def extend_step(
        self,
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
        out_n = out.shape[0]
        if out_n:
            self._launch(
                triton_kernels.extend_step, ("extend_step", out.dtype), (-(-out_n // TOKENS.value), 1, 1),
                table, sizes, rows, prefix_lens, new_pages, page_start, token_start, out,
                table.shape[1], out_n, page_size,
            )  # fmt: skip

    def decode(self, last_loc: Tensor, new_pages: Tensor, out: Tensor, page_size: int) -> None:
        """See `Kernels.decode`."""
        rows_n = out.shape[0]
        if rows_n:
            self._launch(
                triton_kernels.decode, ("decode", last_loc.dtype, out.dtype), (-(-rows_n // ROWS.value), 1, 1),
                last_loc, new_pages, out, rows_n, page_size,
            )  # fmt: skip

    def decode_rows(
        self, table: Tensor, rows: Tensor, seq_lens: Tensor, new_pages: Tensor, out: Tensor, page_size: int
    ) -> None:
        """See `Kernels.decode_rows`."""
        rows_n = out.shape[0]
        if rows_n:
            self._launch(
                triton_kernels.decode_rows, ("decode_rows", out.dtype), (-(-rows_n // ROWS.value), 1, 1),
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
            triton_kernels.store_words if in_words else triton_kernels.store_bytes, ("store_kv", in_words, loc.dtype),
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
            self.extend_step(table, zero.expand(3).contiguous(), zero, one, one, zero, starts, starts, out, 16)
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
