"""From one snapshot to the numbers of the catalogue: what each counter and gauge says."""

from typing import TYPE_CHECKING

from kvloom.metrics import catalogue
from kvloom.metrics.memory_readings import memory_of, memory_readings
from kvloom.metrics.values import Values, split

if TYPE_CHECKING:
    from kvloom.scheduler.plan import SchedulerStatistics
    from kvloom.scheduler.status import EngineStatistics


def readings(statistics: "EngineStatistics") -> dict[str, Values]:
    """The value of every counter and gauge, by family; label values that have not occurred are there with 0.

    A memory that reports nothing has no families.
    """
    memory = memory_of(statistics)
    return {
        "oldest_waiting_timestamp_seconds": {(): statistics.oldest_waiting_at or 0.0},
        "last_step_timestamp_seconds": {(): statistics.last_step_at},
        "engine_state": {(state,): state == statistics.state for state in catalogue.ENGINE_STATES},
        "errors_total": split(statistics.errors, catalogue.ERROR_PLACES),
        **_scheduling(statistics.scheduler),
        **(memory_readings(memory) if memory else {}),
    }


def _scheduling(scheduler: "SchedulerStatistics") -> dict[str, Values]:
    states = {
        "waiting": scheduler.waiting,
        "prefilling": scheduler.prefilling,
        "decoding": scheduler.decoding,
        "preempted": scheduler.preempted,
    }
    # Who is restored from the host was preempted, and so its prompt has been counted before: no "host_hit" either.
    sources = {
        "computed": scheduler.prompt_tokens_computed,
        "device_hit": scheduler.prompt_tokens_cached,
        "host_hit": scheduler.prompt_tokens_loaded,
        "recomputed": scheduler.prompt_tokens_recomputed,
    }
    return {
        "requests_received_total": {(): scheduler.received},
        "requests_rejected_total": split(scheduler.rejected, catalogue.REJECT_REASONS),
        "requests_finished_total": split(scheduler.finished, catalogue.FINISH_REASONS),
        "requests": split(states, catalogue.REQUEST_STATES),
        "waiting_prompt_tokens": {(): scheduler.waiting_prompt_tokens},
        "prompt_tokens_total": split(sources, catalogue.PROMPT_SOURCES),
        "output_tokens_total": {(): scheduler.output_tokens},
        "wasted_tokens_total": split(scheduler.wasted_tokens, catalogue.WASTE_REASONS),
        "steps_total": split(scheduler.steps, catalogue.STEP_KINDS),
        "preemptions_total": split({"kv": scheduler.preemptions}, catalogue.PREEMPT_REASONS),
    }
