"""The public surface is a list: what it says can be imported, and nothing public stands beside it."""

import ast
import importlib
import subprocess
import sys
import tomllib
import types
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("allocator", "metrics", "scheduler")
INIT_FILES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("__init__.py"))

# What other tools rely on. Names may be added to a package; none of these may go.
PROMISED = {
    "kvloom.allocator": {
        "AscendPagedTokenToKVPoolAllocator",
        "BaseTokenToKVPoolAllocator",
        "KVCache",
        "KVMemory",
        "MHATokenToKVPool",
        "MLATokenToKVPool",
        "PagedTokenToKVPoolAllocator",
        "RequestTable",
        "SWAKVPool",
        "SWATokenToKVPoolAllocator",
        "TokenToKVPoolAllocator",
    },
    "kvloom.metrics": {"KVLoomCollector", "instrument"},
    "kvloom.scheduler": {"Engine", "FinishReason", "Request", "SamplingParams", "SchedulerConfig", "SchedulerCore"},
    "kvloom.scheduler.runners": {"ModelRunner", "ToyRunner", "TransformersRunner"},
}

# What importing a package must not load: optional libraries, and packages it may not know.
NOT_LOADED = {
    "kvloom.allocator": ("kvloom.metrics", "kvloom.scheduler", "transformers"),
    "kvloom.metrics": ("transformers",),
    "kvloom.scheduler": ("kvloom.allocator", "kvloom.metrics", "transformers"),
    "kvloom.scheduler.runners": ("kvloom.metrics", "transformers"),
}


@pytest.mark.parametrize("name", PROMISED)
def test_promised_names_are_there(name: str) -> None:
    assert PROMISED[name] - set(importlib.import_module(name).__all__) == set()


@pytest.mark.parametrize("name", PROMISED)
def test_every_listed_name_can_be_imported(name: str) -> None:
    module = importlib.import_module(name)
    listed: list[str] = module.__all__
    assert sorted(set(listed)) == sorted(listed), "a name is listed twice"
    assert [entry for entry in listed if not hasattr(module, entry)] == []


@pytest.mark.parametrize("name", PROMISED)
def test_nothing_public_is_unlisted(name: str) -> None:
    module = importlib.import_module(name)
    public = {
        entry
        for entry, value in vars(module).items()
        if not entry.startswith("_") and not isinstance(value, types.ModuleType) and entry != "TYPE_CHECKING"
    }
    assert public - set(module.__all__) == set()


@pytest.mark.parametrize("name", NOT_LOADED)
def test_importing_loads_no_more_than_needed(name: str) -> None:
    """In a process of its own: here, other tests have loaded everything."""
    program = f"import sys, {name}; print(*[m for m in {NOT_LOADED[name]!r} if m in sys.modules])"
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.strip() == ""


@pytest.mark.parametrize("path", INIT_FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_an_init_file_is_a_list(path: Path) -> None:
    """Docstring, imports, `__all__`; a `__getattr__` may import late what needs an optional library."""
    body = ast.parse(path.read_text(encoding="utf-8")).body
    odd = [f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)[:60]}" for node in body if not listing(node)]
    assert not odd, "\n" + "\n".join(odd)


def listing(node: ast.stmt) -> bool:
    match node:
        case ast.Import() | ast.ImportFrom() | ast.Expr(value=ast.Constant(value=str())):
            return True
        case ast.Assign(targets=[ast.Name(id="__all__")]) | ast.FunctionDef(name="__getattr__"):
            return True
        case ast.If(test=ast.Name(id="TYPE_CHECKING"), body=body, orelse=[]):
            return all(listing(inner) for inner in body)
    return False


def test_every_package_is_shipped() -> None:
    """The list in pyproject.toml is by hand: a folder that is not on it is missing from the wheel only."""
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    listed = pyproject["tool"]["setuptools"]["packages"]
    found = {"kvloom." + ".".join(path.relative_to(ROOT).parent.parts) for path in INIT_FILES}
    assert set(listed) == found
    assert all((ROOT / folder / "py.typed").is_file() for folder in FOLDERS)
