"""Steps run off the event loop: one thread launches, another waits for the device.

The launch thread calls the runner, samples if the runner gave logits, and never waits for the device, or the next
launch would queue behind it.  Where results are on a device, a copy to pinned memory and an event are enqueued, and the
wait thread blocks on the event (torch releases the interpreter lock there).  Threads are daemons: a runner that hangs
does not keep the process alive.
"""

import asyncio
import atexit
import inspect
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Protocol

import numpy as np
import torch

from kvloom.scheduler.errors import BadStepResult, BrokenInvariant, FatalRunnerError, RunnerFailed
from kvloom.scheduler.plan import StepResult
from kvloom.scheduler.sampler import BAD_TOKEN, SampledBatch, Sampler

Outcome = StepResult | Exception
_EXIT_SECONDS = 10.0  # how long a process that ends waits for a step that is still out


class StepBatch(SampledBatch, Protocol):
    """The batch, as far as launching it is concerned."""

    @property
    def step(self) -> int: ...
    @property
    def has_token_src(self) -> bool: ...
    @property
    def token_ids(self) -> torch.Tensor: ...
    @property
    def token_src(self) -> torch.Tensor: ...
    @property
    def row_slot(self) -> torch.Tensor: ...
    @property
    def sample_rows(self) -> torch.Tensor: ...
    def replace_token_ids(self, token_ids: torch.Tensor) -> None:
        """Put the completed token ids in place."""


class LaunchedSpec(Protocol):
    """The part of a runner's spec that launching needs."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def device(self) -> torch.device: ...


class Launched(Protocol):
    """A runner, as far as launching is concerned."""

    @property
    def spec(self) -> LaunchedSpec: ...
    @property
    def forward(self) -> Callable[[Any], Any]: ...
    @property
    def close(self) -> Callable[[], None]: ...


class Output(Protocol):
    """A runner's answer."""

    @property
    def next_tokens(self) -> torch.Tensor | None: ...
    @property
    def logits(self) -> torch.Tensor | None: ...
    @property
    def row_errors(self) -> Mapping[int, Exception]: ...


@dataclass(slots=True)
class _Launched:
    """A step whose tokens are on their way to the host; `ready` is None when they are there."""

    tokens: torch.Tensor
    ready: torch.cuda.Event | None
    row_errors: Mapping[int, Exception]
    sampled: bool  # by us, from logits

    def result(self) -> StepResult:
        """Wait for the tokens."""
        if self.ready is not None:
            self.ready.synchronize()
            tokens = self.tokens.numpy()
        else:
            tokens = self.tokens.to("cpu", copy=True).numpy()  # the runner may use its buffer again for the next step
        errors = self.row_errors
        if self.sampled and (tokens == BAD_TOKEN).any():
            senseless = RunnerFailed("the logits of this request are no numbers, or infinite")
            errors = dict.fromkeys(np.flatnonzero(tokens == BAD_TOKEN).tolist(), senseless) | dict(errors)
        return StepResult(tokens, errors)


