"""`python -m examples.openai_server`, as a person starts and stops it."""

import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from examples.openai_server.__main__ import greeting, loaded, parsed
from examples.openai_server.text import ByteTokenizer
from tests.examples.openai_server.made import events

ROOT = Path(__file__).resolve().parents[3]


def test_b33_sigterm_lets_a_stream_finish() -> None:
    """What is printed works, and the stream that runs when the signal comes has its end mark."""
    command = [sys.executable, "-m", "examples.openai_server", "--model", "toy", "--port", "0"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = next(line for line in process.stdout if "curl" in line)
            _, _, url, _, _, _, body = shlex.split(line)
            with httpx.stream("POST", url, content=body, verify=False) as answer:
                lines = answer.iter_lines()
                said = [next(lines)]
                before = time.monotonic()
                process.send_signal(signal.SIGTERM)
                said += lines
            assert events("\n".join(said) + "\n")[-1]["choices"][0]["finish_reason"] == "length"
            assert said[-2] == "data: [DONE]"
            # uvicorn hands the signal on once all is done, for whoever started the process.
            assert process.wait(10) in (0, -signal.SIGTERM)
            assert time.monotonic() - before < 6
        finally:
            process.kill()


def test_toy_takes_the_place_of_a_model_that_cannot_be_had(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("KVLOOM_CACHE", str(tmp_path / "file"))  # no folder: nothing can be written to it
    runner, tokenizer, name = loaded(parsed([]).model, "cpu")
    assert name == "toy"
    assert runner.spec.eos_ids == (256,)
    assert isinstance(tokenizer, ByteTokenizer)
    assert "toy that recites one text answers instead" in capsys.readouterr().out


def test_greeting_survives_a_shell() -> None:
    line = next(line for line in greeting("http://127.0.0.1:8000", "it's").splitlines() if "curl" in line)
    assert '"model": "it\'s"' in shlex.split(line)[-1]
