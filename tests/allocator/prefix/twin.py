"""The prefix cache once more, slow and plain: one dictionary from whole prefixes to pages, searched from end to end.

It does not choose what to evict: it says what may go, and how much must.
"""

from collections.abc import Mapping

from kvloom.allocator import Match

Prefix = tuple[str, tuple[int, ...]]  # namespace, and all tokens up to the end of a page


class TwinCache:
    """`pages[pool][prefix]` is the page that ends there; `users[pool][page]` its users; `born` when it came."""

    def __init__(self, page_size: int, windows: Mapping[str, int | None]) -> None:
        self.page_size = page_size
        self.windows = windows
        self.pages: dict[str, dict[Prefix, int]] = {pool: {} for pool in windows}
        self.users: dict[str, dict[int, int]] = {pool: {} for pool in windows}
        self.born: dict[str, dict[int, int]] = {pool: {} for pool in windows}
        self.births = 0

    def prefixes(self, namespace: str, tokens: list[int], first: int = 0) -> list[Prefix]:
        size = self.page_size
        return [(namespace, tuple(tokens[: end * size])) for end in range(first + 1, len(tokens) // size + 1)]

    def needed(self, pool: str, pages: int) -> range:
        """Which of `pages` pages a row behind them reads."""
        window = self.windows[pool]
        if window is None:
            return range(pages)
        visible = 0
        while visible * self.page_size < window - 1:
            visible += 1
        return range(max(0, pages - max(1, visible)), pages)

    def match(self, tokens: list[int], namespace: str) -> dict[str, list[int]]:
        path = self.prefixes(namespace, tokens[: max(0, len(tokens) - 1)])
        for pages in range(len(path), 0, -1):
            needed = {pool: self.needed(pool, pages) for pool in self.windows}
            if all(path[at] in self.pages[pool] for pool in self.windows for at in needed[pool]):
                return {
                    pool: [self.pages[pool][path[at]] if at in needed[pool] else 0 for at in range(pages)]
                    for pool in self.windows
                }
        return {pool: [] for pool in self.windows}

    def births_of(self, pages: Mapping[str, list[int]]) -> dict[str, list[int | None]]:
        return {pool: [self.born[pool].get(page) for page in ids if page] for pool, ids in pages.items()}

    def use(self, pool: str, page: int) -> None:
        self.users[pool][page] += 1

    def unuse(self, pool: str, page: int) -> None:
        self.users[pool][page] -= 1

    def after(self, page: int) -> Prefix:
        """The prefix that ends with this page of the first pool."""
        return next(prefix for prefix, held in self.pages[next(iter(self.windows))].items() if held == page)

    def insert(
        self, start: Prefix, tokens: list[int], offered: Mapping[str, list[int]]
    ) -> tuple[dict[str, list[int]], dict[str, list[bool]]]:
        namespace, before = start
        path = self.prefixes(namespace, [*before, *tokens], len(before) // self.page_size)
        found: dict[str, list[int]] = {}
        adopted: dict[str, list[bool]] = {}
        for pool, ids in offered.items():
            adopted[pool] = [
                prefix not in self.pages[pool] and page > 0 for prefix, page in zip(path, ids, strict=True)
            ]
            for prefix, page, new in zip(path, ids, adopted[pool], strict=True):
                if new:
                    self.births += 1
                    self.pages[pool][prefix], self.users[pool][page], self.born[pool][page] = page, 0, self.births
                if page:
                    self.use(pool, self.pages[pool][prefix])
            found[pool] = [self.pages[pool].get(prefix, 0) for prefix in path]
        return found, adopted

    def idle(self, pool: str) -> list[Prefix]:
        return [prefix for prefix, page in self.pages[pool].items() if self.users[pool][page] == 0]

    def removable(self, pool: str) -> set[Prefix]:
        """Prefixes whose page of `pool` could go: not used, and in a full pool nothing used there or behind."""
        if self.windows[pool] is not None:
            return set(self.idle(pool))
        used = [prefix for name, held in self.pages.items() for prefix in held.keys() - set(self.idle(name))]
        kept = {(space, path[:end]) for space, path in used for end in range(len(path) + 1)}
        return self.pages[pool].keys() - kept

    def remove(self, pool: str, page: int) -> Prefix:
        prefix = next(prefix for prefix, held in self.pages[pool].items() if held == page)
        assert self.users[pool].pop(page) == 0
        del self.pages[pool][prefix], self.born[pool][page]
        return prefix

    def holes(self) -> list[Prefix]:
        """Prefixes that have a page although the one before them has none in a full pool."""
        full = [held for pool, held in self.pages.items() if self.windows[pool] is None]
        return [
            (space, path)
            for paths in full
            for held in self.pages.values()
            for space, path in held
            if any((space, path[:end]) not in paths for end in range(self.page_size, len(path) + 1, self.page_size))
        ]


def is_stale(match: Match, births: Mapping[str, list[int | None]], twin: TwinCache) -> bool:
    return births != twin.births_of({pool: ids.tolist() for pool, ids in match.pages.items()})
