"""The rules of the house, checked on the syntax tree of every file. Each finding names file and line."""

import ast
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("allocator", "metrics", "scheduler")
FOLDERS = (*PACKAGES, "benchmarks", "examples", "tests")

FILE_LINES_MAX = 300
TEST_FILE_LINES_MAX = 400
FUNCTION_LINES_MAX = 50  # less the docstring
PROTOCOL_VERBS_MAX = 7

MUTABLE_LITERALS = (ast.Dict, ast.DictComp, ast.List, ast.ListComp, ast.Set, ast.SetComp)
MUTABLE_MAKERS = frozenset({"Counter", "OrderedDict", "bytearray", "defaultdict", "deque", "dict", "list", "set"})
UNFINISHED = re.compile(r"\b(TO[D]O|FIXM[E]|XX[X])\b")  # the brackets keep this line from finding itself


@dataclass(frozen=True)
class Source:
    path: Path  # relative to the root
    text: str
    tree: ast.Module

    @property
    def in_package(self) -> bool:
        return self.path.parts[0] in PACKAGES


Finding = tuple[int, str]
Rule = Callable[[Source], Iterator[Finding]]


def parse(path: str, text: str) -> Source:
    return Source(Path(path), text, ast.parse(text, path))


@cache
def sources() -> tuple[Source, ...]:
    paths = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
    return tuple(parse(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")) for path in paths)


def last_name(node: ast.expr) -> str:
    """`deque` for `deque`, `collections.deque` and `deque[int]`."""
    while isinstance(node, ast.Subscript):
        node = node.value
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def files_are_short(source: Source) -> Iterator[Finding]:
    limit = TEST_FILE_LINES_MAX if source.path.parts[0] == "tests" else FILE_LINES_MAX
    lines = len(source.text.splitlines())
    if lines > limit:
        yield limit + 1, f"the file has {lines} lines, at most {limit}"


def functions_are_short(source: Source) -> Iterator[Finding]:
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        lines = (node.end_lineno or node.lineno) - node.lineno + 1
        if ast.get_docstring(node, clean=False) is not None:
            lines -= (node.body[0].end_lineno or 0) - node.body[0].lineno + 1
        if lines > FUNCTION_LINES_MAX:
            yield node.lineno, f"{node.name} has {lines} lines without its docstring, at most {FUNCTION_LINES_MAX}"


def imports_are_by_full_name(source: Source) -> Iterator[Finding]:
    for node, name in imported(source.tree):
        if name.partition(".")[0] in PACKAGES:
            yield node.lineno, f"import kvloom.{name}: by its bare name the file would be loaded twice"


def imported(tree: ast.Module) -> Iterator[tuple[ast.stmt, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node, node.module or ""


def names_leave_the_stdlib_alone(source: Source) -> Iterator[Finding]:
    for part in source.path.with_suffix("").parts:
        if part in sys.stdlib_module_names:
            yield 1, f"{part} is a module of Python's own: running a file beside it would import this one instead"


def protocols_are_narrow(source: Source) -> Iterator[Finding]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ClassDef) and "Protocol" in map(last_name, node.bases):
            # Properties are attributes; what an implementer has to write are the verbs.
            verbs = [
                item
                for item in node.body
                if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)
                and "property" not in map(last_name, item.decorator_list)
            ]
            if len(verbs) > PROTOCOL_VERBS_MAX:
                yield node.lineno, f"{node.name} asks for {len(verbs)} verbs, at most {PROTOCOL_VERBS_MAX}"


def nothing_is_mixed_in(source: Source) -> Iterator[Finding]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ClassDef) and node.name.endswith("Mixin"):
            yield node.lineno, f"{node.name}: hold a collaborator instead of mixing one in"


def modules_hold_no_state(source: Source) -> Iterator[Finding]:
    """A lower-case name bound to a container; a table in capitals is a constant, and `__all__` is Python's."""
    if not source.in_package:
        return
    for node in module_level(source.tree.body):
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        made = isinstance(node.value, ast.Call) and last_name(node.value.func) in MUTABLE_MAKERS
        if not made and not isinstance(node.value, MUTABLE_LITERALS):
            continue
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            name = last_name(target)
            if name != name.upper() and not name.startswith("__"):
                yield node.lineno, f"{name} is state of a module: it belongs to an object"


def module_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try | ast.With):
            for inner in (node.body, getattr(node, "orelse", []), getattr(node, "finalbody", [])):
                yield from module_level(inner)


