"""The kernels of the CPU: those of torch, but for the one that runs in each step.

A decode step of a few rows is a dozen operations on tiny arrays, and torch takes two to five microseconds for each,
numpy one.  The tensors and the arrays share their memory.
"""

import numpy as np
from torch import Tensor

from kvloom.allocator.kernels.torch_kernels import decode, extend, extend_rows, store_kv

__all__ = ["decode", "decode_rows", "extend", "extend_rows", "store_kv"]


def decode_rows(table: Tensor, rows: Tensor, seq_lens: Tensor, new_pages: Tensor, out: Tensor, page_size: int) -> None:
    """See `Kernels.decode_rows`."""
    entries, new = table.numpy().reshape(-1), new_pages.numpy()
    position = seq_lens.numpy() - 1
    page_index = position // page_size
    entry = rows.numpy() * np.int64(table.shape[1])
    entry += page_index
    page = np.where(new, new, entries.take(entry))
    entries.put(entry, page)
    # page * page_size + position % page_size, in int64 until the end
    slots = np.subtract(page, page_index, dtype=np.int64)
    slots *= page_size
    slots += position
    out.numpy()[:] = slots
