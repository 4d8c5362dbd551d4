"""Traps D4 to D9 and D30, D31: what kernels are, what they are given, and that nothing waits for a device."""

import ast
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import kvloom.allocator.kernels
from kvloom.allocator import PagedTokenToKVPoolAllocator, RequestTable
from kvloom.allocator.binding import DeviceBinding
from kvloom.allocator.kernels import torch_kernels
from kvloom.allocator.paged_rows import PagedRows
from tests.allocator.books import ints
from tests.allocator.conformance.kinds import ASCEND, KINDS, SWA, Kind
from tests.allocator.test_cases import taken

TREE = ast.parse((Path(kvloom.allocator.kernels.__path__[0]) / "triton_kernels.py").read_text(encoding="utf-8"))


class NothingDependsOnData(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses operations whose answer, or its shape, is known only once the device has got there."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        assert not waits(func, args, kwargs), func
        return func(*args, **kwargs)


def waits(func: Any, args: Any, kwargs: Any) -> bool:
    if func.name().startswith(("aten::index.", "aten::index_put")):  # a mask must be counted; numbers need not
        return any(index is not None and index.dtype == torch.bool for index in args[1])
    if kwargs.get("output_size") is not None:  # repeat_interleave, told how much will come
        return False
    return torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags


def nothing_waits() -> AbstractContextManager[object]:
    return NothingDependsOnData()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize(
    "act",
    [
        lambda slots: slots.sum().item(),
        torch.unique,
        torch.nonzero,
        bool,
        lambda slots: slots[slots > 0],
        lambda slots: slots.repeat_interleave(slots),
        lambda slots: slots.__setitem__(slots > 0, slots),
    ],
)
def test_the_guard_sees_what_waits(act: Any) -> None:
    with pytest.raises(AssertionError), nothing_waits():
        act(torch.tensor([5]))


@pytest.mark.parametrize("kind", [*KINDS[:4], *ASCEND, *SWA], ids=lambda kind: kind.name)
def test_d4_d5_no_verb_waits_for_the_device(kind: Kind) -> None:
    """With torch's kernels, which could; Triton's are watched on a device, in `tests/gpu`."""
    pool: Any = kind.make(40, 40, False)
    pool._kernels = torch_kernels
    size = kind.page_size
    with nothing_waits():
        a = taken(pool.alloc(6 * size))
        pool.free(list(range(size, 2 * size)))
        with pool.free_group():
            pool.free(torch.arange(2 * size, 4 * size))
        if kind.has_window:
            pool.free_swa([4 * size])
        if kind.grows_rows:
            pool.alloc_extend([0, 0, 0], [5, 0, 9], [-1] * 3, 14)
            pool.alloc_decode([2 * size + 1, 1], [7 * size - 1, -1])
        state = pool.backup_state()
        pool.alloc(size)
        pool.restore_state(state)
        pool.clear()
    assert len(a) == 6 * size


def kernel_bodies() -> Iterator[ast.FunctionDef]:
    for node in TREE.body:
        if isinstance(node, ast.FunctionDef) and "_jit" in map(ast.unparse, node.decorator_list):
            yield node


def calls(name: str) -> list[ast.Call]:
    found = [node for body in kernel_bodies() for node in ast.walk(body) if isinstance(node, ast.Call)]
    return [call for call in found if ast.unparse(call.func) == name]


def test_d6_no_kernel_runs_over_the_rows() -> None:
    """A lane finds its row in the offsets that the host sends, by halving; that is the only loop, and the only search.

    That a row does not depend on what its neighbours are: `conformance/interpreted.py`.
    """
    loops = [node for body in kernel_bodies() for node in ast.walk(body) if isinstance(node, ast.For | ast.While)]
    assert [ast.unparse(loop.iter) for loop in loops if isinstance(loop, ast.For)] == ["range(halvings)"]
    assert len(loops) == 1
    for reduction in ("tl.sum", "tl.cumsum", "tl.associative_scan", "tl.reduce"):
        assert not calls(reduction)


def test_d7_a_masked_load_names_what_its_dead_lanes_read() -> None:
    masked = [load for load in calls("tl.load") if "mask" in {keyword.arg for keyword in load.keywords}]
    assert len(masked) > 10
    for load in masked:
        assert "other" in {keyword.arg for keyword in load.keywords}, ast.unparse(load)


def test_d8_d9_nothing_about_a_batch_is_a_constant_to_the_compiler() -> None:
    """No argument is a constexpr, and a program has as many lanes whatever the batch."""
    bodies = list(kernel_bodies())
    assert len(bodies) > 5
    for body in bodies:
        assert all(argument.annotation is None for argument in body.args.args), body.name
    ranges = calls("tl.arange")
    assert ranges
    for lanes in ranges:
        first, end = map(ast.unparse, lanes.args)
        assert first == "0"
        assert end.isupper(), ast.unparse(lanes)


class CountedKernels:
    """torch's kernels; each launch is written down."""

    def __init__(self) -> None:
        self.launched: list[str] = []

    def __getattr__(self, verb: str) -> Any:
        def launch(*arguments: Any, **named: Any) -> None:
            self.launched.append(verb)
            getattr(torch_kernels, verb)(*arguments, **named)

        return launch


def device_rows(pages: int = 16) -> tuple[PagedRows, CountedKernels]:
    """Rows bound as on a device, where the CPU would do without kernels."""
    allocator = PagedTokenToKVPoolAllocator(pages * 4, 4, torch.float16, "cpu", None)
    table = RequestTable(4, 8)
    rows, kernels = PagedRows(allocator, table), CountedKernels()
    binding: Any = DeviceBinding(table, 4, kernels, torch.device("cpu"))
    rows._binding = binding
    return rows, kernels


def test_d30_several_tokens_for_a_row_are_one_launch() -> None:
    rows, kernels = device_rows()
    mine = rows.open_rows(3)
    assert isinstance(mine, np.ndarray)
    rows.extend_rows(mine, ints(3, 4, 1))
    kernels.launched.clear()
    slots = rows.decode_rows(mine, ints(3, 1, 0))
    assert isinstance(slots, torch.Tensor)
    assert kernels.launched == ["extend_rows"]
    assert slots.tolist() == [7, 16, 17, 20]
    assert rows.table.lengths[mine].tolist() == [6, 5, 1]
    rows.check()


def test_d31_the_kernels_find_a_rows_last_slot_themselves() -> None:
    """A step is one launch, whose arguments come from the host: no gather before it."""
    rows, kernels = device_rows()
    mine = rows.open_rows(2)
    assert isinstance(mine, np.ndarray)
    rows.extend_rows(mine, ints(4, 2))
    assert kernels.launched == ["extend_rows"]
    with nothing_waits():
        slots = rows.decode_rows(mine)
    assert isinstance(slots, torch.Tensor)
    assert kernels.launched == ["extend_rows", "decode_rows"]
    assert slots.tolist() == [12, 10]
