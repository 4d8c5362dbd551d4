"""Serve an unmodified causal language model of Hugging Face transformers on paged KV.

The model's weights, layers and forward pass are its own; only its attention is ours, looked up by name in transformers'
`AttentionInterface` (https://huggingface.co/docs/transformers/attention_interface).  All rows of a step go through the
model as one packed line of tokens, each with its own position.

That registry is global to the process: making the first runner adds one name of ours to it, for good.  What else is
changed is this model's config (which attention it uses) and its training flag, and `close` puts both back.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from transformers import AttentionInterface, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from kvloom.allocator import Batch, HostArrays, KVCache
from kvloom.scheduler.errors import InvalidConfig
from kvloom.scheduler.runners.attention import NAME, PagedAttention, attention_function
from kvloom.scheduler.runners.base import RunnerSpec, StepOutput
from kvloom.scheduler.runners.probe import call_model, check_kind, check_rope, probe, refuse

WARMUP_TOKENS_CPU = 16  # a CPU has nothing to compile or to run out of; larger steps would only take time


class TransformersRunner:
    """Runs `model`, whatever device it is on, and returns logits: the engine samples.

    Served: decoder-only models that honour `AttentionInterface`, with full or sliding-window attention or a mix of
    both, grouped heads, and soft-capped scores.  By the model's own config each layer's KV is in the pool "full" or
    "swa"; the layers of a pool keep KV of one shape.

    `max_seq` is the longest sequence, by default all that the model was made for.

    Raises `InvalidConfig`, with the reason, for a model that could not be served right; the model is as before then.
    """

    def __init__(self, model: PreTrainedModel, *, max_seq: int | None = None) -> None:
        self._model = model
        self._pools: dict[str, KVCache] = {}
        if any(each._attn_implementation == NAME for each in _configs(model.config)):
            raise InvalidConfig("this model has a TransformersRunner already; close that one first")
        config = model.config.get_text_config(decoder=True)
        check_kind(config, model)
        max_seq = _max_seq(config, max_seq)
        check_rope(config, max_seq)
        device = _device(model)
        self._restore: list[tuple[PretrainedConfig, Any]] | None = [
            (each, each._attn_implementation) for each in _configs(model.config)
        ]
        self._training = model.training
        AttentionInterface.register(NAME, attention_function)
        try:
            model.config._attn_implementation = NAME
            model.train(False)  # no dropout
            pools = probe(model, config, max_seq, device)
        except BaseException:
            self.close()
            raise
        self._spec = RunnerSpec(
            vocab_size=config.vocab_size,
            max_seq=max_seq,
            eos_ids=_eos_ids(model, config),
            pools=pools,
            device=device,
            needs=frozenset({"page_table"}),
        )
        self._pool_of = {layer: pool.name for pool in pools for layer in pool.layers}

    @classmethod
    def from_pretrained(
        cls,
        path_or_id: str,
        device: str | torch.device = "cpu",
        dtype: torch.dtype | None = None,
        *,
        max_seq: int | None = None,
        **kwargs: Any,
    ) -> Self:
        """Load a checkpoint, from a folder or a hub, and run it on `device`.

        `dtype` None: the one it was saved in.  `kwargs` go to `AutoModelForCausalLM.from_pretrained`.
        Raises `InvalidConfig`, and what transformers raises for a checkpoint it cannot load.
        """
        # Any: what transformers declares for `to` leaves out the device.
        model: Any = AutoModelForCausalLM.from_pretrained(path_or_id, dtype=dtype or "auto", **kwargs)
        return cls(model.to(device), max_seq=max_seq)

    @property
    def spec(self) -> RunnerSpec:
        """The pool "full", or "swa", or both."""
        return self._spec

    def attach(self, pools: Mapping[str, KVCache]) -> None:
        """Raises `InvalidConfig` if a pool is missing, when attached already, or closed."""
        if self._restore is None or self._pools:
            raise InvalidConfig("a TransformersRunner serves one engine, and lets go of its model then; make a new one")
        wanted = [pool.name for pool in self._spec.pools]
        if not pools.keys() >= set(wanted):
            raise InvalidConfig(f"TransformersRunner needs the pools {wanted}, got {sorted(pools)}")
        self._pools = {name: pools[name] for name in wanted}

    def warmup(self, max_rows: int, max_tokens: int) -> None:
        """Runs one step of each kind, as large as they get where that can show a lack of memory; all into slot 0."""
        if self._spec.device.type == "cpu":
            max_rows, max_tokens = min(max_rows, WARMUP_TOKENS_CPU), min(max_tokens, WARMUP_TOKENS_CPU)
        self.forward(_empty_step(self._spec, [1] * max_rows, decode_rows=max_rows))
        whole, rest = divmod(max_tokens, self._spec.max_seq)
        self.forward(_empty_step(self._spec, [self._spec.max_seq] * whole + [rest] * (rest > 0), decode_rows=0))

    @torch.no_grad()
    def forward(self, batch: Batch) -> StepOutput:
        """`logits` [S, V] in the dtype of the model.  Raises `InvalidConfig` before `attach` or after `close`."""
        if not self._pools:
            raise InvalidConfig("TransformersRunner.forward needs KV storage: call attach first")
        step = PagedAttention(batch, self._pools, self._pool_of)
        logits_idx = batch.logits_idx.long()
        return StepOutput(logits=call_model(self._model, batch.token_ids, batch.positions.long(), logits_idx, step))

    def close(self) -> None:
        """Gives the model back as it came, and lets go of the KV storage.  Closing twice does nothing."""
        self._pools = {}
        if self._restore is None:
            return
        for config, implementation in self._restore:
            config._attn_implementation = implementation
        self._model.train(self._training)
        self._restore = None


def _configs(config: PretrainedConfig) -> Iterator[PretrainedConfig]:
    """A config and those in it, the outer ones first: setting an outer one sets the inner ones too."""
    yield config
    for name in config.sub_configs:
        inner = getattr(config, name, None)
        if inner is not None:
            yield from _configs(inner)


def _max_seq(config: PretrainedConfig, asked: int | None) -> int:
    made_for: int | None = getattr(config, "max_position_embeddings", None)
    if asked is None:
        if made_for is None:
            refuse("its config has no max_position_embeddings; max_seq must be given")
        return made_for
    if asked < 1 or (made_for is not None and asked > made_for):
        raise InvalidConfig(f"max_seq={asked} must be from 1 to the model's max_position_embeddings={made_for}")
    return asked


def _device(model: PreTrainedModel) -> torch.device:
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) != 1 or (device := devices.pop()).type == "meta":
        refuse("its weights must be on one device, and loaded")
    return device


def _eos_ids(model: PreTrainedModel, config: PretrainedConfig) -> tuple[int, ...]:
    """What ends a sequence: the generation config knows more of them than the model's own."""
    generation = getattr(model, "generation_config", None)
    found = getattr(generation, "eos_token_id", None)
    if found is None:
        found = getattr(config, "eos_token_id", None)
    if found is None:
        return ()
    return (found,) if isinstance(found, int) else tuple(int(token) for token in found)


