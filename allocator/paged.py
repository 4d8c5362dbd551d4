"""The paged allocator: whole pages from the ledger, slots from the kernels, counts on the host."""

import numpy as np
import torch
from numpy.typing import NDArray

from kvloom.allocator.base import BaseTokenToKVPoolAllocator
from kvloom.allocator.errors import ForeignPage, InvalidArgument
from kvloom.allocator.indices import Ints, host_ints, page_count, starts, whole
from kvloom.allocator.pages import CALLER


class PagedTokenToKVPoolAllocator(BaseTokenToKVPoolAllocator):
    """Pages 1 .. size // page_size of `page_size` slots; page p has slots p * page_size and the following.

    The free list starts in ascending order.  Freed pages go to its front, ascending, and so are taken next.
    Any page size from 1 up works, powers of two or not.
    """

    def alloc(self, need_size: int) -> torch.Tensor | None:
        """Whole pages: slots of the first `need_size / page_size` free pages, page by page, int64 [need_size].

        None when short, and nothing has changed.  Raises InvalidArgument unless a multiple of the page size from 0 up.
        """
        need_size = whole("need_size", need_size)
        if need_size < 0 or need_size % self.page_size:
            raise InvalidArgument(f"need_size={need_size} is not a multiple of page_size={self.page_size} from 0 up")
        pages = self._take(need_size // self.page_size)
        if pages is None:
            return None
        with self._given_back_on_error(pages):
            slots = pages.astype(np.int64)[:, None] * self.page_size + np.arange(self.page_size)
            return self._to_tensor(slots.reshape(-1))

    def alloc_extend(
        self, prefix_lens: Ints, seq_lens: Ints, last_loc: Ints, extend_num_tokens: int
    ) -> torch.Tensor | None:
        """Slots for rows that grow from `prefix_lens[i]` to `seq_lens[i]` tokens, packed row after row.

        last_loc[i] is the slot of the row's last token, -1 if none.  A row first fills its last page, then takes pages
        from the front of the free list, rows in order.  int64 [sum(seq_lens - prefix_lens)]; None when short, and
        nothing has changed.  Raises InvalidArgument when the numbers contradict each other, ForeignPage for a
        `last_loc` in a page that is not held.
        Lengths in device tensors are copied to the host once; on the host they cost no synchronisation.
        """
        tokens = whole("extend_num_tokens", extend_num_tokens)
        prefix, seq = host_ints("prefix_lens", prefix_lens), host_ints("seq_lens", seq_lens)
        last_loc = self._flat(last_loc)
        grown = self._require_growth(prefix, seq, len(last_loc), tokens)
        self._require_last_loc(last_loc, prefix)
        need = page_count(seq, self.page_size) - page_count(prefix, self.page_size)
        pages = self._take(int(need.sum()))
        if pages is None:
            return None
        with self._given_back_on_error(pages):
            out = torch.empty(tokens, dtype=self.index_dtype, device=self.device)
            if tokens:
                sent = self._staging.upload(
                    {
                        "prefix_lens": prefix.astype(np.int32),
                        "seq_lens": seq.astype(np.int32),
                        "new_pages": pages,
                        "page_start": starts(need),
                        "token_start": starts(grown),
                    }
                )
                self._kernels.extend(self._on_device(last_loc), **sent, out=out, page_size=self.page_size)
        return out

    def alloc_decode(self, seq_lens: Ints, last_loc: Ints) -> torch.Tensor | None:
        """One slot per row: the one after `last_loc[i]`, or the first of a new page at a page boundary.

        `seq_lens` already count the new token.  int64 [N]; None when short, and nothing has changed.
        Raises like `alloc_extend`.
        """
        seq = host_ints("seq_lens", seq_lens)
        last_loc = self._flat(last_loc)
        self._require_growth(seq - 1, seq, len(last_loc), len(seq))
        self._require_last_loc(last_loc, seq - 1)
        crossing = (seq - 1) % self.page_size == 0
        pages = self._take(int(np.count_nonzero(crossing)), "decode")
        if pages is None:
            return None
        with self._given_back_on_error(pages):
            out = torch.empty(len(seq), dtype=self.index_dtype, device=self.device)
            if len(seq):
                new_pages = np.zeros(len(seq), np.int32)
                new_pages[crossing] = pages
                sent = self._staging.upload({"new_pages": new_pages})
                self._kernels.decode(self._on_device(last_loc), sent["new_pages"], out, self.page_size)
        return out

    @staticmethod
    def _flat(last_loc: Ints) -> Ints:
        """Checked where that costs no synchronisation."""
        if isinstance(last_loc, torch.Tensor) and last_loc.device.type != "cpu":
            if last_loc.ndim != 1:
                raise InvalidArgument(f"last_loc must be a flat row, got shape {tuple(last_loc.shape)}")
            return last_loc
        return host_ints("last_loc", last_loc)

    def _require_growth(
        self, prefix: NDArray[np.int64], seq: NDArray[np.int64], rows: int, tokens: int
    ) -> NDArray[np.int64]:
        """Tokens by which each row grows, after checking that the arguments agree."""
        if not len(prefix) == len(seq) == rows:
            raise InvalidArgument(f"{len(prefix)} prefix_lens, {len(seq)} seq_lens and {rows} last_loc do not agree")
        grown = seq - prefix
        if len(prefix) and (prefix.min() < 0 or grown.min() < 0):
            row = int(np.flatnonzero((prefix < 0) | (grown < 0))[0])
            raise InvalidArgument(f"row {row} cannot grow from {prefix[row]} to {seq[row]} tokens")
        if len(seq) and seq.max() >= 2**31:
            raise InvalidArgument(f"a row of {seq.max()} tokens; at most {2**31 - 1}")
        if tokens != (total := int(grown.sum())):
            raise InvalidArgument(f"extend_num_tokens={tokens}, but the rows grow by {total}")
        return grown

    def _require_last_loc(self, last_loc: Ints, prefix: NDArray[np.int64]) -> NDArray[np.int64] | None:
        """Last slots on the host must be held and stand where the lengths say; those on the device (None) are trusted.

        Rows may share whole pages, and so a last slot, but not a page with room behind it.  Answers those on the host.
        """
        if isinstance(last_loc, torch.Tensor) and last_loc.device.type != "cpu":
            return None
        last = host_ints("last_loc", last_loc)
        wrong = np.where(prefix > 0, (last < self.page_size) | ((last + 1 - prefix) % self.page_size != 0), last != -1)
        if wrong.any():
            row = int(np.flatnonzero(wrong)[0])
            raise InvalidArgument(f"row {row} of {prefix[row]} tokens cannot end at slot {last[row]}")
        ends = last[prefix > 0]
        self._require_slots(ends)
        loose = self.ledger.holders_of((ends // self.page_size).astype(np.int32)) != CALLER
        if loose.any():
            raise ForeignPage(f"rows end at slots {ends[loose][:8].tolist()}, whose pages are not this caller's")
        partly = (last[prefix % self.page_size != 0] // self.page_size).astype(np.int32)
        if len(self.ledger.distinct(partly)) != len(partly):
            raise InvalidArgument(f"two rows go on in one page; pages {partly[:8].tolist()}")
        return last

    def _on_device(self, values: Ints) -> torch.Tensor:
        if isinstance(values, torch.Tensor):
            return values.to(self.device, self.index_dtype, non_blocking=True).contiguous()
        return self._to_tensor(host_ints("last_loc", values))