def packages_are_silent(source: Source) -> Iterator[Finding]:
    if not source.in_package:
        return
    for node, name in imported(source.tree):
        if name.partition(".")[0] == "logging":
            yield node.lineno, "logging: what happens goes to observers, structlog stands behind one of them"
    for call in ast.walk(source.tree):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "print":
            yield call.lineno, "print: the terminal belongs to the program that embeds us"


def nothing_is_left_undone(source: Source) -> Iterator[Finding]:
    for number, line in enumerate(source.text.splitlines(), start=1):
        if mark := UNFINISHED.search(line):
            yield number, f"{mark.group()}: do it, or open an issue"


RULES: tuple[Rule, ...] = (
    files_are_short,
    functions_are_short,
    imports_are_by_full_name,
    names_leave_the_stdlib_alone,
    protocols_are_narrow,
    nothing_is_mixed_in,
    modules_hold_no_state,
    packages_are_silent,
    nothing_is_left_undone,
)

# For each rule a file that breaks it, and the line to be named.
OFFENDERS: tuple[tuple[Rule, str, str, int], ...] = (
    (files_are_short, "scheduler/x.py", "\n" * 301, 301),
    (files_are_short, "tests/x.py", "\n" * 401, 401),
    (functions_are_short, "tests/x.py", "def f():\n    '''doc'''\n" + "    pass\n" * 50, 1),
    (imports_are_by_full_name, "tests/x.py", "\nfrom scheduler.core import x", 2),
    (imports_are_by_full_name, "tests/x.py", "def f():\n    import metrics as m", 2),
    (names_leave_the_stdlib_alone, "allocator/token.py", "", 1),
    (names_leave_the_stdlib_alone, "allocator/queue/x.py", "", 1),
    (protocols_are_narrow, "metrics/x.py", "class P(Protocol[T]):\n" + "    def f(self): ...\n" * 8, 1),
    (nothing_is_mixed_in, "examples/x.py", "class RetryMixin: ...", 1),
    (modules_hold_no_state, "scheduler/x.py", "a = 1\n_seen: dict[int, int] = {}", 2),
    (modules_hold_no_state, "scheduler/x.py", "if a:\n    queue = collections.deque[int]()", 2),
    (packages_are_silent, "metrics/x.py", "import logging.config", 1),
    (packages_are_silent, "metrics/x.py", "def f():\n    print()", 2),
    (nothing_is_left_undone, "examples/x.py", "pass  # TO" + "DO later", 1),
)
CLEAN = '''
"""print() and logging in prose are fine."""
TABLE = {1: 2}
__all__ = ["f"]
Vector = list[int]


class P(Protocol):
    @property
    def a(self): ...
'''


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_house_rule(rule: Rule) -> None:
    findings = [f"{source.path}:{line}: {what}" for source in sources() for line, what in rule(source)]
    assert not findings, "\n" + "\n".join(findings)


@pytest.mark.parametrize(("rule", "path", "text", "line"), OFFENDERS)
def test_rule_finds_its_offender(rule: Rule, path: str, text: str, line: int) -> None:
    assert [found for found, _ in rule(parse(path, text))] == [line]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rule_spares_the_innocent(rule: Rule) -> None:
    assert not list(rule(parse("scheduler/x.py", CLEAN)))


def test_every_folder_is_walked() -> None:
    """A rule that reads no file finds nothing wrong."""
    assert {source.path.parts[0] for source in sources()} == set(FOLDERS)
