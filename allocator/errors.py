"""What can go wrong in the allocator, one class per situation.

Running short is not here: an expected shortage is a value (`None` or a `Shortfall`).  These are the caller's
mistakes, each of which leaves the books exactly as they were, and one for a mistake of ours.
"""


class AllocatorError(Exception):
    """Base of every error that kvloom.allocator raises; never raised itself."""


class InvalidArgument(AllocatorError, ValueError):
    """A size, length or index that makes no sense; nothing was changed."""


class DoubleFree(AllocatorError):
    """A page (or row) that is already free, or named twice in one call; nothing was changed."""


class ForeignPage(AllocatorError):
    """A page that the caller does not hold: another's, the dump page, or outside the pool; nothing was changed."""


class GroupMisuse(AllocatorError):
    """A free group was begun, or a state from before it restored, inside an open one, which keeps its queue."""


class StaleState(AllocatorError):
    """A state of another allocator, or one that can be restored no more; nothing was changed."""


class BrokenInvariant(AllocatorError):
    """The books do not balance.  This is a defect of kvloom; the engine stops rather than go on."""
