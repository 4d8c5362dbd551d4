"""Models of three kinds, tiny and random, and what transformers itself generates with them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)

# Wide enough weights that the most likely token depends on the whole context instead of being the same one always.
SPREAD = 0.25


def llama() -> PreTrainedModel:
    """Full attention, two query heads for each head of KV."""
    return _made(
        LlamaForCausalLM,
        LlamaConfig(
            vocab_size=97,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
            tie_word_embeddings=False,
            eos_token_id=None,
            initializer_range=SPREAD,
        ),
    )


def mistral() -> PreTrainedModel:
    """Every layer looks back on 10 positions, which no page size divides."""
    return _made(
        MistralForCausalLM,
        MistralConfig(
            vocab_size=131,
            hidden_size=48,
            intermediate_size=64,
            num_hidden_layers=3,
            num_attention_heads=6,
            num_key_value_heads=2,
            head_dim=8,
            max_position_embeddings=256,
            tie_word_embeddings=False,
            eos_token_id=None,
            sliding_window=10,
            initializer_range=SPREAD,
        ),
    )


def gemma3() -> PreTrainedModel:
    """A hybrid: every third layer sees everything, the others 12 positions."""
    return _made(
        Gemma3ForCausalLM,
        Gemma3TextConfig(
            vocab_size=211,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=6,
            num_attention_heads=4,
            num_key_value_heads=1,
            head_dim=16,
            query_pre_attn_scalar=16,
            max_position_embeddings=256,
            tie_word_embeddings=False,
            eos_token_id=None,
            sliding_window=12,
            layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
            initializer_range=SPREAD,
        ),
    )


MODELS: Mapping[str, Callable[[], PreTrainedModel]] = {"llama": llama, "mistral": mistral, "gemma3": gemma3}


def _made(kind: Callable[..., PreTrainedModel], config: PretrainedConfig) -> PreTrainedModel:
    torch.manual_seed(0)
    model = kind(config)
    model.generation_config.pad_token_id = 0
    model.set_attn_implementation("eager")
    model.train(False)
    return model


@torch.no_grad()
def generated(model: Any, prompt: Sequence[int], max_new_tokens: int) -> list[int]:
    """What the model's own `generate` says, greedily, for one prompt alone."""
    ids = torch.tensor([list(prompt)], device=model.device)
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens, do_sample=False)
    tokens: list[int] = out[0, len(prompt) :].tolist()
    return tokens
