"""The answers to requests in flight: each step's tokens, and how each sequence ends.

Engine thread only. Results go back to the engine as `StepOutput`s.
"""

import logging
import time
from collections.abc import Callable

from engine.batch import Sampled, Span
from engine.request import FinishReason, Request, StepOutput
from engine.scheduling.group import SequenceGroup, unbegun
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import DECODE, FINISHED, PREFILL, Sequence
from engine.settings import EngineSettings
from engine.structure import GrammarState
from tiers.cache import TieredCache

logger = logging.getLogger(__name__)

MAX_JUMP = 256  # forced tokens appended at once
STEP_FAILED = "the engine failed in a step; see the server's log"
LOOK_WAIT_S = 0.005  # how long a step waits for grammars to find the allowed tokens


class Answers:
    """The requests in flight by id, and their sequences by number.

    Invariant: every request that was begun or refused gets one output with `last` set.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        cache: TieredCache,
        settings: EngineSettings,
        *,
        max_tokens: int,
        clock_ns: Callable[[], int],
        on_ended: Callable[[str], None],
    ) -> None:
        """`on_ended` receives the id of each request that has had its last output."""
        self.groups: dict[str, SequenceGroup] = {}
        self.sequences: dict[int, Sequence] = {}
        self.jumped = 0  # tokens forced by grammars
        self._scheduler = scheduler
        self._cache = cache
        self._settings = settings
        self._max_tokens = max_tokens
        self._clock_ns = clock_ns
        self._on_ended = on_ended
        self._matching: list[Sequence] = []  # sequences waiting for their grammar
        self._next_id = 0

    @property
    def matching(self) -> bool:
        """Whether a grammar is still finding the allowed tokens."""
        return bool(self._matching)

    def begin(self, request: Request) -> list[StepOutput]:
        """Begin a request. An error in it becomes its answer."""
        try:
            return self._begin(request)
        except Exception:
            logger.exception(f"request {request.request_id} cannot begin")
        group = self.groups.get(request.request_id)
        if group is not None and group.sequences:
            return self.end(request.request_id, FinishReason.ERROR, STEP_FAILED)
        self.groups.pop(request.request_id, None)
        self._on_ended(request.request_id)
        return [unbegun(request, STEP_FAILED, self._clock_ns())]

    def _begin(self, request: Request) -> list[StepOutput]:
        group = SequenceGroup(request, self._cache.layout.block_size)
        self.groups[request.request_id] = group
        sequence = group.first(self._new_id())
        self.sequences[sequence.sequence_id] = sequence
        self._scheduler.add(sequence)
        if sequence.grammar is not None and sequence.grammar.stuck is not None:
            return self.end(request.request_id, FinishReason.UNMATCHED, sequence.grammar.stuck)
        return []

    def end(
        self,
        request_id: str,
        reason: FinishReason,
        error: str | None = None,
        index: int | None = None,
    ) -> list[StepOutput]:
        """End a request, or one sequence of it, at any stage. Returns the outputs."""
        group = self.groups.get(request_id)
        if group is None:
            return []
        now_ns = self._clock_ns()
        outputs = []
        for sequence in [s for s in group.sequences if index in (None, s.index)]:
            self._end(sequence, reason)
            outputs.append(group.output(sequence, None, now_ns, error=error))
        if group.done:
            self._close_group(group)
        return outputs

    def take_in(self, span: Span, result: Sampled, outputs: list[StepOutput]) -> None:
        """Process a span's result. An error in it fails only its request."""
        sequence = self.sequences.get(span.sequence_id)
        if sequence is None:
            return  # its request failed because of another sequence
        request_id = sequence.request.request_id
        try:
            if result.error is None:
                self._take_in(span, result, outputs)
                return
            error = result.error
        except Exception:
            logger.exception(f"request {request_id} failed")
            error = STEP_FAILED
        outputs += self.end(request_id, FinishReason.ERROR, error)
        if result.suspect:  # the next request for the prefix computes it anew
            self._cache.operations.evict(sequence.chain.keys)

    def take_looks(self) -> list[StepOutput]:
        """Continue the sequences whose grammar has found the allowed tokens.

        Waits a moment for the others. An ordinary search takes less than that. The sequence of a
        hostile grammar sits steps out.
        """
        give_up = time.monotonic() + LOOK_WAIT_S
        outputs: list[StepOutput] = []
        matching, self._matching = self._matching, []
        for sequence in matching:
            if sequence.state is FINISHED:
                continue
            assert sequence.grammar is not None
            if sequence.state in (PREFILL, DECODE) and (
                sequence.grammar.wait(max(0.0, give_up - time.monotonic()))
            ):
                self._jump(sequence, sequence.grammar, outputs)
            else:
                self._matching.append(sequence)
        return outputs

    def _take_in(self, span: Span, result: Sampled, outputs: list[StepOutput]) -> None:
        sequence = self.sequences[span.sequence_id]
        self._scheduler.computed(sequence, span)
        sequence.prompt_logprobs += result.targets
        if result.token is None:
            if span.start + len(span.tokens) == sequence.num_tokens:
                self._end_unsampled(sequence, outputs)
            return
        if sequence.state is PREFILL:
            sequence.state = DECODE
            sequence.first_token_ns = sequence.first_token_ns or self._clock_ns()
            self._fork_due(self.groups[sequence.request.request_id], sequence)
        tokens, finish, error = self._append(sequence, result.token)
        self.jumped += len(tokens) - 1
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
        """Count and output the appended tokens, and close the sequences that end with them."""
        group = self.groups[sequence.request.request_id]
        group.num_output += len(tokens)
        if finish is not None:
            self._end(sequence, finish)
        now_ns = self._clock_ns()
        outputs.append(group.output(sequence, result, now_ns, tokens=tokens, error=error))
        if group.done:
            self._close_group(group)

    def _jump(self, sequence: Sequence, state: GrammarState, outputs: list[StepOutput]) -> None:
        """Append the tokens that the grammar forces, now that they are known, or end if nothing can
        follow."""
        request_id = sequence.request.request_id
        if state.stuck is not None:
            group = self.groups[request_id]
            self._end(sequence, FinishReason.UNMATCHED)
            now_ns = self._clock_ns()
            outputs.append(group.output(sequence, None, now_ns, error=state.stuck))
            if group.done:
                self._close_group(group)
            return
        if not (self._jumps(sequence) and state.forced):
            return
        tokens, finish, error = self._append(sequence, state.forced[0])
        self.jumped += len(tokens)
        self._tell(sequence, None, tokens, finish, error, outputs)

    def _jumps(self, sequence: Sequence) -> bool:
        return self._settings.jump_forward and sequence.params.logprobs is None

    def _append(
        self, sequence: Sequence, token: int
    ) -> tuple[list[int], FinishReason | None, str | None]:
        """Append a token, and those that a grammar then forces.

        Returns the appended tokens, whether the sequence ends with them, and the reason if that is
        an error.
        """
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
                return tokens, FinishReason.UNMATCHED, state.stuck
            if not (jumps and state.forced) or len(tokens) > MAX_JUMP:
                return tokens, None, None
            token = state.forced[0]

    def _finish_of(self, sequence: Sequence, token: int) -> FinishReason | None:
        params = sequence.params
        generated = sequence.num_generated
        if sequence.grammar is not None and token in self._settings.eos_token_ids:
            return FinishReason.STOP  # the grammar allows the end only once it is complete
        if generated >= params.min_tokens:
            if token in params.stop_token_ids:
                return FinishReason.STOP
            if token in self._settings.eos_token_ids and not params.ignore_eos:
                return FinishReason.STOP
        if params.max_tokens is not None and generated >= params.max_tokens:
            return FinishReason.LENGTH
        return FinishReason.LENGTH if sequence.num_tokens >= self._max_tokens else None

    def _fork_due(self, group: SequenceGroup, sequence: Sequence) -> list[Sequence]:
        """Fork the other samples of a computed prompt."""
        twins = list(group.due_twins(sequence, self._new_id))
        for twin in twins:
            self.sequences[twin.sequence_id] = twin
            self._scheduler.fork(sequence, twin)
        return twins

    def _end_unsampled(self, sequence: Sequence, outputs: list[StepOutput]) -> None:
        """End a sequence whose prompt is computed and that generates nothing."""
        group = self.groups[sequence.request.request_id]
        now_ns = self._clock_ns()
        for one in [sequence, *self._fork_due(group, sequence)]:
            one.first_token_ns = one.first_token_ns or now_ns
            self._end(one, FinishReason.LENGTH)
            outputs.append(group.output(one, None, now_ns))
        self._close_group(group)

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        self._scheduler.remove(sequence, reason)
        del self.sequences[sequence.sequence_id]
        self.groups[sequence.request.request_id].ended(sequence)

    def _close_group(self, group: SequenceGroup) -> None:
        del self.groups[group.request.request_id]
        self._on_ended(group.request.request_id)

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id
