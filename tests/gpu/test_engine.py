"""The engine on a device: the same tokens as `generate` there, and nothing in a step that waits for the device."""

import pytest

from tests.gpu.test_kernels import no_synchronisation
from tests.models.crowd import answers, spoken_by
from tests.models.tiny import MODELS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature"),
]


@pytest.mark.parametrize("host_bytes", [0, 2**30], ids=["recompute", "offload"])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("name", MODELS)
async def test_tokens_equal_those_of_generate(name: str, page_size: int, depth: int, host_bytes: int) -> None:
    case = spoken_by(MODELS[name](), "cuda")
    said, preemptions = await answers(
        case, page_size=page_size, chunk=16, depth=depth, host_bytes=host_bytes, during=no_synchronisation()
    )
    assert said == case.expected
    assert preemptions > 0
