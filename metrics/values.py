"""Numbers by label values, every value of a closed set among them."""

from collections.abc import Mapping

from kvloom.metrics.catalogue import OTHER

Values = dict[tuple[str, ...], float]  # by label values, in the order of the family's labels


def per_pool(counts: Mapping[str, Mapping[str, int]], closed: tuple[str, ...]) -> Values:
    """`split` for each pool."""
    return {(pool, *value): count for pool, parts in counts.items() for value, count in split(parts, closed).items()}


def split(counts: Mapping[str, int], closed: tuple[str, ...]) -> Values:
    """One count per value of the closed set; strangers together are "other", and only when there are any."""
    values: Values = {(value,): counts.get(value, 0) for value in closed}
    strangers = sum(count for value, count in counts.items() if value not in closed)
    return {**values, (OTHER,): strangers} if strangers else values
