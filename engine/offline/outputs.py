"""Inputs and answers of the offline class. Turns a request's outputs into an answer.

Used by `engine.offline.llm` on its caller's thread.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from engine.errors import EngineClosed, EngineFailed, InvalidParameter
from engine.request import (
    FinishReason,
    Request,
    StepOutput,
    Timeline,
    TokenCounts,
    TokenLogprob,
)
from engine.text.detokenizer import IncrementalDetokenizer
from engine.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One sample. `token_ids` include the token that ended it. `text` stops before it.

    `stop_reason` is the stop string or stop token found, or None. `cumulative_logprob` and
    `logprobs` are None unless `SamplingParams.logprobs` requests them.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    cumulative_logprob: float | None = None
    logprobs: list[TokenLogprob] | None = None


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """The LoRA adapter to answer with, in vLLM's form.

    `lora_path` is a folder or a hub id. It is read on first use and kept until the LLM is closed.
    Name and number are only labels: adapters differ by content.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Where the time went, in seconds. `ttft_s` counts from arrival, so it includes the next three.

    `time_per_output_token_s` is the longest sample's, after its first token. None if it has only
    one.
    """

    ttft_s: float
    queue_s: float
    load_s: float
    prefill_s: float
    time_per_output_token_s: float | None
    total_s: float


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The answer to one prompt. `prompt` is None if token ids were given.

    `hit_tokens` counts by tier the prompt tokens that came from the cache. They sum to
    `num_cached_tokens`. `prompt_logprobs` is None unless requested, and its first entry is always
    None. `num_jumped_tokens` counts the decode steps saved by structured output.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[TokenLogprob | None] | None
    outputs: list[CompletionOutput]
    num_cached_tokens: int
    hit_tokens: Mapping[str, int]
    num_jumped_tokens: int
    metrics: RequestMetrics
    finished: bool = True


@dataclass(slots=True)
class _Sample:
    """One sequence so far."""

    detokenizer: IncrementalDetokenizer
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: FinishReason | None = None
    timeline: Timeline = field(default_factory=Timeline)

    def take(self, output: StepOutput) -> bool:
        """Add an output. True if a stop string ended the sequence here while the engine still runs
        it."""
        if self.finish is not None:
            return False  # computed before the engine heard of the end
        self.timeline = output.timeline
        self.tokens += output.tokens
        self.logprobs += output.logprobs
        # The end-of-sequence or stop token counts but is not text.
        shown = output.tokens[:-1] if output.finish is FinishReason.STOP else output.tokens
        self.text += self.detokenizer.feed(shown)
        if self.detokenizer.stopped:
            self.finish = FinishReason.STOP
            return output.finish is None
        if output.finish is not None:
            self.finish = output.finish
            self.text += self.detokenizer.flush()
        return False


class PendingRequest:
    """A request in flight, and its outputs so far."""

    def __init__(self, request: Request, prompt: str | None, tokenizer: Tokenizer) -> None:
        self.request = request
        self.done = False
        self._prompt = prompt
        self._counts = TokenCounts(prompt=len(request.tokens))
        self._num_jumped = 0
        self._prompt_logprobs: list[TokenLogprob | None] = [None]  # the first token has none
        stop = request.params.stop
        self._samples = [
            _Sample(IncrementalDetokenizer(tokenizer, stop)) for _ in range(request.params.n)
        ]

    def take(self, output: StepOutput) -> bool:
        """Add an output. True if its sequence must be stopped in the engine.

        Raises EngineFailed or EngineClosed if the engine ended an unfinished request, and
        InvalidParameter if its grammar cannot be followed.
        """
        if output.finish is FinishReason.UNMATCHED:
            raise InvalidParameter(output.error or "the grammar cannot be followed")
        if output.finish is FinishReason.ERROR:
            raise EngineFailed(output.error or "the engine failed")
        if output.finish is FinishReason.ABORT:
            raise EngineClosed(output.error or "the request was aborted")
        self.done = output.last
        self._counts = output.counts
        self._num_jumped += output.num_jumped
        self._prompt_logprobs += output.prompt_logprobs
        return self._samples[output.index].take(output)

    def result(self) -> RequestOutput:
        """The answer. Call it only once `done`."""
        counts, asked = self._counts, self.request.params.prompt_logprobs
        return RequestOutput(
            request_id=self.request.request_id,
            prompt=self._prompt,
            prompt_token_ids=list(self.request.tokens),
            prompt_logprobs=self._prompt_logprobs if asked is not None else None,
            outputs=[self._completion(index) for index in range(len(self._samples))],
            num_cached_tokens=counts.hit,
            hit_tokens={
                "device": counts.hit_device,
                "host": counts.hit_host,
                "disk": counts.hit_disk,
            },
            num_jumped_tokens=self._num_jumped,
            metrics=_metrics(self._samples),
        )

    def _completion(self, index: int) -> CompletionOutput:
        sample = self._samples[index]
        assert sample.finish is not None, index
        asked = self.request.params.logprobs is not None
        return CompletionOutput(
            index=index,
            text=sample.text,
            token_ids=sample.tokens,
            finish_reason=sample.finish,
            stop_reason=self._stop_reason(sample),
            cumulative_logprob=sum(p.logprob for p in sample.logprobs) if asked else None,
            logprobs=sample.logprobs if asked else None,
        )

    def _stop_reason(self, sample: _Sample) -> str | int | None:
        if sample.detokenizer.stop_string is not None:
            return sample.detokenizer.stop_string
        stopped = sample.finish is FinishReason.STOP
        last = sample.tokens[-1] if sample.tokens else None
        return last if stopped and last in self.request.params.stop_token_ids else None


def _metrics(samples: Seq[_Sample]) -> RequestMetrics:
    """The request's metrics. The first sample computes the prompt. The longest gives the token
    rate."""
    first = samples[0].timeline
    longest = max(samples, key=lambda sample: len(sample.tokens))
    steps = len(longest.tokens) - 1
    decode_ns = longest.timeline.last_token_ns - longest.timeline.first_token_ns
    end_ns = max(sample.timeline.last_token_ns for sample in samples)
    return RequestMetrics(
        ttft_s=(first.first_token_ns - first.arrival_ns) / 1e9,
        queue_s=(first.admitted_ns - first.arrival_ns) / 1e9,
        load_s=(first.loaded_ns - first.admitted_ns) / 1e9,
        prefill_s=(first.first_token_ns - first.loaded_ns) / 1e9,
        time_per_output_token_s=decode_ns / steps / 1e9 if steps > 0 else None,
        total_s=(end_ns - first.arrival_ns) / 1e9,
    )
