"""Attention on paged KV, for models that look their attention function up by name in transformers.

The registry of transformers is global, so there our function goes, under a name of our own; no other name is touched
and a model sees it only while its own config asks for it.  No mask function is registered beside it: for a name without
one, transformers builds no mask, whereas with one it would first look at the positions, which waits for the device.

A step is packed: the tokens of all rows lie in one line, `query` [1, heads, T, dim].  Which slots each row reads is
worked out once per step (and window) and shared by all layers.  Decode rows, one token each, are attended together,
padded to the longest of their kind; each chunk of a prompt is attended by itself.

This is the attention of any device that torch knows: it gathers K and V before it multiplies.  On a GPU a kernel that
reads pages in place saves that copy; it would take the place of `PagedAttention`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import scaled_dot_product_attention

from kvloom.allocator import Batch, KVCache
from kvloom.scheduler.errors import RunnerFailed
from kvloom.scheduler.uploads import to_device

NAME = "kvloom_paged"
STEP = "kvloom_step"  # the keyword that carries our step through the model, down to its attention
SHORT = 64  # decode rows up to this length are padded to each other: smaller groups cost more than they save


@dataclass(slots=True)
class AttentionCall:
    """What a layer asks of its attention: `query` [1, H, T, dim], `key` and `value` [1, KVH, T, dim].

    `window` is the number of positions that a token sees, itself included, or None; `softcap` bends the scores to
    within plus or minus itself (Gemma 2, arXiv:2408.00118); `options` is whatever else the model passed.
    """

    module: torch.nn.Module
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    scaling: float | None
    window: int | None
    softcap: float | None
    options: dict[str, Any]


class Step(Protocol):
    """What a forward pass carries down to its attention layers."""

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """[1, T, H, dim]."""


def attention_function(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **options: Any,  # each family of models passes its own
) -> tuple[torch.Tensor, None]:
    """The function that is registered under `NAME`."""
    step: Step | None = options.pop(STEP, None)
    if step is None:
        raise RunnerFailed("the model belongs to a TransformersRunner: close that before calling the model yourself")
    call = AttentionCall(module, query, key, value, attention_mask, scaling, sliding_window, softcap, options)
    return step.attend(call), None


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Decode rows of similar length: `tokens` are their places among the tokens of the step, N of them.

    `slots` int64 [N, L], each row's own; what is behind its end names its last slot again, so that nobody else's
    numbers come near, and `mask` bool [N, 1, 1, L] leaves it out (None: all are of length L).
    """

    tokens: slice | torch.Tensor
    slots: torch.Tensor
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Chunk:
    """A row's `tokens`, q of them, that read `slots` int64 [L] through `mask` bool [q, L].

    Both None: the chunk reads itself and nothing else, each token up to itself.
    """

    tokens: slice
    slots: torch.Tensor | None
    mask: torch.Tensor | None


class PagedAttention:
    """One step's attention: writes the new tokens' KV into its layer's pool, then lets every token read its row.

    `pool_of` says in which of `pools` each layer has its KV.
    """

    def __init__(self, batch: Batch, pools: Mapping[str, KVCache], pool_of: Mapping[int, str]) -> None:
        self._batch = batch
        self._pools = pools
        self._pool_of = pool_of
        self._reads: dict[tuple[str, int | None], tuple[list[DecodeGroup], list[Chunk]]] = {}

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """[1, T, H, dim]; writes before it reads, for decode rows read their own token from the pool."""
        layer: Any = call.module.layer_idx
        query, key, value = call.query[0], call.key[0], call.value[0]
        name = self._pool_of[layer]
        pool = self._pools[name]
        pool.set_kv_buffer(layer, self._batch.out_loc[name], key.transpose(0, 1), value.transpose(0, 1))
        keys, values = pool.get_kv_buffer(layer)
        groups, chunks = self._reads_of(name, call.window)
        heads, tokens, _ = query.shape
        out = query.new_empty((tokens, heads, value.shape[-1]))
        for group in groups:
            out[group.tokens] = _attend_group(query, keys, values, group, call)
        for chunk in chunks:
            out[chunk.tokens] = _attend_chunk(call, keys, values, chunk)
        return out.unsqueeze(0)

    def _reads_of(self, pool: str, window: int | None) -> tuple[list[DecodeGroup], list[Chunk]]:
        reads = self._reads.get((pool, window))
        if reads is None:
            page_size, table = self._pools[pool].page_size, self._batch.page_table[pool]
            groups = list(_decode_groups(self._batch, table, page_size, window))
            reads = groups, list(_chunks(self._batch, table, page_size, window))
            self._reads[pool, window] = reads
        return reads


