"""Options are wrappers, not flags: each is an allocator around an allocator, and they nest."""

from kvloom.allocator.wrappers.checked import CheckedAllocator
from kvloom.allocator.wrappers.recording import RecordingAllocator, replay

__all__ = ["CheckedAllocator", "RecordingAllocator", "replay"]
