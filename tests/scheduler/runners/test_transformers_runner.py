"""Unmodified models on paged KV say, token for token, what they say by themselves; others are refused by name."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    BartConfig,
    BartForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from kvloom.allocator import KVCache, MHATokenToKVPool, PoolSpec
from kvloom.scheduler.errors import InvalidConfig, RunnerFailed
from kvloom.scheduler.runners import TransformersRunner
from kvloom.scheduler.runners.attention import similar_lengths
from tests.models.tiny import MODELS, generated
from tests.scheduler.runners.by_hand import Pages, Row

NEW_TOKENS = 12
SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.25,
    "eos_token_id": None,
    "pad_token_id": 0,
}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Models this small only lose time between two."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module", params=MODELS)
def spoken(request: pytest.FixtureRequest) -> tuple[PreTrainedModel, list[list[int]], list[list[int]]]:
    """A model, prompts from one token to several windows, and what it generates for each alone."""
    model = MODELS[request.param]()
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, model.config.vocab_size, length).tolist() for length in (1, 2, 5, 17, 40, 90)]
    expected = [generated(model, prompt, NEW_TOKENS) for prompt in prompts]
    assert len({token for tokens in expected for token in tokens}) > 10, "a model that repeats itself shows nothing"
    return model, prompts, expected


def pools_for(runner: TransformersRunner, pages: int, page_size: int) -> dict[str, KVCache]:
    """Storage full of NaN: whoever reads a slot that nobody wrote, will show it."""
    pools: dict[str, KVCache] = {}
    for spec in runner.spec.pools:
        pools[spec.name] = pool = MHATokenToKVPool(
            pages * page_size, page_size, spec.dtype, spec.kv_heads, spec.head_dim, len(spec.layers),
            runner.spec.device, layers=spec.layers,
        )  # fmt: skip
        for layer in spec.layers:
            for buffer in pool.get_kv_buffer(layer):
                buffer.fill_(torch.nan)
    return pools


def pages_for(runner: TransformersRunner, count: int, page_size: int) -> Pages:
    return Pages(count, page_size, pools=[spec.name for spec in runner.spec.pools])


def greedy(runner: TransformersRunner, prompts: Sequence[Sequence[int]], page_size: int, chunk: int) -> list[list[int]]:
    """All prompts at once, cut into chunks; rows whose prompt is done decode in the same steps."""
    count = sum(-(-(len(prompt) + NEW_TOKENS) // page_size) for prompt in prompts)
    runner.attach(pools_for(runner, count, page_size))
    pages, rows = pages_for(runner, count, page_size), [Row(slot) for slot in range(len(prompts))]
    outputs: list[list[int]] = [[] for _ in prompts]
    while any(len(tokens) < NEW_TOKENS for tokens in outputs):
        decoding = [i for i, tokens in enumerate(outputs) if 0 < len(tokens) < NEW_TOKENS]
        filling = [i for i, tokens in enumerate(outputs) if not tokens]
        work = [(rows[i], [outputs[i][-1]]) for i in decoding]
        work += [(rows[i], list(prompts[i][rows[i].length : rows[i].length + chunk])) for i in filling]
        ends = [row.length + len(tokens) for row, tokens in work]
        running = decoding + filling
        sampled = [j for j, i in enumerate(running) if ends[j] >= len(prompts[i])]
        logits = runner.forward(pages.batch(work, len(decoding), sampled)).logits
        assert logits is not None
        assert len(logits) == len(sampled)
        for j, token in zip(sampled, logits.argmax(-1).tolist(), strict=True):
            outputs[running[j]].append(token)
    return outputs


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("chunk", [7, 16, 1000])
def test_tokens_equal_those_of_generate(
    spoken: tuple[PreTrainedModel, list[list[int]], list[list[int]]], page_size: int, chunk: int
) -> None:
    model, prompts, expected = spoken
    runner = TransformersRunner(model)
    assert greedy(runner, prompts, page_size, chunk) == expected
    runner.close()


@pytest.mark.parametrize(
    "make",
    [
        lambda: GPT2LMHeadModel(GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=128,
                                           initializer_range=0.25, eos_token_id=None, pad_token_id=0)),
        lambda: Gemma2ForCausalLM(Gemma2Config(**SMALL, sliding_window=6, attn_logit_softcapping=2.0,
                                               query_pre_attn_scalar=8, tie_word_embeddings=False)),
    ],
    ids=["learned positions", "soft-capped scores"],
)  # fmt: skip
def test_other_kinds_of_models(make: Callable[[], PreTrainedModel]) -> None:
    torch.manual_seed(0)
    model = make().train(False)
    model.set_attn_implementation("eager")
    prompts = [np.random.default_rng(length).integers(0, 97, length).tolist() for length in (1, 9, 30)]
    expected = [generated(model, prompt, NEW_TOKENS) for prompt in prompts]
    assert greedy(TransformersRunner(model), prompts, page_size=4, chunk=7) == expected


def test_the_spec_says_what_the_model_is() -> None:
    model = MODELS["gemma3"]()
    model.generation_config.eos_token_id = [3, 5]
    runner = TransformersRunner(model, max_seq=100)
    spec = runner.spec
    assert (spec.vocab_size, spec.max_seq, spec.needs) == (211, 100, frozenset({"page_table"}))
    assert spec.eos_ids == (3, 5)
    assert spec.pools == (
        PoolSpec("full", (2, 5), kv_heads=1, head_dim=16, dtype=torch.float32, window=None),
        PoolSpec("swa", (0, 1, 3, 4), kv_heads=1, head_dim=16, dtype=torch.float32, window=12),
    )
    with pytest.raises(InvalidConfig, match="has a TransformersRunner already"):
        TransformersRunner(model)
    runner.close()
    model.generation_config.eos_token_id = None
    model.config.eos_token_id = 7
    assert TransformersRunner(model).spec.eos_ids == (7,)


@pytest.mark.parametrize(
    ("name", "max_seq", "expected"),
    [
        ("llama", None, [("full", (0, 1), None)]),
        ("mistral", None, [("swa", (0, 1, 2), 10)]),
        ("mistral", 11, [("swa", (0, 1, 2), 10)]),
        ("mistral", 10, [("full", (0, 1, 2), None)]),  # a window that nobody feels
        ("gemma3", 12, [("full", tuple(range(6)), None)]),
    ],
)
def test_layers_with_a_window_have_a_pool_of_their_own(
    name: str, max_seq: int | None, expected: list[tuple[str, tuple[int, ...], int | None]]
) -> None:
    runner = TransformersRunner(MODELS[name](), max_seq=max_seq)
    assert [(pool.name, pool.layers, pool.window) for pool in runner.spec.pools] == expected
    runner.close()


def test_a_step_that_samples_nothing_still_writes_its_kv(
    spoken: tuple[PreTrainedModel, list[list[int]], list[list[int]]],
) -> None:
    model, prompts, expected = spoken
    runner = TransformersRunner(model)
    runner.attach(pools_for(runner, 30, 4))
    pages, row = pages_for(runner, 30, 4), Row(0)
    empty = runner.forward(pages.batch([(row, prompts[4][:39])], 0, [])).logits
    assert empty is not None
    assert empty.shape == (0, model.config.vocab_size)
    logits = runner.forward(pages.batch([(row, prompts[4][39:])], 0, [0])).logits
    assert logits is not None
    assert logits.argmax(-1).tolist() == expected[4][:1]
    runner.close()


def test_another_rows_nan_stays_its_own(spoken: tuple[PreTrainedModel, list[list[int]], list[list[int]]]) -> None:
    """A page is not wiped between owners: what is behind a row's end may be anything."""
    model, prompts, expected = spoken
    runner = TransformersRunner(model)
    assert greedy(runner, prompts[2:5], page_size=16, chunk=1000) == expected[2:5]  # the pool is full of NaN
    runner.close()


