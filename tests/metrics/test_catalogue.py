"""The catalogue keeps Prometheus' rules (numbered as in the naming guide) and agrees with the scheduler's enums."""

import re

import pytest

from kvloom.allocator.books import GROUP_PAGES, OPS
from kvloom.allocator.page_sampling import RESIDENCY_SECONDS
from kvloom.allocator.reuse import EVICTION_SECONDS
from kvloom.metrics import catalogue
from kvloom.metrics.catalogue import BY_NAME, CATALOGUE, Family, Kind
from kvloom.scheduler import errors
from kvloom.scheduler.request import FinishReason, Phase
from kvloom.scheduler.status import EngineState

every_family = pytest.mark.parametrize("family", CATALOGUE, ids=lambda family: family.name)

# What a number can be: a unit, or things that are counted.
UNITS = ("seconds", "ratio", "tokens", "pages", "bytes")
THINGS = (
    "requests", "steps", "preemptions", "errors", "groups", "sorts", "received", "rejected", "finished", "state",
    "failures", "violations", "entries",
)  # fmt: skip
WHOLES = ("build", "pool")  # what an info metric is about


@every_family
def test_rule_1_plain_words(family: Family) -> None:
    assert re.fullmatch(r"[a-z]+(_[a-z]+)*", family.name)
    assert all(re.fullmatch(r"[a-z]+(_[a-z]+)*", label) for label in family.labels)


@every_family
def test_rule_2_one_unit_and_it_comes_last(family: Family) -> None:
    words = family.name.removesuffix("_total").removesuffix("_info").split("_")
    assert words[-1] in (*UNITS, *THINGS, *WHOLES)
    assert words[-1] in THINGS or not set(words[:-1]) & {"seconds", "ratio"}
    assert not set(words) & {"ms", "milliseconds", "percent", "kb", "mb", "gb", "minutes"}


@every_family
def test_rule_3_suffixes_tell_the_kind(family: Family) -> None:
    assert family.name.endswith("_total") == (family.kind is Kind.COUNTER)
    assert family.name.endswith("_info") == (family.kind is Kind.INFO)
    assert not family.name.endswith(("_count", "_sum", "_bucket", "_created"))
    assert bool(family.buckets) == (family.kind is Kind.HISTOGRAM)


@every_family
def test_rule_5_labels_are_from_closed_sets(family: Family) -> None:
    """Pools are the engine's configuration; an info metric has one series."""
    unbounded = {label for label, values in family.labels.items() if values is None}
    assert unbounded <= {"pool"} or family.kind is Kind.INFO
    assert not set(family.labels) & {*catalogue.BASE_LABELS, "le", "quantile", "request", "user", "id"}
    for values in family.labels.values():
        assert values is None or len(set(values)) == len(values) > 0


@every_family
def test_rule_7_moments_are_timestamps(family: Family) -> None:
    assert "age" not in family.name.split("_")
    assert "since" not in family.name.split("_")


@every_family
def test_help_is_one_sentence(family: Family) -> None:
    assert family.help.endswith(".")
    assert "\n" not in family.help


@every_family
def test_buckets_ascend(family: Family) -> None:
    assert list(family.buckets) == sorted(set(family.buckets))
    assert all(bound < float("inf") for bound in family.buckets)


def test_names_are_unique() -> None:
    assert len(BY_NAME) == len(CATALOGUE)


def test_a_request_of_15_minutes_lands_in_a_finite_bucket() -> None:
    """B45."""
    assert BY_NAME["request_duration_seconds"].buckets[-1] > 15 * 60


def test_closed_sets_and_bounds_are_those_of_whoever_counts() -> None:
    assert tuple(FinishReason) == catalogue.FINISH_REASONS
    assert tuple(EngineState) == catalogue.ENGINE_STATES
    assert set(Phase) - {Phase.FINISHED} <= set(catalogue.REQUEST_STATES)
    assert catalogue.ALLOCATION_OPS == OPS
    assert catalogue.GROUP_PAGES == GROUP_PAGES
    assert catalogue.RESIDENCY_SECONDS == RESIDENCY_SECONDS
    assert catalogue.EVICTION_SECONDS == EVICTION_SECONDS
    reasons = {
        kind.reason for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.Rejected)
    }
    assert reasons <= set(catalogue.REJECT_REASONS)
