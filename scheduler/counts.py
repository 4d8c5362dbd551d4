"""What has happened since start, as plain integers; read when somebody asks."""

from collections import Counter

from kvloom.scheduler.request import Phase, Sequence


class Counts:
    """Counters of one core.  Only the core writes them."""

    def __init__(self) -> None:
        self.received = 0
        self.rejected: Counter[str] = Counter()
        self.finished: Counter[str] = Counter()
        self.phases: Counter[Phase] = Counter()
        self.preemptions = 0
        self.prompt_computed = 0
        self.prompt_recomputed = 0
        self.prompt_cached = 0
        self.prompt_loaded = 0  # had been evicted; from the host
        self.output_tokens = 0
        self.wasted: Counter[str] = Counter()
        self.steps: Counter[str] = Counter()
        self.failed_steps = 0

    def reused(self, sequence: Sequence, known: int, loaded: int) -> None:
        """A sequence enters with the KV of `known` tokens, the last `loaded` of them from the host.

        Those of its prompt are counted, unless they were planned or reused before.  Mutates `sequence.prefilled`.
        """
        known = min(known, len(sequence.request.prompt))
        new = max(0, known - sequence.prefilled)
        self.prompt_loaded += min(loaded, new)
        self.prompt_cached += new - min(loaded, new)
        sequence.prefilled = max(sequence.prefilled, known)

    def prefilled(self, sequence: Sequence, start: int, stop: int) -> None:
        """Tokens `start` to `stop` of a sequence were planned; those planned before, and outputs, are work done twice.

        Mutates `sequence.prefilled`.
        """
        prompt_stop = min(stop, len(sequence.request.prompt))
        new = max(0, prompt_stop - max(start, sequence.prefilled))
        self.prompt_computed += new
        self.prompt_recomputed += stop - start - new
        sequence.prefilled = max(sequence.prefilled, prompt_stop)
