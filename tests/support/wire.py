"""Fakes of everything the wire uses, for tests in process, without a model.

`ScriptedEngine` follows a `Script`: the prompt's counts, the tokens, and when to fail or wait. Like
the real engine it delivers from another thread, one call per step, and every accepted request gets
exactly one `last` output.
"""

import threading
import time
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from api import collaborators
from api.access.auth import KeyGate, Salts
from api.access.fair_pool import encoder_pool
from api.access.overload import QueueBound
from api.access.rate_limits import LimitSettings, WindowLimits, open_limits
from api.collaborators import Collaborators, EngineParts, Inference, Readiness, WireSettings
from api.job import Bill, Job, Priced, Served
from api.journal.journal import Journal
from api.requests.bridge import OutputBridge
from api.requests.metering import LedgerCharge, LedgerMeter
from api.requests.quote import Quotes, Survey
from api.requests.retention import Retention
from api.requests.turns import Conversations
from api.served_model import ServedModel
from billing.errors import GateError, NoPrice
from billing.gate.outcomes import billable
from billing.gate.work import insufficient_balance
from billing.idempotency import Idempotency
from billing.keys import Principal, Scope
from billing.money import UNITS
from billing.operations.books import OpenBooks
from billing.prices.book import PinnedRate, RateRef
from billing.tenants import Tenant
from billing.usage import Usage
from engine.errors import RequestError
from engine.request import (
    FinishReason,
    Lookup,
    Request,
    StepOutput,
    Timeline,
    TokenCounts,
    TokenLogprob,
)
from engine.structure import Compiler
from tiers.blocks.keys import CacheScope
from tiers.errors import MissReason

EOS = 256
VOCAB_SIZE = 257


TEMPLATE = "{{ tools }} <tool_call>"  # from which the wire finds the style


class OpenGate:
    """Lets everyone in as one principal."""

    def __init__(self, principal: Principal | None = None) -> None:
        self._principal = principal or Principal("default", scopes=frozenset(Scope))

    async def identify(self, authorization: str | None) -> Principal:
        return self._principal


