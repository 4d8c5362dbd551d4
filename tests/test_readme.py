"""The README's Python runs as printed."""

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


def run(block: str, folder: Path) -> list[str]:
    """The words that an example prints."""
    script = folder / "example.py"
    script.write_text(block)
    done = subprocess.run(
        [sys.executable, str(script)], check=False, cwd=folder, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_the_engine_example_runs_as_printed(tmp_path: Path) -> None:
    """Eight tokens, the reason, and a pool that is whole again."""
    *tokens, reason, free, _, _ = run(BLOCKS[0], tmp_path)
    assert len(tokens) == 8
    assert (reason, free) == ("length", "256")


def test_the_memory_example_runs_as_printed(tmp_path: Path) -> None:
    """The second question finds the system prompt, in whole pages."""
    words = run(BLOCKS[1], tmp_path)
    assert words[:3] == ["0", "of", "66"]
    assert words[6:9] == ["64", "of", "66"]


def test_the_allocators_example_runs_as_printed(tmp_path: Path) -> None:
    assert run(BLOCKS[2], tmp_path) == ["1024"]