def test_warmup_leaves_every_page_alone() -> None:
    runner = TransformersRunner(MODELS["gemma3"](), max_seq=16)
    pools = pools_for(runner, 5, 4)
    runner.attach(pools)
    buffers = [
        buffer
        for pool in runner.spec.pools
        for layer in pool.layers
        for buffer in pools[pool.name].get_kv_buffer(layer)
    ]
    assert len(buffers) == 2 * 6
    for buffer in buffers:
        buffer[:4] = 7
    runner.warmup(max_rows=6, max_tokens=20)
    for buffer in buffers:
        assert buffer[4:].isnan().all()
        assert (buffer[0] != 7).all(), "it ran"


def test_the_model_comes_back_as_it_was() -> None:
    model = MODELS["mistral"]().train(True)
    runner = TransformersRunner(model)
    assert not model.training
    with pytest.raises(RunnerFailed, match="close"):
        model(input_ids=torch.tensor([[1]]))
    runner.close()
    runner.close()
    assert model.training
    assert model.config._attn_implementation == "eager"
    model(input_ids=torch.tensor([[1]]))


def test_forward_needs_storage() -> None:
    runner = TransformersRunner(MODELS["llama"]())
    with pytest.raises(InvalidConfig, match=r"needs the pools \['full'\], got \['other'\]"):
        runner.attach({"other": pools_for(runner, 1, 1)["full"]})
    with pytest.raises(InvalidConfig, match="attach"):
        runner.forward(Pages(1, 1).batch([(Row(0), [1])], 0, [0]))


