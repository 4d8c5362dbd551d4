"""`python -m examples.openai_server`: a model behind an OpenAI-compatible API, on this machine only unless told else.

There is no authentication: put a gateway in front before you give `--host` another address.
"""

import argparse
import json
import math
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import uvicorn

from examples.openai_server.app import create_app
from examples.openai_server.serving import DrainingServer
from examples.openai_server.text import ByteTokenizer, HFTokenizer, Tokenizer
from examples.smollm2 import ModelUnavailable, ensure_model
from kvloom.allocator import InvalidArgument, KVMemory
from kvloom.metrics import instrument
from kvloom.scheduler import Engine, InvalidConfig, SchedulerConfig
from kvloom.scheduler.runners import ToyRunner

if TYPE_CHECKING:
    from kvloom.scheduler.runners import ModelRunner

TOY, SMOLLM2 = "toy", "smollm2"
TOY_STEP_SECONDS = 0.02  # slow enough to watch


def main(arguments: Sequence[str] | None = None) -> None:
    """Load the model, then serve until told to stop."""
    options = parsed(arguments)
    runner, tokenizer, name = loaded(options.model, options.device)
    name = options.name or name
    try:
        memory = KVMemory.for_runner(
            runner, capacity_tokens=options.capacity_tokens, page_size=options.page_size, max_rows=options.max_running
        )
        engine = Engine(runner, memory, limits(options))
    except (InvalidArgument, InvalidConfig) as error:
        raise SystemExit(f"error: {error}") from error
    app = create_app(
        engine,
        tokenizer,
        model_name=name,
        collector=instrument(engine, model=name),
        deadline_seconds=options.deadline_seconds,
        drain_seconds=options.drain_seconds,
    )
    config = uvicorn.Config(
        app,
        host=options.host,
        port=options.port,
        # One: the engine lives in this process, and a second worker would load the model again, beside a memory of its
        # own.  For several devices start several servers, behind a balancer that asks /ready.
        workers=1,
        log_level="warning",
        # The engine ends what is left after the drain time; the second on top is for the last events to go out.
        timeout_graceful_shutdown=math.ceil(options.drain_seconds) + 1,
    )
    server = DrainingServer(
        config, engine, options.drain_seconds, ready=lambda url: print(greeting(url, name), flush=True)
    )
    server.run_until_told()


def limits(options: argparse.Namespace) -> SchedulerConfig:
    """What the scheduler is told.  A step has room for a token of every running request, and for prompts beside."""
    return SchedulerConfig(
        max_running=options.max_running,
        max_waiting=options.max_waiting,
        max_batch_tokens=max(2048, 2 * options.max_running),
        steps_in_flight_max=options.steps_in_flight,
    )


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.openai_server",
        description="Serve a model over an OpenAI-compatible API.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="there is no authentication: think before you change it")
    add("--port", type=int, default=8000, help="0: any that is free")
    add("--model", default=SMOLLM2, help=f"{SMOLLM2}, {TOY} (no model at all), or a folder in Hugging Face format")
    add("--name", help="what clients call the model; by default its own name")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="for a folder")
    add("--capacity-tokens", type=int, default=16384, help="tokens that the KV memory holds")
    add("--page-size", type=int, default=16, help="tokens in a page of it")
    add("--max-running", type=int, default=64, help="requests that run at once")
    add("--max-waiting", type=int, default=256, help="requests that wait; more are refused with 429")
    add("--steps-in-flight", type=int, default=1, choices=(1, 2), help="2: plan the next step while one runs")
    add("--deadline-seconds", type=float, help="longest that a request may take")
    add("--drain-seconds", type=float, default=10.0, help="how long requests may go on after SIGTERM")
    options = parser.parse_args(arguments)
    if not 0 <= options.port < 2**16:
        parser.error(f"--port {options.port}: ports run from 0 to {2**16 - 1}")
    if not 0 <= options.drain_seconds < math.inf:
        parser.error(f"--drain-seconds {options.drain_seconds}: a number of seconds from 0 up")
    if options.model not in (SMOLLM2, TOY) and not Path(options.model).is_dir():
        parser.error(f"--model {options.model}: no such folder, and neither {SMOLLM2} nor {TOY}")
    return options


def loaded(model: str, device: str) -> "tuple[ModelRunner, Tokenizer, str]":
    """Runner, tokenizer and name of what `--model` asks for."""
    if model == SMOLLM2:
        try:
            model = str(ensure_model(report=lambda line: print(line, flush=True)))
        except ModelUnavailable as error:
            print(f"{error} A toy that recites one text answers instead.", flush=True)
            model = TOY
    if model == TOY:
        # Byte 256 is none: it ends an answer.
        return ToyRunner(vocab_size=257, eos_ids=(256,), step_seconds=TOY_STEP_SECONDS), ByteTokenizer(), TOY

    from transformers import AutoTokenizer, PreTrainedTokenizerFast  # noqa: PLC0415 - optional, and takes seconds

    from kvloom.scheduler.runners import TransformersRunner  # noqa: PLC0415

    tokenizer = AutoTokenizer.from_pretrained(model)
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise SystemExit(f"{model}: its tokenizer is no fast one, and others are not supported.")
    return TransformersRunner.from_pretrained(model, device), HFTokenizer(tokenizer), Path(model).resolve().name


def greeting(url: str, name: str) -> str:
    """What to do now."""
    body = {"model": name, "messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 48, "stream": True}
    data = shlex.quote(json.dumps(body))
    return (
        f"Serving {name}.  Try:\n\n"
        f"  curl -N {url}/v1/chat/completions -H 'Content-Type: application/json' -d {data}\n\n"
        f"Metrics are at {url}/metrics.  Ctrl-C stops."
    )


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:  # while it loads; once it serves, the server handles it
        raise SystemExit(130) from None
