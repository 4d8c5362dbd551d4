"""Look-ups: what was found, what a larger cache would have had, and what others have kept of it."""

from collections import Counter
from collections.abc import Sequence

from kvloom.allocator.prefix.base import Cut, Evicted, Match, Part
from kvloom.allocator.prefix.ghosts import Ghost, GhostList
from kvloom.allocator.prefix.tree import Tree


class LookUps:
    """Follows tokens (bytes, whole pages) through the tree and on through its ghosts.

    `tokens`: query_tokens, hit_tokens, host_hit_tokens and regret_tokens of what was recorded, since start.
    """

    def __init__(self, tree: Tree, ghosts: GhostList) -> None:
        self._tree = tree
        self._ghosts = ghosts
        self.tokens: Counter[str] = Counter()

    def record(self, data: bytes, namespace: str, query: int, matched: int, host: int) -> int:
        """A look-up of `query` tokens found `matched` here and `host` behind them; how many more are ghosts."""
        at, behind = self._beyond(data, namespace)
        gone = sum(same for _, same in behind)
        regret = max(0, (at + gone) * self._tree.page_size - matched - host) if gone else 0
        self.tokens.update(query_tokens=query, hit_tokens=matched, host_hit_tokens=host, regret_tokens=regret)
        return regret

    def parts_behind(self, data: bytes, match: Match) -> tuple[Part, ...]:
        """What bodies have of `data` directly behind its match, one behind the other.  Mutates nothing."""
        at, behind = self._beyond(data, match.namespace)
        parts: list[Part] = []
        if at * self._tree.page_size == match.tokens:
            for ghost, same in behind:
                if ghost.body is None:
                    break
                parts.append(Part(ghost.body, ghost.skip, same))
        return tuple(parts)

    def _beyond(self, data: bytes, namespace: str) -> tuple[int, list[tuple[Ghost, int]]]:
        """Live pages along `data`, and the ghosts behind them with the pages of each that agree."""
        path, end = self._tree.walk(data, namespace)
        at = sum(same for _, same in path)
        return at, [] if end is None else list(self._ghosts.along(end.ghosts, data, at))


def cuts_of(evicted: Evicted, cut: Sequence[Ghost], ghosts: GhostList, page_bytes: int) -> list[Cut]:
    """Whose pages were evicted, in full pools: they come one ghost behind the other.  Without those forgotten."""
    cuts: list[Cut] = []
    stop = 0
    for ghost in cut:
        start, stop = stop, stop + len(ghost.tokens) // page_bytes
        if ghost in ghosts:
            cuts.append(Cut(ghost, {pool: pages[start:stop] for pool, pages in evicted.items()}))
    return cuts
