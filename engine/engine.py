"""The step loop: one thread that owns the scheduler, the cache and the runner.

Other threads speak to it through `submit`, `abort` and `call`, and hear from it through
`on_outputs`, once per step. Two crossings per request, however many tokens it has.

    take commands ─► cache.step ─► schedule ─► runner.step ─► take in the results ─► on_outputs
"""

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from engine.batch import Batch, Sampled, Span
from engine.errors import (
    EmptyPrompt,
    EngineClosed,
    EngineFailed,
    InvalidParameter,
    PromptTooLong,
    QueueFull,
    UnknownAdapter,
)
from engine.request import FinishReason, Request, SamplingParams, StepOutput
from engine.scheduling.group import Group, unbegun
from engine.scheduling.scheduler import Scheduler, SchedulerSettings
from engine.scheduling.sequence import Sequence, SequenceState
from engine.scheduling.shares import Backlog
from engine.structure import GrammarState
from tiers.blocks.contents import refusal
from tiers.cache import CacheStats, TieredCache

logger = logging.getLogger(__name__)

MAX_JUMP = 256  # forced tokens appended at once
MAX_FAILURES = 3  # turns in a row that may fail before the engine gives up
STEP_FAILED = "the engine failed in a step; see the server's log"
IDLE_S = 0.5  # how often an idle engine looks around
LOOK_WAIT_S = 0.005  # a step waits so long for grammars to say what may come next
MOVING_S = 0.002  # the same while loads or stores are under way; their end also wakes it
T = TypeVar("T")


