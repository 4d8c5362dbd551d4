"""In which order cached pages go: the node with the smallest key first."""

from collections.abc import Callable
from typing import Any, Protocol

from kvloom.allocator.errors import InvalidArgument


class NodeView(Protocol):
    """What a policy may know of a node, a run of pages that hang together.  Read-only.

    last_used   rises with every use in the cache, a node's parents being used just after it
    hits        times that a match was locked
    created     rises with every new node
    priority    the highest that it was inserted with
    pages       its length now
    """

    @property
    def last_used(self) -> int: ...
    @property
    def hits(self) -> int: ...
    @property
    def created(self) -> int: ...
    @property
    def priority(self) -> int: ...
    @property
    def pages(self) -> int: ...


class EvictionPolicy(Protocol):
    """The order of eviction.

    A key may change with what it is made of, and is looked at again before a node goes; one that has become smaller
    counts from the next time that some page of the node loses its last user.
    """

    def key(self, node: NodeView) -> Any:
        """Something with an order; the smallest goes first, ties in the order of becoming unused."""


class LeastRecentlyUsed:
    """The node that was not used for longest."""

    def key(self, node: NodeView) -> int:
        """When it was last used."""
        return node.last_used


class LeastFrequentlyUsed:
    """The node that was hit least, of these the one not used for longest."""

    def key(self, node: NodeView) -> tuple[int, int]:
        """Hits, then last use."""
        return node.hits, node.last_used


class FirstInFirstOut:
    """The oldest node, whoever uses it."""

    def key(self, node: NodeView) -> int:
        """When it was made."""
        return node.created


class LowestPriority:
    """The least important node, of these the one not used for longest."""

    def key(self, node: NodeView) -> tuple[int, int]:
        """Priority, then last use."""
        return node.priority, node.last_used


POLICIES: dict[str, Callable[[], EvictionPolicy]] = {
    "lru": LeastRecentlyUsed,
    "lfu": LeastFrequentlyUsed,
    "fifo": FirstInFirstOut,
    "priority": LowestPriority,
}


def policy_of(policy: EvictionPolicy | str) -> EvictionPolicy:
    """The policy itself, or the one of that name.  Raises InvalidArgument for what is neither."""
    if not isinstance(policy, str):
        if not callable(getattr(policy, "key", None)):
            raise InvalidArgument(f"{policy!r} is no eviction policy: it has no key(node)")
        return policy
    if policy not in POLICIES:
        raise InvalidArgument(f"no eviction policy {policy!r}; there are {', '.join(POLICIES)}")
    return POLICIES[policy]()