class ByteTokenizer:
    """Every UTF-8 byte is a token; the chat template is `role: content` a line. 256 ends."""

    vocab_size = VOCAB_SIZE
    max_token_bytes = 1
    has_chat_template = True
    chat_template: str | None = TEMPLATE
    special_token_ids = frozenset({EOS})

    def encode(self, text: str, *, add_special_tokens: bool = True) -> "array[int]":
        return array("i", list(text.encode()))

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(token for token in ids if token < EOS).decode(errors="replace")

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if token < EOS else b"<eos>"

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_arguments: Mapping[str, Any] | None = None,
    ) -> str:
        if any(message["role"] == "function" for message in messages):
            raise RequestError("this template knows no role 'function'", param="messages")
        lines = [f"{message['role']}: {message['content']}\n" for message in messages]
        if continue_final_message:
            lines[-1] = lines[-1].rstrip()
        lines += [f"{name}: {value}\n" for name, value in (template_arguments or {}).items()]
        lines += [f"tools: {len(tools)}\n"] if tools else []
        lines += ["assistant: "] if add_generation_prompt else []
        return "".join(lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """How the engine treats requests. Without `answer` it echoes the prompt's own bytes."""

    answer: str | None = None
    hits: Mapping[str, int] = field(default_factory=dict)  # hit_device=..., the rest misses
    reasons: Mapping[MissReason, int] | None = None
    lookup: Lookup | None = None  # the cache's answer
    refuse: Exception | None = None  # raised by submit
    fail_after: int | None = None  # tokens until the engine fails
    step_s: float = 0.0
    stall: bool = False  # admitted, then silent until aborted
    wait: bool = False  # never admitted, until aborted
    tokens_per_step: int = 1
    wait_s: Mapping[str, float] = field(default_factory=dict)  # predicted, by tenant


@dataclass(slots=True)
class _FakeRun:
    """One request in the fake engine."""

    request: Request
    script: Script
    answer: "array[int]"
    place: int = 0
    aborted: FinishReason | None = None
    ended: set[int] = field(default_factory=set)
    told: bool = False


class ScriptedEngine:
    """An `EngineClient`. Thread-safe; `close` ends its thread."""

    def __init__(self, on_outputs: Callable[[Sequence[StepOutput]], None]) -> None:
        self.script = Script()
        self.requests: list[Request] = []
        self.aborts: list[tuple[str, FinishReason, int | None]] = []
        self.tokens_made: dict[str, int] = {}
        self._on_outputs = on_outputs
        self._runs: dict[str, _FakeRun] = {}
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._loop, name="scripted-engine", daemon=True)
        self._thread.start()

    def predicted_wait_s(self, share: str, num_tokens: int) -> float:
        return self.script.wait_s.get(share, 0.0)

    def submit(self, request: Request) -> None:
        if self.script.refuse is not None:
            raise self.script.refuse
        text = self.script.answer
        answer = request.tokens if text is None else ByteTokenizer().encode(text)
        with self._changed:
            self.requests.append(request)
            self._runs[request.request_id] = _FakeRun(request, self.script, answer)
            self._changed.notify()

    def abort(
        self, request_id: str, reason: FinishReason = FinishReason.ABORT, index: int | None = None
    ) -> None:
        with self._changed:
            self.aborts.append((request_id, reason, index))
            run = self._runs.get(request_id)
            if run is None:
                return
            if index is None:
                run.aborted = run.aborted or reason
            else:
                run.ended.add(index)
                if len(run.ended) == run.request.params.n:
                    run.aborted = run.aborted or reason
            self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    @property
    def num_running(self) -> int:
        with self._changed:
            return len(self._runs)

    def _loop(self) -> None:
        while not self._closing:
            with self._changed:
                outputs = [told for run in list(self._runs.values()) for told in self._step(run)]
                if not outputs and not self._closing:
                    self._changed.wait(0.05)
            if outputs:
                self._on_outputs(outputs)
                time.sleep(self.script.step_s)

    def _step(self, run: _FakeRun) -> Iterable[StepOutput]:
        request, script = run.request, run.script
        if run.aborted is not None:
            return [self._end(run, run.aborted)]
        if script.wait or script.stall:
            return []
        if script.fail_after is not None and run.place >= script.fail_after:
            return [self._end(run, FinishReason.ERROR, "the device is on fire")]
        wanted = request.params.max_tokens
        limit = min(len(run.answer) if wanted is None else wanted, len(run.answer) + 1)
        tokens = [*run.answer, EOS][run.place : min(run.place + script.tokens_per_step, limit)]
        run.place += len(tokens)
        finish = None
        if run.place == limit:
            finish = FinishReason.STOP if EOS in tokens else FinishReason.LENGTH
        return list(self._outputs(run, tokens, finish))

    def _outputs(
        self, run: _FakeRun, tokens: list[int], finish: FinishReason | None
    ) -> Iterable[StepOutput]:
        live = [index for index in range(run.request.params.n) if index not in run.ended]
        for index in live:
            last = finish is not None and index == live[-1]
            made = self.tokens_made.get(run.request.request_id, 0) + len(tokens)
            self.tokens_made[run.request.request_id] = made
            yield self._output(run, index, tokens, finish, last=last)
        if finish is not None:
            self._runs.pop(run.request.request_id)

    def _end(self, run: _FakeRun, reason: FinishReason, error: str | None = None) -> StepOutput:
        self._runs.pop(run.request.request_id)
        return self._output(run, 0, [], reason, last=True, error=error)

    def _output(
        self,
        run: _FakeRun,
        index: int,
        tokens: list[int],
        finish: FinishReason | None,
        *,
        last: bool,
        error: str | None = None,
    ) -> StepOutput:
        request = run.request
        counts = TokenCounts(prompt=len(request.tokens), **run.script.hits)
        reasons = run.script.reasons or {MissReason.ABSENT: counts.miss}
        told, run.told = run.told, True
        admitted = not run.script.wait
        now = time.monotonic_ns()
        logprobs = tuple(TokenLogprob(token, -0.5, ((token, -0.5), (65, -1.5))) for token in tokens)
        return StepOutput(
            request_id=request.request_id,
            index=index,
            tokens=tuple(tokens),
            counts=counts.with_output(self.tokens_made.get(request.request_id, 0))
            if admitted
            else TokenCounts(prompt=0),
            finish=finish,
            logprobs=logprobs if request.params.logprobs is not None else (),
            miss_reasons={} if told or not admitted else reasons,
            prompt_logprobs=_prompt_logprobs(request) if not told else (),
            timeline=Timeline(request.arrival_ns, now, now, now, now) if admitted else Timeline(),
            error=error,
            last=last,
            lookup=run.script.lookup if admitted else None,
        )


def _prompt_logprobs(request: Request) -> tuple[TokenLogprob, ...]:
    wanted = request.params.prompt_logprobs
    if wanted is None:
        return ()
    return tuple(TokenLogprob(t, -0.25, ((t, -0.25),)[:wanted], 1) for t in request.tokens[1:])


class CountingCharge(LedgerCharge):
    """Money that only counts. Covers `budget` output tokens, or all of them."""

    def __init__(self, meter: "CountingMeter", principal: Principal, job: Job) -> None:
        self._meter = meter
        self.principal = principal
        self.job = job
        self.served: Served | None = None
        self.delivered: bool | None = None
        self.num_settled = 0
        self.num_voided = 0
        self.refusal = meter.refusal
        self._ended = False

    async def cover(self, output_tokens: int, progress: Callable[[], Usage]) -> int:
        budget = self._meter.budget
        return output_tokens if budget is None else min(output_tokens, budget)

    async def settle(self, served: Served, *, delivered: bool) -> Bill:
        self._ended = True
        if self._meter.fail_settle is not None:
            raise self._meter.fail_settle
        self.num_settled += 1
        self.served, self.delivered = served, delivered
        return Bill(
            billable(served.usage, served.outcome, delivered=delivered),
            currency="CNY",
            cost="0.000012",
            saved="0.000004",
            price_version="test-1",
            receipt=lambda: {"request_id": self.job.request_id},
        )

    async def lost(self, served: Served) -> None:
        assert served == self.served
        self.delivered = False

    async def give_back(self) -> None:
        self.delivered = False

    async def void(self) -> None:
        if not self._ended:
            self._ended = True
            self.num_voided += 1


