"""PoolSpec: what a runner says about its KV."""

import pytest
import torch

from kvloom.allocator import InvalidArgument, PoolSpec


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (PoolSpec(layers=(0, 1, 5), kv_heads=2, head_dim=8, dtype=torch.float16), 2 * 3 * 2 * 8 * 2),
        (PoolSpec(layers=(3,), kv_heads=4, head_dim=16, dtype=torch.float8_e4m3fn), 2 * 4 * 16),
        (PoolSpec(layers=(0,), kv_heads=1, head_dim=1), 2 * 4),
        (PoolSpec(), 0),
    ],
)
def test_bytes_per_token(spec: PoolSpec, expected: int) -> None:
    assert spec.bytes_per_token == expected


@pytest.mark.parametrize(
    ("wrong", "named"),
    [({"kv_heads": -1}, "kv_heads=-1"), ({"head_dim": -8}, "head_dim=-8"), ({"window": 0}, "window=0"),
     ({"window": -4}, "window=-4")],
)  # fmt: skip
def test_numbers_that_make_no_sense_are_named(wrong: dict[str, int], named: str) -> None:
    with pytest.raises(InvalidArgument, match=named):
        PoolSpec(name="swa", **wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="swa"):
        PoolSpec(name="swa", **wrong)  # type: ignore[arg-type]


def test_a_spec_is_a_value() -> None:
    assert PoolSpec(layers=(1, 2)) == PoolSpec(layers=(1, 2))
    assert PoolSpec(window=4) != PoolSpec()
    with pytest.raises(AttributeError):
        PoolSpec().window = 3  # type: ignore[misc]
