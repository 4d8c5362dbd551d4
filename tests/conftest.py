"""What holds for every test."""

import os

# Before any test imports the libraries that read them. A test must not wait for a model hub that CI cannot reach, and
# with two workers on two cores, two compute threads each would only fight over the cores (and one is enough for models
# this small when there is one worker).
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a device where there is none; torch is imported only if some test asks for one."""
    wanting = [item for item in items if item.get_closest_marker("gpu")]
    if not wanting:
        return
    import torch

    if not torch.cuda.is_available():
        for item in wanting:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