@dataclass(frozen=True, slots=True)
class _Nameless:
    request_ids: Sequence[str]


def _empty_step(spec: RunnerSpec, lens: list[int], decode_rows: int) -> Batch:
    """A step of new rows, all tokens 0, whose KV goes to the dump slot; every row is sampled."""
    rows, tokens = len(lens), sum(lens)
    q_lens = np.array(lens, np.int32)
    q_start = np.concatenate(([0], np.cumsum(q_lens))).astype(np.int32)
    zeros = np.zeros(max(rows, tokens), np.int32)
    host = HostArrays(
        token_ids=zeros[:tokens],
        token_src=zeros[:tokens] - 1,
        positions=np.concatenate([np.arange(length, dtype=np.int32) for length in lens]),
        row_slot=zeros[:rows],
        prefix_lens=zeros[:rows],
        q_lens=q_lens,
        seq_lens=q_lens,
        q_start=q_start,
        sample_rows=np.arange(rows, dtype=np.int32),
        logits_idx=q_start[1:] - 1,
    )
    return Batch(
        step=0,
        decode_rows=decode_rows,
        host=host,
        device=spec.device,
        pad_slot=0,
        out_loc={pool.name: torch.zeros(tokens, dtype=torch.int64, device=spec.device) for pool in spec.pools},
        page_table={
            pool.name: torch.zeros((rows, max(lens)), dtype=torch.int32, device=spec.device) for pool in spec.pools
        },
        names=_Nameless([""] * rows),
    )
