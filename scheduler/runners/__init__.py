"""Adaptors between the engine and a model: the protocol, two runners, and the sampler for runners that give logits."""

from typing import TYPE_CHECKING

from kvloom.scheduler.runners.base import ModelRunner, RunnerSpec, StepOutput
from kvloom.scheduler.runners.sampler import Sampler
from kvloom.scheduler.runners.toy import ToyRunner

if TYPE_CHECKING:
    from kvloom.scheduler.runners.transformers_runner import TransformersRunner

__all__ = ["ModelRunner", "RunnerSpec", "Sampler", "StepOutput", "ToyRunner", "TransformersRunner"]


def __getattr__(name: str) -> object:
    """Import late what needs an optional library: `TransformersRunner` needs transformers."""
    if name == "TransformersRunner":
        from kvloom.scheduler.runners.transformers_runner import TransformersRunner  # noqa: PLC0415

        return TransformersRunner
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
