"""What penalised rows have said so far, counted on the device.

Repetition penalty (Keskar et al. 2019, arXiv:1909.05858): the logit of a token that occurs in prompt or output is
divided by the penalty where it is positive and multiplied by it where it is negative.  Presence and frequency penalty:
taken off the logit of a token that occurs in the output, once, or once per time.  Repetition comes first.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from kvloom.scheduler.errors import BrokenInvariant
from kvloom.scheduler.plan import History, Penalties
from kvloom.scheduler.uploads import to_device

Rows = NDArray[np.intp]


class PenaltyState:
    """Token counts of rows that have a penalty; others cost nothing.

    A line of state is as long as the vocabulary: an int32 count of the output tokens, and a bool for the prompt.  Lines
    are made on demand and belong to a row slot from the history it brings with its first sampled token to the next one.
    The newest tokens are counted where they are, on the device.
    """

    def __init__(self) -> None:
        self._lines: dict[int, int] = {}  # row slot -> line
        self._free: list[int] = []
        self._counts = torch.empty((0, 0), dtype=torch.int32)  # [lines, V] output tokens
        self._prompt = torch.empty((0, 0), dtype=torch.bool)  # [lines, V]

    @property
    def lines(self) -> int:
        """Lines made so far, those that wait for a row included."""
        return len(self._counts)

    def apply(self, logits: torch.Tensor, row_slots: NDArray[np.int32], penalties: Penalties) -> torch.Tensor:
        """Penalised copy of `logits` [S, V], float32 (themselves if no row has a penalty); `row_slots` [S].

        Mutates: takes in the histories of rows sampled for the first time.
        Raises: `BrokenInvariant` if a penalised row never brought one.
        """
        rows = _penalised(penalties)
        if len(rows) == 0:
            return logits
        self._begin(penalties, row_slots, logits)
        lines = self._lines_of(row_slots[rows], logits.device)
        packed = np.stack([array[rows] for array in (penalties.repetition, penalties.presence, penalties.frequency)])
        repetition, presence, frequency = to_device(packed, logits.device).unsqueeze(-1)
        everywhere = len(rows) == len(logits)
        index = None if everywhere else to_device(rows, logits.device)
        scores = (logits if index is None else logits[index]).float()
        counts = self._counts[lines]
        said = counts > 0
        damped = torch.where(scores > 0, scores / repetition, scores * repetition)
        scores = torch.where(self._prompt[lines] | said, damped, scores)
        scores = scores - frequency * counts - presence * said
        return scores if index is None else logits.float().index_copy(0, index, scores)

    def record(self, tokens: torch.Tensor, row_slots: NDArray[np.int32], penalties: Penalties) -> None:
        """Count the newest `tokens` (int64 [S]); negative ones are none."""
        rows = _penalised(penalties)
        if len(rows) == 0:
            return
        lines = self._lines_of(row_slots[rows], tokens.device)
        chosen = tokens if len(rows) == len(tokens) else tokens[to_device(rows, tokens.device)]
        places = lines * self._counts.shape[1] + chosen.clamp_min(0)
        self._counts.view(-1).scatter_add_(0, places, (chosen >= 0).to(torch.int32))

    def _lines_of(self, row_slots: NDArray[np.int32], device: torch.device) -> torch.Tensor:
        try:
            lines = [self._lines[slot] for slot in row_slots.tolist()]
        except KeyError as error:
            raise BrokenInvariant(f"row slot {error} is sampled with a penalty but has no history") from None
        return to_device(np.array(lines, np.int64), device)

    def _begin(self, penalties: Penalties, row_slots: NDArray[np.int32], logits: torch.Tensor) -> None:
        """Start the lines of rows that bring a history, over whatever the row slot's last owner left."""
        fresh = [history for history in penalties.histories if history.row_slot not in self._lines]
        if len(fresh) > len(self._free):
            self._reclaim(penalties, row_slots)
        if len(fresh) > len(self._free):
            self._grow(len(fresh) - len(self._free), logits)
        for history in fresh:
            self._lines[history.row_slot] = self._free.pop()
        for history in penalties.histories:
            self._fill(self._lines[history.row_slot], history)

    def _reclaim(self, penalties: Penalties, row_slots: NDArray[np.int32]) -> None:
        """Take lines back from row slots that belong to a request without penalties by now."""
        plain = np.delete(row_slots, _penalised(penalties))
        for slot in self._lines.keys() & set(plain.tolist()):
            self._free.append(self._lines.pop(slot))

    def _grow(self, lines: int, logits: torch.Tensor) -> None:
        old = len(self._counts)
        new = max(old + lines, 2 * old)  # doubling: a growing batch copies each line a constant number of times
        counts, prompt = self._counts, self._prompt
        self._counts = torch.zeros((new, logits.shape[1]), dtype=torch.int32, device=logits.device)
        self._prompt = torch.zeros((new, logits.shape[1]), dtype=torch.bool, device=logits.device)
        if old:
            self._counts[:old] = counts
            self._prompt[:old] = prompt
        self._free.extend(range(new - 1, old - 1, -1))

    def _fill(self, line: int, history: History) -> None:
        vocab, device = self._counts.shape[1], self._counts.device
        prompt, outputs = (_inside(tokens, vocab) for tokens in (history.prompt, history.outputs))
        self._prompt[line].zero_().index_fill_(0, to_device(prompt, device), True)
        once = torch.ones(len(outputs), dtype=torch.int32, device=device)
        self._counts[line].zero_().scatter_add_(0, to_device(outputs, device), once)


def _penalised(penalties: Penalties) -> Rows:
    return np.flatnonzero((penalties.repetition != 1) | (penalties.presence != 0) | (penalties.frequency != 0))


def _inside(tokens: NDArray[np.int32], vocab: int) -> NDArray[np.int64]:
    """The tokens that have a logit: a prompt may hold others (a picture's place)."""
    return tokens[(tokens >= 0) & (tokens < vocab)].astype(np.int64)