def test_from_pretrained(tmp_path: Path) -> None:
    model = MODELS["mistral"]()
    model.save_pretrained(tmp_path)
    runner = TransformersRunner.from_pretrained(str(tmp_path), max_seq=50)
    prompt = list(range(20))
    assert greedy(runner, [prompt], 4, 7) == [generated(model, prompt, NEW_TOKENS)]
    half = TransformersRunner.from_pretrained(str(tmp_path), "cpu", torch.bfloat16)
    assert half.spec.pools[0].dtype == torch.bfloat16


def adaptive_rope() -> PreTrainedModel:
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4,
            "original_max_position_embeddings": 64}  # fmt: skip
    return Phi3ForCausalLM(Phi3Config(**SMALL, original_max_position_embeddings=64, rope_parameters=rope))


def half_windowed() -> PreTrainedModel:
    """Its masks have a window of which its attention is not told."""
    experts: dict[str, Any] = {"num_experts": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
    return Qwen2MoeForCausalLM(
        Qwen2MoeConfig(**SMALL, **experts, use_sliding_window=True, sliding_window=6, max_window_layers=1)
    )


REFUSED: dict[str, Callable[[], PreTrainedModel]] = {
    "encoder-decoder": lambda: T5ForConditionalGeneration(T5Config(vocab_size=97, d_model=16, d_ff=16, num_layers=1)),
    "counts positions itself": lambda: BartForCausalLM(
        BartConfig(vocab_size=97, d_model=16, decoder_layers=1, decoder_ffn_dim=16, is_encoder_decoder=False)
    ),
    "state beside KV": lambda: MambaForCausalLM(MambaConfig(vocab_size=97, hidden_size=16, num_hidden_layers=1)),
    "AttentionInterface": lambda: GPTNeoForCausalLM(
        GPTNeoConfig(vocab_size=97, hidden_size=16, num_layers=1, num_heads=2, attention_types=[[["global"], 1]])
    ),
    "attention sinks": lambda: GptOssForCausalLM(GptOssConfig(**SMALL, num_local_experts=2)),
    "one shape is stored": lambda: DeepseekV3ForCausalLM(
        DeepseekV3Config(**{**SMALL, "head_dim": 64, "num_key_value_heads": 4}, first_k_dense_replace=2)
    ),
    "position embedding changes": adaptive_rope,
    "asks for a window of None": half_windowed,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("why", REFUSED)
def test_a_model_that_cannot_be_served_right_is_refused(why: str) -> None:
    model = REFUSED[why]()
    attention = model.config._attn_implementation
    with pytest.raises(InvalidConfig, match=why):
        TransformersRunner(model)
    assert model.config._attn_implementation == attention


@pytest.mark.parametrize("max_seq", [0, 257])
def test_sequences_longer_than_the_model_was_made_for(max_seq: int) -> None:
    with pytest.raises(InvalidConfig, match="max_seq"):
        TransformersRunner(MODELS["llama"](), max_seq=max_seq)


def test_weights_that_are_not_there() -> None:
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**SMALL))
    with pytest.raises(InvalidConfig, match="one device"):
        TransformersRunner(model)


def test_an_adaptive_rope_is_served_up_to_where_it_changes() -> None:
    assert TransformersRunner(adaptive_rope(), max_seq=64).spec.max_seq == 64


@pytest.mark.parametrize("seed", range(20))
def test_decode_rows_are_grouped_by_length(seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = np.exp(rng.uniform(0, 11, rng.integers(1, 300))).astype(np.int32) + 1
    groups = list(similar_lengths(lengths))
    assert sorted(np.concatenate(groups).tolist()) == list(range(len(lengths)))
    assert len(groups) <= 12
    for group in groups:
        longest = lengths[group].max()
        assert (np.maximum(lengths[group], 64) * 2 >= longest).all()


def test_a_runner_is_attached_once() -> None:
    """Its model has its own attention back, which would look across the rows of a batch."""
    runner = TransformersRunner(MODELS["llama"]())
    pools = pools_for(runner, 5, 4)
    runner.attach(pools)
    for _ in range(2):
        with pytest.raises(InvalidConfig, match="serves one engine"):
            runner.attach(pools)
        runner.close()