class Launcher:
    """Runs `forward` for one batch after the other and reports each outcome on the event loop, in order.

    runner    its `forward` may be `async def`, and is then awaited on the event loop; closed after its last step
    closed    called once the runner is closed, on the thread that has closed it
    report    called on the loop with the step and its result, or what went wrong (RunnerFailed, FatalRunnerError)
    overlap   the next batch may be submitted before the outcome is known; it is given `token_src`'s tokens here
    """

    def __init__(
        self,
        runner: Launched,
        report: Callable[[int, Outcome], None],
        closed: Callable[[], None],
        *,
        max_rows: int,
        overlap: bool,
    ) -> None:
        device = runner.spec.device
        self._runner = runner
        self._report = report
        self._loop = asyncio.get_running_loop()
        self._sampler = Sampler()
        # The newest token of each row, so that the next step can be launched before the host has seen it.
        self._newest = torch.zeros(max_rows + 1, dtype=torch.int32, device=device) if overlap else None
        self._last_token = runner.spec.vocab_size - 1
        self._awaiting: Future[Output] | None = None  # an `async def forward` under way
        self._closed = False
        self._tell_closed = closed
        self.close_error: BaseException | None = None  # what the runner's `close` raised
        self._batches: SimpleQueue[StepBatch | None] = SimpleQueue()
        self._launched: SimpleQueue[tuple[int, _Launched | Exception] | None] = SimpleQueue()
        self._threads = [threading.Thread(target=self._launch_all, name="kvloom-launch", daemon=True)]
        self._waits = device.type != "cpu"
        if self._waits:
            self._threads.append(threading.Thread(target=self._wait_all, name="kvloom-wait", daemon=True))
        for thread in self._threads:
            thread.start()
        atexit.register(self._end_with_process)

    def submit(self, batch: StepBatch) -> None:
        """Queue a batch; its outcome is reported later."""
        self._batches.put(batch)

    def close(self) -> None:
        """Let the threads end after what they are doing, and close the runner; what is queued will not be run.

        Does not wait: a runner that hangs in a step is closed when, and if, it comes back; one that is awaited is
        cancelled.
        """
        self._closed = True
        self._batches.put(None)
        if self._awaiting is not None:
            self._awaiting.cancel()

    def join(self, seconds: float) -> None:
        """Wait that long for the runner to be closed."""
        self._threads[-1].join(seconds)

    def _end_with_process(self) -> None:
        """A thread that is cut off inside a library's code takes the whole process down; one that hangs has to be."""
        self.close()
        self._threads[-1].join(_EXIT_SECONDS)

    def _launch_all(self) -> None:
        while (batch := self._batches.get()) is not None and not self._closed:
            launched: _Launched | Exception
            try:
                launched = self._launch(batch)
            except BaseException as error:  # whatever a runner raises is its step's outcome
                launched = _as_failure(error)
            if self._waits:  # failures too, so that outcomes are reported in order
                self._launched.put((batch.step, launched))
            else:
                self._finish(batch.step, launched)
        if self._waits:
            self._launched.put(None)
        else:
            self._close_runner()

    def _launch(self, batch: StepBatch) -> _Launched:
        if batch.has_token_src and self._newest is not None:
            source = batch.token_src
            known = torch.where(source < 0, batch.token_ids, self._newest[source.clamp(min=0)])
            batch.replace_token_ids(known)
        output = self._runner.forward(batch)
        if inspect.isawaitable(output):
            self._awaiting = asyncio.run_coroutine_threadsafe(_awaited(output), self._loop)
            if self._closed:  # before there was anything to cancel
                self._awaiting.cancel()
            output = self._awaiting.result()
        tokens, sampled = self._tokens(output, batch)
        if self._newest is not None and len(tokens) == len(batch.sample_rows):
            # A token outside the vocabulary fails its own step; it must not bring down the next one, which is for
            # others too.
            known = tokens.to(self._newest.device, non_blocking=True).long().clamp(0, self._last_token).int()
            self._newest[batch.row_slot[batch.sample_rows]] = known
        if not tokens.is_cuda:
            return _Launched(tokens, None, output.row_errors, sampled)
        host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
        host.copy_(tokens, non_blocking=True)
        ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
        ready.record(torch.cuda.current_stream(tokens.device))  # this thread's current device may be another
        return _Launched(host, ready, output.row_errors, sampled)

    def _tokens(self, output: Output, batch: StepBatch) -> tuple[torch.Tensor, bool]:
        """The tokens, and whether they were sampled here.  Raises BadStepResult that says what was wanted."""
        rows, words = len(batch.sample_rows), self._last_token + 1
        if not hasattr(output, "next_tokens") or not hasattr(output, "logits") or not hasattr(output, "row_errors"):
            raise BadStepResult(f"step {batch.step}: forward gave a {type(output).__name__}; a StepOutput is wanted")
        if isinstance(output.next_tokens, torch.Tensor):
            return output.next_tokens, False
        logits = output.logits
        if not isinstance(logits, torch.Tensor):
            given = f"next_tokens a {type(output.next_tokens).__name__} and logits a {type(logits).__name__}"
            raise BadStepResult(f"step {batch.step}: {given}; one of them must be a tensor")
        if logits.shape != (rows, words) or not logits.is_floating_point():
            raise BadStepResult(
                f"step {batch.step}: logits {logits.dtype} of shape {tuple(logits.shape)} for {rows} sampled rows of a "
                f"vocabulary of {words}"
            )
        return self._sampler(logits, batch), True

    def _wait_all(self) -> None:
        while (pending := self._launched.get()) is not None:
            self._finish(*pending)
        self._close_runner()

    def _close_runner(self) -> None:
        """On the last thread that works for it."""
        try:
            self._runner.close()
        except BaseException as error:
            self.close_error = error
        self._tell_closed()
        atexit.unregister(self._end_with_process)

    def _finish(self, step: int, launched: _Launched | Exception) -> None:
        try:
            outcome = launched if isinstance(launched, Exception) else launched.result()
        except Exception as error:  # an error of the device surfaces here
            outcome = _as_failure(error)
        try:
            self._loop.call_soon_threadsafe(self._report, step, outcome)
        except RuntimeError:  # the loop is closed: nobody is left to tell
            return


def close_after(runner: Launched, error: BaseException) -> None:
    """Close a runner whose start failed with `error`; what goes wrong with that too is a note on it."""
    try:
        runner.close()
    except Exception as another:
        error.add_note(f"and the runner could not be closed: {another!r}")


async def _awaited(awaitable: Any) -> Output:
    output: Output = await awaitable
    return output


def _as_failure(error: BaseException) -> Exception:
    """What the step's requests are told: the runner's own words, with its exception as the cause."""
    if isinstance(error, FatalRunnerError | BadStepResult | BrokenInvariant):
        return error
    failure = RunnerFailed(f"{type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure
