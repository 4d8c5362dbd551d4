"""Kernels that know what they may touch."""

import torch
from torch import Tensor

from kvloom.allocator.kernels import host_kernels


class WatchedKernels:
    """The host's kernels; each launch is counted, and its arguments must be what `Kernels` says they are."""

    def __init__(self) -> None:
        self.launches = 0

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
        self.launches += 1
        rows = len(last_loc)
        assert len(prefix_lens) == len(seq_lens) == len(page_start) - 1 == len(token_start) - 1 == rows
        pages = -(-seq_lens // page_size) + (-prefix_lens // page_size)
        assert page_start.diff().tolist() == pages.tolist()
        assert token_start.diff().tolist() == (seq_lens - prefix_lens).tolist()
        assert (int(page_start[0]), int(page_start[-1])) == (0, len(new_pages))
        assert (int(token_start[0]), int(token_start[-1])) == (0, len(out))
        assert (new_pages > 0).all()
        out.fill_(-1)
        host_kernels.extend(last_loc, prefix_lens, seq_lens, new_pages, page_start, token_start, out, page_size)
        assert (out >= page_size).all(), "a slot was left out, or lies in the dump page"

    def decode(self, last_loc: Tensor, new_pages: Tensor, out: Tensor, page_size: int) -> None:
        """See `Kernels.decode`."""
        self.launches += 1
        assert len(last_loc) == len(new_pages) == len(out)
        assert torch.equal(new_pages > 0, (last_loc + 1) % page_size == 0)
        host_kernels.decode(last_loc, new_pages, out, page_size)
        assert (out >= page_size).all()