class Runner(Protocol):
    """What the engine asks of the compute half; see `engine.execution.runner`."""

    def step(self, batch: Batch) -> list[Sampled]: ...

    def forget(self, sequence_id: int) -> None: ...

    def probe(self) -> None:
        """Raises where the model can compute nothing any more; changes nobody's KV."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Bounds of the engine, and what it must know of the model."""

    scheduler: SchedulerSettings = field(default_factory=SchedulerSettings)
    max_waiting: int = 1024
    max_context: int = 1 << 20
    eos_token_ids: frozenset[int] = frozenset()
    adapters: Mapping[str, bytes] = field(default_factory=dict)  # digest by name; may change
    jump_forward: bool = True  # compute the tokens that a grammar forces in one step
    check_params: Callable[[SamplingParams], None] = lambda params: None  # raises InvalidParameter


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot of the engine, taken between steps."""

    num_running: int
    num_waiting: int
    num_loading: int
    num_preemptions: int
    num_steps: int
    prompt_tokens_computed: int
    generated_tokens: int
    jumped_tokens: int  # of these, forced by a grammar: decode steps that were saved
    cache: CacheStats
    failed: str | None = None


class Engine:
    """Serves requests until closed. Invariant: every submitted request gets one `last` output."""

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
        cache.on_purge(self._scheduler.disown)
        size = cache.layout.block_size
        # One block stays free, for the copy of a shared tail that a sequence may have to make.
        self.max_tokens = min(settings.max_context, (cache.pool.num_blocks - 1) * size)
        self._groups: dict[str, Group] = {}
        self._sequences: dict[int, Sequence] = {}
        self._matching: list[Sequence] = []  # whose grammar looks for what may come next
        self._next_id = 0
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = threading.Event()
        self._lock = threading.Lock()
        self._submitted: set[str] = set()  # requests in flight; guarded by the lock
        self._arriving: Counter[str] = Counter()  # tokens not queued yet, by share; by the lock
        self._backlog = Backlog()
        self._closing = False
        self._failed: BaseException | None = None
        self._failures = 0  # turns in a row
        self._num_steps = 0
        self._prefilled = (0, 0.0)  # tokens and seconds of steps that waited for nothing
        self._generated = 0
        self._jumped = 0
        self._thread = threading.Thread(name="cachesvc-engine")  # until `start` makes it

    # Any thread.

    def start(self, warm_up: Callable[[], None] = lambda: None) -> None:
        """Run `warm_up` on the engine's thread, whose arithmetic threads it so makes, then serve.

        Returns when it is warm; raises what `warm_up` raises, and serves nothing then.
        """
        self._cache.start(on_load=self._wake.set)
        warm: Future[None] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(warm_up, warm), name="cachesvc-engine", daemon=True
        )
        self._thread.start()
        warm.result()

    def close(self, drain_s: float = 0.0) -> None:
        """Refuse new requests, let running ones finish for `drain_s` seconds, abort the rest.

        The cache stays open, for its owner to flush and close.
        """
        with self._lock:
            self._closing = True
        self._wake.set()
        give_up = time.monotonic() + drain_s
        while self._submitted and self._thread.is_alive() and time.monotonic() < give_up:
            time.sleep(0.01)
        self._post(self._stop)
        if self._thread.is_alive():
            self._thread.join()

    @property
    def failure(self) -> BaseException | None:
        """What ended the engine, if something did. It serves nothing from then on."""
        return self._failed

    def submit(self, request: Request) -> None:
        """Queue a request. Raises EmptyPrompt, PromptTooLong, InvalidParameter, UnknownAdapter,
        QueueFull, EngineClosed or EngineFailed; what it accepts ends in an output with `last` set.
        """
        num_tokens = len(request.tokens)
        if num_tokens == 0:
            raise EmptyPrompt("the prompt has no tokens; send at least one")
        if num_tokens >= self.max_tokens:
            raise PromptTooLong(
                f"the prompt has {num_tokens} tokens, and at most {self.max_tokens - 1} fit the "
                f"model's context and the device cache with one token to generate; shorten it"
            )
        self._settings.check_params(request.params)
        self._check_adapter(request)
        if wrong := refusal(request.contents, num_tokens):
            raise InvalidParameter(f"contents[{wrong[0]}] {wrong[1]}", param="contents")
        with self._lock:
            if self._failed is not None:
                raise EngineFailed(f"the engine has failed: {self._failed}") from self._failed
            if self._closing:
                raise EngineClosed("the engine is shutting down")
            if len(self._submitted) >= self._settings.max_waiting:
                raise QueueFull(
                    f"{len(self._submitted)} requests are in flight, as many as are allowed; "
                    f"try again later"
                )
            assert request.request_id not in self._submitted, f"{request.request_id} runs already"
            self._submitted.add(request.request_id)
            self._arriving[request.share] += num_tokens
        self._post(lambda: self._add(request))

    def predicted_wait_s(self, share: str, num_tokens: int) -> float:
        """How long a request of `share` would wait before it begins, if it were submitted now.

        From the work that waits and the rate at which such work began lately; 0 while nothing is
        known. For whoever would rather refuse early than let a client wait in vain.
        """
        backlog = self._backlog
        waiting = Counter(backlog.waiting)
        with self._lock:
            waiting.update(self._arriving)
        return Backlog(waiting, backlog.tokens_per_s).wait_s(share, num_tokens)

    def _check_adapter(self, request: Request) -> None:
        """Raises UnknownAdapter. That the scope names the adapter keeps its KV apart."""
        adapters = self._settings.adapters
        if request.adapter is not None and request.adapter not in adapters:
            served = ", ".join(adapters) or "none"
            raise UnknownAdapter(
                f"no adapter {request.adapter!r} is loaded (loaded: {served})", param="model"
            )
        digest = adapters[request.adapter] if request.adapter is not None else b""
        assert request.scope.adapter == digest, (request.adapter, request.scope)

    def abort(
        self,
        request_id: str,
        reason: FinishReason = FinishReason.ABORT,
        index: int | None = None,
    ) -> None:
        """End a request early, or one sequence of it; the last output says `reason`.

        What has ended already, or was never known, is ignored.
        """
        self._post(lambda: self._abort(request_id, reason, index=index))

    def call(self, function: Callable[[TieredCache], T]) -> "Future[T]":
        """Run `function` on the engine thread between two steps: to look at or change the cache."""
        future: Future[T] = Future()
        if self._failed is not None:
            future.set_exception(EngineFailed(f"the engine has failed: {self._failed}"))
            return future

        def run() -> None:
            try:
                future.set_result(function(self._cache))
            except Exception as error:  # noqa: BLE001 - handed to who asked
                future.set_exception(error)

        self._post(run)
        return future

    def stats(self) -> EngineStats:
        """A snapshot; counters may be a step apart."""
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
            generated_tokens=self._generated,
            jumped_tokens=self._jumped,
            cache=self._cache.stats(),
            failed=repr(self._failed) if self._failed else None,
        )

    def _post(self, command: Callable[[], None]) -> None:
        self._commands.append(command)
        self._wake.set()

    # The engine thread.

    def turn(self) -> bool:
        """Take commands, then one step; False when there was nothing to compute.

        For the engine thread, and for simulations that drive an engine without one. Raises what the
        engine cannot go on after; whatever else fails is logged, and fails as few requests as can.
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
            self._fail([*self._groups] if everybody else self._running_requests(), STEP_FAILED)
            return True
        if computed:
            self._failures = 0
        return computed

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
                if not self.turn():
                    moving = self._cache.is_moving or self._matching
                    self._wake.wait(MOVING_S if moving else IDLE_S)
                    self._wake.clear()
        except _Stopped:
            pass
        except BaseException as error:  # the top of the thread: everything in flight must end
            logger.critical("the engine has failed", exc_info=error)
            with self._lock:
                self._failed = error
            self._fail_all(f"the engine has failed: {error}")

    def _stop(self) -> None:
        self._fail_all("the server is shutting down", FinishReason.ABORT)
        raise _Stopped

    def _step(self) -> bool:
        """One step; False when there was nothing to compute."""
        self._take_looks()
        self._cache.step()
        batch = self._scheduler.schedule()
        self._backlog = self._scheduler.backlog()
        self._forget_left()
        if not batch.spans:
            return False
        started = time.perf_counter()
        sampled = self._computed(batch)
        self._observe(batch, time.perf_counter() - started)
        self._num_steps += 1
        outputs: list[StepOutput] = []
        for span, result in zip(batch.spans, sampled, strict=True):
            self._take_in_or_fail(span, result, outputs)
        self._forget_left()
        if outputs:
            self._on_outputs(outputs)
        return True

    def _take_looks(self) -> None:
        """Go on with the sequences whose grammar has said what may come next. Waits for the others
        a moment: an ordinary look takes less, and a hostile one's sequence sits steps out."""
        if not self._matching:
            return
        give_up = time.monotonic() + LOOK_WAIT_S
        outputs: list[StepOutput] = []
        matching, self._matching = self._matching, []
        for sequence in matching:
            if sequence.state is SequenceState.FINISHED:
                continue
            assert sequence.grammar is not None
            if sequence.state in (SequenceState.PREFILL, SequenceState.DECODE) and (
                sequence.grammar.wait(max(0.0, give_up - time.monotonic()))
            ):
                self._jump(sequence, sequence.grammar, outputs)
            else:
                self._matching.append(sequence)
        if outputs:
            self._on_outputs(outputs)

    def _jump(self, sequence: Sequence, state: GrammarState, outputs: list[StepOutput]) -> None:
        """Append what the grammar forces now that it is known, or end where nothing can follow."""
        request_id = sequence.request.request_id
        if state.stuck is not None:
            group = self._groups[request_id]
            self._end(sequence, FinishReason.ERROR)
            now_ns = self._clock_ns()
            outputs.append(group.output(sequence, None, now_ns, error=state.stuck))
            if group.done:
                self._close_group(group)
            return
        if not (self._jumps(sequence) and state.forced):
            return
        tokens, finish, error = self._append(sequence, state.forced[0])
        self._jumped += len(tokens)
        self._tell(sequence, None, tokens, finish, error, outputs)

    def _jumps(self, sequence: Sequence) -> bool:
        return self._settings.jump_forward and sequence.params.logprobs is None

    def _computed(self, batch: Batch) -> list[Sampled]:
        """What the runner makes of the batch. Where it fails, each span is tried alone, so that
        only the sequences at fault are failed. Raises RunnerBroken where nothing can be computed,
        not even what nobody asked for."""
        try:
            return self._runner.step(batch)
        except Exception:
            logger.exception("a step failed; its sequences are tried one by one")
        sampled = [self._alone(span) for span in batch.spans]
        if all(one.error is not None for one in sampled):
            try:
                self._runner.probe()
            except Exception as error:
                raise RunnerBroken(f"the model can compute nothing any more: {error}") from error
        return sampled

    def _alone(self, span: Span) -> Sampled:
        try:
            [sampled] = self._runner.step(Batch([span]))
        except Exception:
            logger.exception(f"sequence {span.sequence_id} cannot be computed")
            return Sampled(span.sequence_id, None, error=STEP_FAILED)
        return sampled

    def _take_in_or_fail(self, span: Span, result: Sampled, outputs: list[StepOutput]) -> None:
        """Take in a span's result; what goes wrong with it fails its request alone."""
        sequence = self._sequences.get(span.sequence_id)
        if sequence is None:
            return  # its request failed with another of its sequences
        request_id = sequence.request.request_id
        try:
            if result.error is None:
                self._take_in(span, result, outputs)
                return
            error = result.error
        except Exception:
            logger.exception(f"request {request_id} failed")
            error = STEP_FAILED
        outputs += self._ended(request_id, FinishReason.ERROR, error)
        if result.suspect:  # whoever asks for the prefix next computes it anew
            self._cache.evict(sequence.chain.keys)

    def _observe(self, batch: Batch, seconds: float) -> None:
        """Learn the prefill rate from steps that mostly prefill.

        Only a step that chooses a token waits for the device; what was launched before it is paid
        for there. So steps are added up until one does.
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

    def _take_in(self, span: Span, result: Sampled, outputs: list[StepOutput]) -> None:
        sequence = self._sequences[span.sequence_id]
        self._scheduler.computed(sequence, span)
        sequence.prompt_logprobs += result.targets
        if result.token is None:
            if span.start + len(span.tokens) == sequence.num_tokens:
                self._end_unsampled(sequence, outputs)
            return
        group = self._groups[sequence.request.request_id]
        now_ns = self._clock_ns()
        if sequence.state is SequenceState.PREFILL:
            sequence.state = SequenceState.DECODE
            sequence.first_token_ns = sequence.first_token_ns or now_ns
            self._fork_due(group, sequence)
        tokens, finish, error = self._append(sequence, result.token)
        self._jumped += len(tokens) - 1
        self._tell(sequence, result, tokens, finish, error, outputs)

    def _tell(
        self,
        sequence: Sequence,
        result: Sampled | None,
        tokens: list[int],
        finish: FinishReason | None,
        error: str | None,
        outputs: list[StepOutput],
    ) -> None:
        """Count and put out what was appended, and close what ends with it."""
        group = self._groups[sequence.request.request_id]
        self._generated += len(tokens)
        group.num_output += len(tokens)
        if finish is not None:
            self._end(sequence, finish)
        now_ns = self._clock_ns()
        outputs.append(group.output(sequence, result, now_ns, tokens=tokens, error=error))
        if group.done:
            self._close_group(group)

    def _fork_due(self, group: Group, sequence: Sequence) -> list[Sequence]:
        """The other samples of a prompt that stands."""
        twins = list(group.due_twins(sequence, self._new_id))
        for twin in twins:
            self._sequences[twin.sequence_id] = twin
            self._scheduler.fork(sequence, twin)
        return twins

    def _end_unsampled(self, sequence: Sequence, outputs: list[StepOutput]) -> None:
        """The prompt stands, and nothing was to be generated."""
        group = self._groups[sequence.request.request_id]
        now_ns = self._clock_ns()
        for one in [sequence, *self._fork_due(group, sequence)]:
            one.first_token_ns = one.first_token_ns or now_ns
            self._end(one, FinishReason.LENGTH)
            outputs.append(group.output(one, None, now_ns))
        self._close_group(group)

    def _append(
        self, sequence: Sequence, token: int
    ) -> tuple[list[int], FinishReason | None, str | None]:
        """Append a token, and those that a grammar then forces: what was appended, whether the
        sequence ends with it, and why where that is an error."""
        tokens: list[int] = []
        jumps = self._jumps(sequence)
        while True:
            sequence.append(token)
            tokens.append(token)
            finish = self._finish_of(sequence, token)
            state = sequence.grammar
            if finish is not None or state is None:
                return tokens, finish, None
            state.accept(token)
            if not state.ready:
                self._matching.append(sequence)
                return tokens, None, None
            if state.stuck is not None:
                return tokens, FinishReason.ERROR, state.stuck
            if not (jumps and state.forced) or len(tokens) > MAX_JUMP:
                return tokens, None, None
            token = state.forced[0]

    def _finish_of(self, sequence: Sequence, token: int) -> FinishReason | None:
        params = sequence.params
        generated = sequence.num_generated
        if sequence.grammar is not None and token in self._settings.eos_token_ids:
            return FinishReason.STOP  # the grammar allows the end only where it has ended
        if generated >= params.min_tokens:
            if token in params.stop_token_ids:
                return FinishReason.STOP
            if token in self._settings.eos_token_ids and not params.ignore_eos:
                return FinishReason.STOP
        if params.max_tokens is not None and generated >= params.max_tokens:
            return FinishReason.LENGTH
        return FinishReason.LENGTH if sequence.num_tokens >= self.max_tokens else None

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        self._scheduler.remove(sequence, reason)
        del self._sequences[sequence.sequence_id]
        self._groups[sequence.request.request_id].ended(sequence)

    def _close_group(self, group: Group) -> None:
        del self._groups[group.request.request_id]
        with self._lock:
            self._submitted.discard(group.request.request_id)

    def _forget_left(self) -> None:
        left = self._scheduler.left
        while left:
            self._runner.forget(left.pop())

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id

    # Commands.

    def _add(self, request: Request) -> None:
        with self._lock:
            self._arriving[request.share] -= len(request.tokens)
            if not self._arriving[request.share]:
                del self._arriving[request.share]
        try:
            self._begin(request)
        except Exception:
            logger.exception(f"request {request.request_id} cannot begin")
            self._refuse(request, STEP_FAILED)

    def _refuse(self, request: Request, error: str) -> None:
        """Answer a request that could not begin."""
        group = self._groups.get(request.request_id)
        if group is not None and group.sequences:
            self._fail([request.request_id], error)
            return
        self._groups.pop(request.request_id, None)
        with self._lock:
            self._submitted.discard(request.request_id)
        self._on_outputs([unbegun(request, error, self._clock_ns())])

    def _begin(self, request: Request) -> None:
        group = Group(request, self._cache.layout.block_size)
        self._groups[request.request_id] = group
        sequence = group.first(self._new_id())
        self._sequences[sequence.sequence_id] = sequence
        self._scheduler.add(sequence)
        if self._failed is not None:  # accepted just before the engine failed
            error = f"the engine failed: {self._failed}"
            self._abort(request.request_id, FinishReason.ERROR, error)
        elif sequence.grammar is not None and sequence.grammar.stuck is not None:
            self._abort(request.request_id, FinishReason.ERROR, sequence.grammar.stuck)

    def _abort(
        self,
        request_id: str,
        reason: FinishReason,
        error: str | None = None,
        index: int | None = None,
    ) -> None:
        outputs = self._ended(request_id, reason, error, index)
        if outputs:
            self._on_outputs(outputs)

    def _ended(
        self,
        request_id: str,
        reason: FinishReason,
        error: str | None = None,
        index: int | None = None,
    ) -> list[StepOutput]:
        """End a request, or one sequence of it, where it is; what is to be told of it."""
        group = self._groups.get(request_id)
        if group is None:
            return []
        now_ns = self._clock_ns()
        outputs = []
        for sequence in [s for s in group.sequences if index in (None, s.index)]:
            self._end(sequence, reason)
            outputs.append(group.output(sequence, None, now_ns, error=error))
        if group.done:
            self._close_group(group)
        self._forget_left()
        return outputs

    def _running_requests(self) -> list[str]:
        return list({s.request.request_id for s in self._scheduler.running})

    def _fail(self, request_ids: Seq[str], message: str) -> None:
        for request_id in request_ids:
            self._abort(request_id, FinishReason.ERROR, message)

    def _fail_all(self, message: str, reason: FinishReason = FinishReason.ERROR) -> None:
        for request_id in list(self._groups):
            self._abort(request_id, reason, message)
        while self._failed is not None and self._commands:
            with suppress(_Stopped):
                self._commands.popleft()()


class RunnerBroken(Exception):
    """The runner can compute nothing any more, whatever it is asked."""


class _Stopped(BaseException):
    """Ends the step loop after a close; no failure, so nothing that handles those sees it."""