class CountingMeter(LedgerMeter):
    """A meter without a ledger that records its charges."""

    def __init__(self) -> None:
        self.charges: list[CountingCharge] = []
        self.budget: int | None = None
        self.refuse: Exception | None = None
        self.refusal: GateError = insufficient_balance("t", needed=2, available=1, currency="CNY")
        self.fail_settle: Exception | None = None

    def check(self) -> None: ...

    async def admit(self, principal: Principal, job: Job) -> CountingCharge:
        if self.refuse is not None:
            raise self.refuse
        self.charges.append(CountingCharge(self, principal, job))
        return self.charges[-1]

    def price(self, principal: Principal, job: Job, usage: Usage) -> Priced:
        """A hit costs 1, a miss 10, an output token 20 units of a millionth."""
        unit, ref = UNITS // 10**6, RateRef("test", "1", job.model.name, "standard")
        prompt = (usage.hit + 10 * usage.miss) * unit
        return Priced("CNY", prompt, 20 * job.max_output * unit, ref)

    def rate_of(self, principal: Principal, model: str) -> PinnedRate:
        raise NoPrice("there is no ledger")

    @property
    def last(self) -> CountingCharge:
        return self.charges[-1]


def byte_model(
    name: str = "bytes", *, max_context: int = 4096, tokenizer: ByteTokenizer | None = None
) -> ServedModel:
    tokenizer = tokenizer or ByteTokenizer()
    return ServedModel(
        name=name,
        tokenizer=cast(Any, tokenizer),
        scope=CacheScope(weights=b"w", tokenizer=b"t", layout=b"l"),
        max_context=max_context,
        vocab_size=VOCAB_SIZE,
        created=1_700_000_000,
    )


def rich_tenant(name: str) -> Tenant:
    """An account with a grant of ten and a payment of a hundred."""
    return Tenant(name, "CNY", 0, False, 0, 10 * UNITS, 100 * UNITS, 0, 0, 1)


class _KeepsNothing:
    """A `Retention` without a cache behind it."""

    def began(self, job: Job) -> None:
        pass

    def ended(self, job: Job, served: Served) -> None:
        pass


async def _nowhere(job: Job) -> Sequence[Mapping[str, int]]:
    return []


@dataclass(frozen=True, slots=True)
class FakeHouse:
    """The collaborators of an app under test, and the fakes behind them."""

    wire: Collaborators
    engine: ScriptedEngine
    meter: CountingMeter

    def close(self) -> None:
        self.engine.close()
        self.wire.inference.encoders.close()


def fake_house(
    *,
    models: Sequence[ServedModel] = (),
    gatekeeper: KeyGate | None = None,
    meter: LedgerMeter | None = None,
    limits: WindowLimits | None = None,
    salts: Salts | None = None,
    settings: WireSettings | None = None,
    balances: Callable[[str], Tenant] = rich_tenant,
    opened: OpenBooks | None = None,
    replays: Idempotency | None = None,
    journal: Journal | None = None,
    grammars: Compiler | None = None,
    max_in_flight: int = 1024,
    retention: Retention | None = None,
    survey: Survey | None = None,
) -> FakeHouse:
    """A whole wire over a `ScriptedEngine`; pass the parts under test.

    It has no ledger, no store of answers and no grammars unless they are passed.
    """
    bridge = OutputBridge()
    engine = ScriptedEngine(bridge.deliver)
    counting = CountingMeter()
    parts = EngineParts(
        engine=engine,
        models={model.name: model for model in models or (byte_model(),)},
        grammars=grammars or cast(Any, None),
        queue=QueueBound(engine, max_in_flight=max_in_flight),
        retention=retention or cast(Any, _KeepsNothing()),
        quotes=Quotes(engine, meter or counting, survey or _nowhere),
    )
    wire = Collaborators(
        access=collaborators.Access(
            gatekeeper=gatekeeper or cast(Any, OpenGate()),
            salts=salts or Salts(b"secret of the tests"),
            limits=limits or open_limits(LimitSettings(), "memory://"),
        ),
        inference=Inference(engines=[parts], bridge=bridge, encoders=encoder_pool()),
        books=collaborators.Bookkeeping(
            meter=meter or counting,
            balances=balances,
            opened=opened or cast(Any, None),
            replays=replays or cast(Any, None),
        ),
        records=collaborators.Records(
            journal=journal or Journal(), conversations=Conversations(100_000)
        ),
        settings=settings or WireSettings(),
        readiness=lambda: Readiness(ready=True),
        render_metrics=lambda: (b"# none\n", "text/plain; version=0.0.4"),
    )
    return FakeHouse(wire, engine, counting)
