"""Adaptors between the engine and a model: the protocol, runners for Hugging Face models, for trying, for tests."""

from typing import TYPE_CHECKING

from kvloom.scheduler.runners.base import ModelRunner, RunnerSpec, StepOutput
from kvloom.scheduler.runners.shadow import ShadowRunner
from kvloom.scheduler.runners.toy import ToyRunner

if TYPE_CHECKING:
    from kvloom.scheduler.runners.transformers_runner import TransformersRunner

__all__ = ["ModelRunner", "RunnerSpec", "ShadowRunner", "StepOutput", "ToyRunner", "TransformersRunner"]


def __getattr__(name: str) -> object:
    """Import late what needs an optional library: `TransformersRunner` needs transformers."""
    if name == "TransformersRunner":
        from kvloom.scheduler.runners.transformers_runner import TransformersRunner  # noqa: PLC0415

        return TransformersRunner
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
