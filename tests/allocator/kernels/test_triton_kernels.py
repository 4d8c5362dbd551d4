"""The Triton kernels under Triton's interpreter.

`triton.jit` reads TRITON_INTERPRET when a kernel is defined, and the answer sticks to the process: a kernel defined
under it never compiles, and one defined before never interprets.  So the interpreted tests are in `interpreted.py`,
a name that pytest does not collect by itself, and run in a process of their own; here nothing is set and nothing
of triton is imported.  The same comparisons run compiled on a device, in `tests/gpu`.
"""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed here")
def test_under_the_interpreter() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment["TRITON_INTERPRET"] = "1"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / "interpreted.py")]
    answer = subprocess.run(
        command, cwd=HERE.parents[2], env=environment, capture_output=True, text=True, check=False, timeout=110
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