def _decode_groups(batch: Batch, table: torch.Tensor, page_size: int, window: int | None) -> Iterator[DecodeGroup]:
    seq_lens = batch.host.seq_lens[: batch.decode_rows]
    read_lens = seq_lens if window is None else np.minimum(seq_lens, window)
    for rows in similar_lengths(read_lens):
        lens = read_lens[rows]
        index = slice(0, len(rows)) if len(rows) == batch.decode_rows else to_device(rows, batch.device)
        length = int(lens.max())
        ends = batch.seq_lens[index].long().unsqueeze(1)
        reads = torch.arange(length, device=batch.device)
        positions = torch.minimum(reads + (0 if window is None else (ends - window).clamp_min(0)), ends - 1)
        pages = table[index].gather(1, positions // page_size).long()
        same = bool((lens == length).all())
        mask = None if same else reads < (ends if window is None else ends.clamp_max(window))
        yield DecodeGroup(
            index, pages * page_size + positions % page_size, None if mask is None else mask[:, None, None, :]
        )


def similar_lengths(lengths: NDArray[np.int32]) -> Iterator[NDArray[np.intp]]:
    """Split rows into groups in which no length is below half of the longest (short ones count as equally long).

    Padding then at most doubles what is read, and there are few groups however far the lengths lie apart.
    """
    if len(lengths) == 0:
        return
    counted = np.maximum(lengths, SHORT)
    if counted.min() * 2 >= counted.max():
        yield np.arange(len(lengths))
        return
    order = np.argsort(-counted, kind="stable")
    falling = -counted[order]
    start = 0
    while start < len(order):
        stop = int(np.searchsorted(falling, falling[start] // 2, side="right"))
        yield order[start:stop]
        start = stop


def _chunks(batch: Batch, table: torch.Tensor, page_size: int, window: int | None) -> Iterator[Chunk]:
    host, device = batch.host, batch.device
    for row in range(batch.decode_rows, batch.rows):
        tokens = slice(int(host.q_start[row]), int(host.q_start[row + 1]))
        prefix, end = int(host.prefix_lens[row]), int(host.seq_lens[row])
        if prefix == 0 and (window is None or end <= window):
            yield Chunk(tokens, None, None)
            continue
        first = 0 if window is None else max(prefix + 1 - window, 0)
        first_page = first // page_size
        pages = table[row, first_page : -(-end // page_size)].long().unsqueeze(1)
        slots = (pages * page_size + torch.arange(page_size, device=device)).view(-1)
        reads = torch.arange(first, end, device=device)
        places = torch.arange(prefix, end, device=device).unsqueeze(1)
        mask = reads <= places
        if window is not None:
            mask &= reads > places - window
        skipped = first - first_page * page_size
        yield Chunk(tokens, slots[skipped : skipped + end - first], mask)


def _attend_group(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, group: DecodeGroup, call: AttentionCall
) -> torch.Tensor:
    """[N, H, dim]: the heads that share KV stand side by side as queries, so that KV is not repeated for them."""
    rows, length = group.slots.shape
    kv_heads = keys.shape[1]
    asked = query[:, group.tokens].transpose(0, 1).reshape(rows, kv_heads, -1, query.shape[-1])
    flat = group.slots.view(-1)
    key, value = (_gather(buffer, flat).view(rows, length, kv_heads, -1).transpose(1, 2) for buffer in (keys, values))
    return _attend(asked, key, value, group.mask, call, causal=False).reshape(rows, -1, value.shape[-1])


def _attend_chunk(call: AttentionCall, keys: torch.Tensor, values: torch.Tensor, chunk: Chunk) -> torch.Tensor:
    """[q, H, dim]."""
    query = call.query[:, :, chunk.tokens]
    if chunk.slots is None:
        key, value = call.key[:, :, chunk.tokens], call.value[:, :, chunk.tokens]
    else:
        slots = chunk.slots
        key, value = (_gather(buffer, slots).transpose(0, 1).unsqueeze(0) for buffer in (keys, values))
    shared = query.shape[1] // key.shape[1]
    if shared > 1:  # kernels for one chunk want as many heads of KV as of queries
        key, value = key.repeat_interleave(shared, dim=1), value.repeat_interleave(shared, dim=1)
    return _attend(query, key, value, chunk.mask, call, causal=chunk.mask is None)[0].transpose(0, 1)


def _gather(buffer: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """KV of `slots` [N]: [N, KVH, dim].  As a matrix, for on the CPU torch copies its lines twice as fast."""
    return buffer.view(len(buffer), -1).index_select(0, slots).view(-1, *buffer.shape[1:])


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    call: AttentionCall,
    causal: bool,
) -> torch.Tensor:
    """[N, heads, q, dim] from as many heads of `key` and `value` [N, heads, L, dim]."""
    if call.softcap is None:
        return scaled_dot_product_attention(query, key, value, mask, is_causal=causal, scale=call.scaling)
    scaling = query.shape[-1] ** -0.5 if call.scaling is None else call.scaling
    scores = torch.tanh(query @ key.transpose(-1, -2) * (scaling / call.softcap)) * call.softcap
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype) @ value
