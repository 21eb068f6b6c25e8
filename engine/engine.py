"""The step loop: one thread that owns the scheduler, the cache and the runner.

Other threads call `submit`, `abort` and `call`. Results reach them through `on_outputs`, once per
step. A request crosses threads twice, however many tokens it has.

    take commands ─► cache.step ─► schedule ─► runner.step ─► process the results ─► on_outputs
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from contextlib import suppress
from typing import Protocol, TypeVar

from engine.answers import STEP_FAILED, Answers
from engine.batch import Batch, Sampled, Span
from engine.errors import EngineClosed, EngineFailed
from engine.intake import Intake
from engine.request import FinishReason, Request, StepOutput
from engine.scheduling.gathering import Gathering
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import SequenceState
from engine.scheduling.states import StateRunner
from engine.settings import EngineSettings
from engine.stats import EngineStats
from tiers.cache import TieredCache
from tiers.operations.face import BlockOperations

logger = logging.getLogger(__name__)

MAX_FAILURES = 3  # failed turns in a row after which the engine gives up
IDLE_S = 0.5  # how often an idle engine checks for work
MOVING_S = 0.002  # the same while loads or stores are under way, whose end also wakes it
T = TypeVar("T")


class Runner(StateRunner, Protocol):
    """What the engine needs from the code that computes; see `engine.execution.runner`. Only a
    model with recurrent states is asked about states."""

    def step(self, batch: Batch) -> list[Sampled]: ...

    def forget(self, sequence_id: int) -> None: ...

    def probe(self) -> None:
        """Raises if the model can no longer compute anything. Changes no KV."""
        ...


class Engine:
    """Serves requests until closed. Invariant: every accepted request gets one `last` output."""

    def __init__(
        self,
        runner: Runner,
        cache: TieredCache,
        settings: EngineSettings,
        on_outputs: Callable[[Seq[StepOutput]], None],
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._runner = runner
        self._cache = cache
        self._settings = settings
        self._on_outputs = on_outputs
        self._clock_ns = clock_ns
        self._scheduler = Scheduler(cache, settings.scheduler, clock_ns)
        cache.on_purge(self._scheduler.detach)
        size = cache.layout.block_size
        # One block stays free for the copy of a shared tail that a sequence may need to make.
        self.max_tokens = min(settings.max_context, (cache.pool.num_blocks - 1) * size)
        self._intake = Intake(settings, self.max_tokens)
        self._answers = Answers(
            self._scheduler,
            cache,
            settings,
            max_tokens=self.max_tokens,
            clock_ns=lambda: self._clock_ns(),
            on_ended=self._intake.ended,
        )
        self._gathering = Gathering(lambda: self._clock_ns() / 1e9)
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = threading.Event()
        self._ended = False  # nobody takes commands any more
        self._failures = 0  # failed turns in a row
        self._num_steps = 0
        self._prefilled = (0, 0.0)  # tokens and seconds of steps that did not wait for the device
        self._thread = threading.Thread(name="cachesvc-engine")  # replaced by `start`

    # Any thread.

    def start(self, warm_up: Callable[[], None] = lambda: None) -> None:
        """Run `warm_up` on the engine thread, which also starts its arithmetic threads, then serve.

        Returns when warm. Raises what `warm_up` raises, and then the engine does not serve.
        """
        self._cache.start(on_load=self._wake.set)
        warm: Future[None] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(warm_up, warm), name="cachesvc-engine", daemon=True
        )
        self._thread.start()
        warm.result()

    def close(self, drain_s: float = 0.0) -> None:
        """Refuse new requests, give running ones `drain_s` seconds to finish, and abort the rest.

        The cache stays open. Its owner flushes and closes it.
        """
        self._intake.close()
        self._wake.set()
        give_up = time.monotonic() + drain_s
        while self._intake and self._thread.is_alive() and time.monotonic() < give_up:
            time.sleep(0.01)
        self._post(self._stop)
        if self._thread.is_alive():
            self._thread.join()
        self._ended = True
        self._take_last_commands()

    @property
    def failure(self) -> BaseException | None:
        """The error that ended the engine, if any. It serves nothing afterwards."""
        return self._intake.failed

    def submit(self, request: Request) -> None:
        """Queue a request. An accepted request gets an output with `last` set.

        Raises EmptyPrompt, PromptTooLong, InvalidParameter, UnknownAdapter, QueueFull,
        EngineClosed or EngineFailed.
        """
        self._intake.accept(request)
        at_s = self._clock_ns() / 1e9
        self._post(lambda: self._add(request, at_s))

    def predicted_wait_s(self, share: str, num_tokens: int) -> float:
        """See `Intake.predicted_wait_s`."""
        return self._intake.predicted_wait_s(share, num_tokens)

    def abort(
        self, request_id: str, reason: FinishReason = FinishReason.ABORT, index: int | None = None
    ) -> None:
        """End a request early, or one sequence of it. The last output carries `reason`.

        Ignores requests that have ended or are unknown.
        """
        self._post(lambda: self._abort(request_id, reason, index=index))

    def call(self, function: Callable[[BlockOperations], T]) -> "Future[T]":
        """Run `function` on the engine thread between two steps, to read or change the cache."""
        future: Future[T] = Future()
        if self.failure is not None:
            future.set_exception(EngineFailed(f"the engine has failed: {self.failure}"))
            return future

        def run() -> None:
            try:
                if self._ended:
                    raise EngineClosed("the engine is closed")
                future.set_result(function(self._cache.operations))
            except Exception as error:  # noqa: BLE001 - handed to who asked
                future.set_exception(error)

        self._post(run)
        if self._ended:  # perhaps after the last commands were taken
            self._take_last_commands()
        return future

    def stats(self) -> EngineStats:
        """A snapshot. Its counters may be one step apart."""
        scheduler = self._scheduler
        waiting = list(scheduler.waiting)
        loading = sum(s.state is SequenceState.LOADING for s in waiting)
        return EngineStats(
            num_running=len(scheduler.running),
            num_waiting=len(waiting) - loading,
            num_loading=loading,
            num_preemptions=scheduler.num_preemptions,
            num_steps=self._num_steps,
            prompt_tokens_computed=scheduler.prompt_tokens_computed,
            jumped_tokens=self._answers.jumped,
            cache=self._cache.stats(),
            failed=repr(self.failure) if self.failure else None,
        )

    def _post(self, command: Callable[[], None]) -> None:
        self._commands.append(command)
        self._wake.set()

    # The engine thread.

    def turn(self) -> bool:
        """Take commands, then run one step. False if there was nothing to compute.

        For the engine thread, and for simulations that drive an engine without one. Raises errors
        after which the engine cannot continue. Other errors are logged and fail as few requests as
        possible.
        """
        self._take_commands()
        try:
            computed = self._step()
        except Exception:
            self._failures += 1
            logger.exception("a turn of the engine failed")
            if self._failures >= MAX_FAILURES:
                raise
            everybody = self._failures > 1
            running = {each.request.request_id for each in self._scheduler.running}
            self._fail([*(self._answers.groups if everybody else running)], STEP_FAILED)
            return True
        if computed:
            self._failures = 0
        return computed

    def _take_last_commands(self) -> None:
        """Answer who called when the engine had ended. On any thread: nothing else is left."""
        while True:
            try:
                self._commands.popleft()()
            except IndexError:
                return
            except _Stopped:
                continue

    def _take_commands(self) -> None:
        while self._commands:
            try:
                self._commands.popleft()()
            except Exception:
                logger.exception("a command to the engine failed")

    def _run(self, warm_up: Callable[[], None], warm: "Future[None]") -> None:
        try:
            warm_up()
        except BaseException as error:  # noqa: BLE001 - handed to who starts the engine
            warm.set_exception(error)
            return
        warm.set_result(None)
        try:
            while True:
                self._gather()
                if not self.turn():
                    moving = self._cache.is_moving or self._answers.matching
                    if not moving:
                        self._cache.rest()
                    self._wake.wait(MOVING_S if moving else IDLE_S)
                    self._wake.clear()
        except _Stopped:
            pass
        except BaseException as error:  # the top of the thread: everything in flight must end
            logger.critical("the engine has failed", exc_info=error)
            self._intake.fail(error)
            self._fail_all(f"the engine has failed: {error}")

    def _gather(self) -> None:
        """Wait a moment, if nothing runs, for requests that usually follow the last answers."""
        waiting, running = self._scheduler.waiting, self._scheduler.running
        self._take_commands()
        while waiting and not running and (left_s := self._gathering.left_s(len(waiting))):
            self._wake.wait(left_s)
            self._wake.clear()
            self._take_commands()

    def _stop(self) -> None:
        self._fail_all("the server is shutting down", FinishReason.ABORT)
        raise _Stopped

    def _step(self) -> bool:
        """Run one step. False if there was nothing to compute."""
        if self._answers.matching:
            self._tell(self._answers.take_looks())
        self._cache.step()
        batch = self._scheduler.schedule()
        self._intake.backlog = self._scheduler.backlog()
        self._forget_left()
        if not batch.spans:
            return False
        started = time.perf_counter()
        sampled = self._computed(batch)
        self._observe(batch, time.perf_counter() - started)
        self._num_steps += 1
        outputs: list[StepOutput] = []
        for span, result in zip(batch.spans, sampled, strict=True):
            self._answers.take_in(span, result, outputs)
        self._forget_left()
        ended = sum(output.last for output in outputs)
        self._gathering.answered(ended, time.perf_counter() - started)
        self._tell(outputs)
        return True

    def _computed(self, batch: Batch) -> list[Sampled]:
        """The runner's results for the batch.

        If the runner fails, each span is tried alone, so that only the sequences at fault fail.
        Raises RunnerBroken if not even the runner's own probe can be computed.
        """
        try:
            return self._runner.step(batch)
        except Exception:
            logger.exception("a step failed; its sequences are tried one by one")
        sampled = [self._alone(span) for span in batch.spans]
        if all(one.error is not None for one in sampled):
            try:
                self._runner.probe()
            except Exception as error:
                raise RunnerBroken(f"the model can no longer compute anything: {error}") from error
        return sampled

    def _alone(self, span: Span) -> Sampled:
        try:
            [sampled] = self._runner.step(Batch([span]))
        except Exception:
            logger.exception(f"sequence {span.sequence_id} cannot be computed")
            return Sampled(span.sequence_id, None, error=STEP_FAILED)
        return sampled

    def _observe(self, batch: Batch, seconds: float) -> None:
        """Learn the prefill rate from steps that mostly prefill.

        Only a step that chooses a token waits for the device, and for all work launched before it.
        So steps are added up until one chooses a token.
        """
        if batch.num_tokens < 2 * len(batch.spans) + self._cache.layout.block_size:
            self._prefilled = (0, 0.0)
            return
        num_tokens, before_s = self._prefilled
        num_tokens, seconds = num_tokens + batch.num_tokens, before_s + seconds
        if any(span.sample for span in batch.spans):
            self._cache.economy.observe_prefill(num_tokens, seconds)
            num_tokens, seconds = 0, 0.0
        self._prefilled = (num_tokens, seconds)

    def _tell(self, outputs: Seq[StepOutput]) -> None:
        if outputs:
            self._on_outputs(outputs)

    def _forget_left(self) -> None:
        left, states = self._scheduler.left, self._scheduler.states
        if states is not None:
            states.keep(self._runner)
        while left:
            self._runner.forget(left.pop())
        if states is not None:
            states.resume(self._runner)

    # Commands.

    def _add(self, request: Request, at_s: float) -> None:
        self._intake.queued(request)
        self._gathering.came(at_s)
        outputs = self._answers.begin(request)
        self._forget_left()
        self._tell(outputs)
        if self.failure is not None:  # it was accepted just before the engine failed
            error = f"the engine failed: {self.failure}"
            self._abort(request.request_id, FinishReason.ERROR, error)

    def _abort(
        self,
        request_id: str,
        reason: FinishReason,
        error: str | None = None,
        index: int | None = None,
    ) -> None:
        outputs = self._answers.end(request_id, reason, error, index)
        self._forget_left()
        self._tell(outputs)

    def _fail(self, request_ids: Seq[str], message: str) -> None:
        for request_id in request_ids:
            self._abort(request_id, FinishReason.ERROR, message)

    def _fail_all(self, message: str, reason: FinishReason = FinishReason.ERROR) -> None:
        for request_id in list(self._answers.groups):
            self._abort(request_id, reason, message)
        while self.failure is not None and self._commands:
            with suppress(_Stopped):
                self._commands.popleft()()


class RunnerBroken(Exception):
    """The runner can no longer compute anything."""


class _Stopped(BaseException):
    """Ends the step loop after a close. Not an Exception, so handlers of failures do not see it."""
