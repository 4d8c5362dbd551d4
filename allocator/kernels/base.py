"""The verbs that touch index tensors: a table of functions, one set per kind of device.

The host plans and the device executes: page ids, counts and offsets come from the host ledger, so a kernel never
looks for a free page and never re-reads its neighbours' lengths.  `torch_kernels.py` is the specification; the others
must give the same tensors.
"""

from typing import Protocol

from torch import Tensor


class Kernels(Protocol):
    """One set of kernels.  All tensors on one device, contiguous; none of these synchronises.

    N rows, T tokens, S = `page_size` slots a page.  Row `i` has `prefix_lens[i]` tokens and grows to `seq_lens[i]`
    (int32 [N]; growing by nothing is fine).  Its new pages are `new_pages[page_start[i]:page_start[i + 1]]` (int32 [M];
    page_start int32 [N + 1] from 0 to M), one for each page index from `ceil(prefix / S)` up to `ceil(seq / S) - 1`.
    Its slots go to `out[token_start[i]:token_start[i + 1]]` (int64 or int32 [T]; token_start int32 [N + 1] from 0 to T,
    growing by `seq_lens[i] - prefix_lens[i]`).

    The caller has checked all of this: on a device nothing here can raise.  Slots are computed in int64; whether they
    fit an int32 `out` is the caller's to know.  Batches without rows or tokens are fine and change nothing.
    """

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
        """Slots of the new tokens of rows known by their last slot.

        last_loc int64 or int32 [N]: slot of the last token, -1 if none; read only where the last page has room.
        Mutates `out`.
        """

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
        """The same for lines of a page table, which know the pages of the tokens that are there.

        table int32 [R, P], rows int32 [N] distinct, all `seq_lens` at most P * S.
        Mutates `out`, and in `table` the entries of the new pages and no others.
        """

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
        """`extend_rows` for a batch whose size only the device knows, as when a graph replays the launch.

        sizes int32 [3]: how many rows grow, `k`; `(k - 1).bit_length()`, which is how often they can be halved; by how
        many tokens they grow, all together.  They are the first `k` of `rows`; behind them token_start stays at its
        last, and what the others say is not asked for (a row that could be one, of a length that it could have).
        N and M are at least 1; `new_pages` may be longer than what is new, `out` [T] longer than the tokens: slots
        behind them are 0.
        Mutates `out`, and in `table` the entries of the new pages and no others.
        """

    def decode(self, last_loc: Tensor, new_pages: Tensor, out: Tensor, page_size: int) -> None:
        """One token per row: `last_loc + 1`, or the first slot of page `new_pages[i]` where that is above 0.

        last_loc int64 or int32 [N], new_pages int32 [N].  Mutates `out` [N].
        """

    def decode_rows(
        self, table: Tensor, rows: Tensor, seq_lens: Tensor, new_pages: Tensor, out: Tensor, page_size: int
    ) -> None:
        """One token per row, at position `seq_lens[i] - 1`; page `new_pages[i]`, if above 0, enters the table first.

        table int32 [R, P]; rows, seq_lens (from 1 up), new_pages int32 [N].  Rows are distinct, but for rows without a
        new page: padding may name one line any number of times, and with `seq_lens` 1 on a line of zeros gets slot 0.
        Mutates `out` [N], and in `table` the entries of the new pages and no others.
        """

    def store_kv(self, key_buffer: Tensor, value_buffer: Tensor, loc: Tensor, key: Tensor, value: Tensor) -> None:
        """Write `key` and `value` [T, heads, dim] to slots `loc` (int64 or int32 [T]) of buffers [slots, heads, dim].

        Both are cast to the buffers' dtype; tokens may lie apart (a slice of a fused projection).  Where `loc` names a
        slot twice (the dump slot of padding) either may stay.  Mutates both buffers.
        """
