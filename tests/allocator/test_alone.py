"""The allocator package is useful alone, on a machine that has torch and numpy and nothing else of what kvloom uses."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_readme import BLOCKS

MISSING = ("triton", "transformers", "safetensors", "gguf", "anyio", "structlog", "prometheus_client")


@pytest.mark.parametrize("missing", [MISSING, ("triton",)], ids=["nothing_else", "all_but_triton"])
def test_the_readmes_example(missing: tuple[str, ...], tmp_path: Path) -> None:
    script = tmp_path / "example.py"
    blocked = f"import sys\nsys.modules.update(dict.fromkeys({missing!r}))  # importing one of these raises\n"
    script.write_text(blocked + BLOCKS[2])
    done = subprocess.run(
        [sys.executable, str(script)], check=False, cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["1024"]
