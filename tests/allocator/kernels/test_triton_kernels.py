"""The Triton kernels without a device: what they compute under Triton's interpreter, and that they compile.

`triton.jit` reads TRITON_INTERPRET when a kernel is defined, and the answer sticks to the process: a kernel defined
under it never compiles, and one defined before never interprets.  So the interpreted tests are in `interpreted.py`,
a name that pytest does not collect by itself, and run in a process of their own; nothing is set in this one.  The
same comparisons run compiled on a device, in `tests/gpu`.
"""

import inspect
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent


pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed here")


def test_under_the_interpreter() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment["TRITON_INTERPRET"] = "1"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / "interpreted.py")]
    answer = subprocess.run(
        command, cwd=HERE.parents[2], env=environment, capture_output=True, text=True, check=False, timeout=110
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr


@pytest.mark.parametrize(
    "name", ["extend", "extend_rows", "extend_step", "decode", "decode_rows", "store_words", "store_bytes"]
)
def test_compiles_for_cuda(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler refuses things that the interpreter lets pass; it needs no device to say so."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from kvloom.allocator.kernels import triton_kernels

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel = getattr(triton_kernels, name)
    wide = {"out": "*i64", "last_loc": "*i64", "loc": "*i64"}
    wide |= dict.fromkeys(("key", "value", "key_buffer", "value_buffer"), "*bf16")
    numbers = {"table_width", "rows_n", "halvings", "tokens_n", "out_n", "page_size"}
    numbers |= {"width", "key_stride", "value_stride"}
    names = inspect.signature(kernel.fn).parameters
    signature = {name: "i32" if name in numbers else wide.get(name, "*i32") for name in names}
    source = ASTSource(fn=kernel, signature=signature, constexprs={}, attrs={})
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"enable_fp_fusion": False})
    assert compiled.asm["cubin"]
