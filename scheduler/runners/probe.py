"""Can this model be served right?  Asked of the model itself, by one forward pass of two tokens.

Families of models differ in what they pass to their attention, and a config does not always say it.  So the trial pass
records what each layer asks for, and anything that paged attention would not honour is refused by name, when the
runner is made: a refusal is better than wrong tokens.
"""

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from kvloom.allocator import PoolSpec
from kvloom.scheduler.errors import InvalidConfig, RunnerFailed
from kvloom.scheduler.runners.attention import STEP, AttentionCall

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
# Tensors that a model may pass to its attention without meaning anything that we leave out.
HARMLESS = frozenset({"cache_position", "position_ids"})


def refuse(why: str) -> NoReturn:
    """Raises `InvalidConfig`."""
    raise InvalidConfig(f"TransformersRunner cannot serve this model right: {why}")


@dataclass(frozen=True, slots=True)
class LayerShape:
    """KV of one layer as its attention was handed it, and the window that it will ever feel."""

    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    window: int | None


class ProbeStep:
    """Stands in for a step: notes what each layer asks for, and answers with zeros."""

    def __init__(self, config: "PretrainedConfig", max_seq: int) -> None:
        self._config = config
        self._max_seq = max_seq
        self.layers: dict[int, LayerShape] = {}

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """[1, T, H, dim].  Raises `InvalidConfig` for what paged attention would not honour."""
        layer = getattr(call.module, "layer_idx", None)
        if not isinstance(layer, int):
            refuse(f"{type(call.module).__name__} does not say which layer it is (layer_idx)")
        if layer in self.layers:
            refuse(f"layer {layer} attends more than once in a pass")
        if call.key.shape != call.value.shape or call.query.shape[1] % call.key.shape[1]:
            refuse(f"layer {layer} has K {tuple(call.key.shape)}, V {tuple(call.value.shape)}: one shape is stored")
        for feature in _unsupported(call):
            refuse(f"layer {layer} uses {feature}")
        asked, wanted = self._felt(call.window), self._felt(window_of(self._config, layer))
        if asked != wanted:
            refuse(f"layer {layer} asks for a window of {asked}, its config says {wanted}")
        self.layers[layer] = LayerShape(call.key.shape[1], call.key.shape[3], call.key.dtype, asked)
        return call.value.new_zeros((1, call.query.shape[2], call.query.shape[1], call.value.shape[3]))

    def _felt(self, window: int | None) -> int | None:
        return None if window is None or window >= self._max_seq else window


def _unsupported(call: AttentionCall) -> Iterator[str]:
    if call.mask is not None:
        yield "a mask of its own"
    if getattr(call.module, "sinks", None) is not None or call.options.get("s_aux") is not None:
        yield "attention sinks"
    if call.options.get("is_causal", True) is False or getattr(call.module, "is_causal", True) is False:
        yield "attention to later tokens"
    for name, value in call.options.items():
        if isinstance(value, torch.Tensor) and name not in HARMLESS:
            yield f"the attention option {name!r}"


def window_of(config: "PretrainedConfig", layer: int) -> int | None:
    """The window that `config` gives a layer, None where it sees everything."""
    window: int | None = getattr(config, "sliding_window", None)
    layer_types = getattr(config, "layer_types", None)
    if layer_types is None:
        return window
    return window if layer_types[layer] == "sliding_attention" else None


def check_kind(config: "PretrainedConfig", model: "PreTrainedModel") -> None:
    """Refuse what can be told without running the model.  Raises `InvalidConfig`."""
    if config.is_encoder_decoder:
        refuse("it is an encoder-decoder model")
    if getattr(model, "_is_stateful", False):
        refuse("it keeps state beside KV (a state-space or recurrent model)")
    if "position_ids" not in inspect.signature(model.forward).parameters:
        refuse("it counts positions itself (its forward takes no position_ids)")
    if other := set(getattr(config, "layer_types", None) or ()) - LAYER_TYPES:
        refuse(f"it has layers of type {', '.join(sorted(other))}")
    if getattr(config, "num_kv_shared_layers", 0):
        refuse("some of its layers read the KV of others")


def check_rope(config: "PretrainedConfig", max_seq: int) -> None:
    """Refuse a RoPE that adapts itself to the longest sequence at hand.  Raises `InvalidConfig`."""
    limit = _rope_limit(config)
    if limit is not None and max_seq > limit:
        refuse(
            f"beyond {limit} tokens its position embedding changes with the longest sequence of a batch; "
            f"max_seq={limit} can be served"
        )


def _rope_limit(config: "PretrainedConfig") -> int | None:
    """Up to which length the RoPE stays the same; None: it never changes."""
    parameters: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    # A hybrid model has one set of them per layer type.
    for rope in (parameters, *(value for value in parameters.values() if isinstance(value, dict))):
        kind = str(rope.get("rope_type", ""))
        if kind == "longrope" or "dynamic" in kind:
            limit: int = rope.get("original_max_position_embeddings") or config.max_position_embeddings
            return limit
    return None


@torch.no_grad()
def probe(
    model: "PreTrainedModel", config: "PretrainedConfig", max_seq: int, device: torch.device
) -> tuple[PoolSpec, ...]:
    """Run two tokens through `model`, whose config names our attention, and say what KV it needs.

    Layers that look back on everything have the pool "full", those with a window "swa"; either may be missing.

    Raises `InvalidConfig`.
    """
    step = ProbeStep(config, max_seq)
    try:
        logits = call_model(
            model,
            torch.zeros(2, dtype=torch.int32, device=device),
            torch.arange(2, device=device),
            torch.ones(1, dtype=torch.int64, device=device),
            step,
        )
    except InvalidConfig:
        raise
    except RunnerFailed:
        refuse("it does not hand keyword arguments on to its attention")
    except Exception as error:
        raise InvalidConfig(f"TransformersRunner cannot serve this model: a trial pass failed: {error}") from error
    if step.layers.keys() != set(range(config.num_hidden_layers)):
        refuse(
            f"of its {config.num_hidden_layers} layers only {sorted(step.layers)} look their attention up "
            "in transformers' AttentionInterface and hand our step on"
        )
    if logits.shape != (1, config.vocab_size):
        refuse(f"it gave logits of shape {tuple(logits.shape)} for 1 token and {config.vocab_size} words")
    return tuple(_pools(step.layers))


def _pools(shapes: Mapping[int, LayerShape]) -> Iterator[PoolSpec]:
    for name, windowed in (("full", False), ("swa", True)):
        layers = tuple(sorted(layer for layer, shape in shapes.items() if (shape.window is not None) is windowed))
        kinds = {shapes[layer] for layer in layers}
        if len(kinds) > 1:
            refuse(f"its layers in the pool {name!r} differ in their KV: {', '.join(sorted(map(str, kinds)))}")
        for kind in kinds:
            yield PoolSpec(name, layers, kind.kv_heads, kind.head_dim, kind.dtype, kind.window)


def call_model(
    model: "PreTrainedModel",
    token_ids: torch.Tensor,
    positions: torch.Tensor,
    logits_idx: torch.Tensor,
    step: object,
) -> torch.Tensor:
    """Logits [S, V] of the tokens `logits_idx` [S] among `token_ids` [T] at `positions` [T]; no cache but ours."""
    output = model(
        input_ids=token_ids.unsqueeze(0),
        position_ids=positions.unsqueeze(0),
        logits_to_keep=logits_idx,
        use_cache=False,
        return_dict=True,
        **{STEP: step},
    )
    logits: torch.Tensor = output.logits
    return logits[0]
