"""Whole lives: clients over ASGI, grammars, limits, money, the real engine and three tiers.

The model is a `ChainRunner`; threads are real, so a seed draws what is asked and not when it is
done. Clients leave, read nothing, ask again under one key, run out of money and into limits, while
prices and limits change; grammars are slow, or cannot be compiled; steps fail; an operator evicts
and purges. Every answer has the tokens of a cold run, and the ledger has one charge of what was
computed for each request that the engine took. Nobody else pays.
`python -m tests.sim.test_whole_path FIRST LAST` lives more seeds.
"""

import asyncio
import contextlib
import json
import logging
import random
import time
import zlib
from collections import Counter, defaultdict
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import pytest
from limits.aio.storage import MemoryStorage

from api.access.concurrency import LocalPlaces
from api.access.overload import QueueBound
from api.access.rate_limits import LimitSettings, Quota, WindowLimits
from api.app import create_app
from api.requests.bridge import OutputBridge
from billing.budgets import remove_budget, set_budget
from billing.errors import CardConflict, UnknownBudget
from billing.gate.entries import Kind
from billing.gate.limits import SpendLimit
from billing.gate.outcomes import Outcome
from billing.prices.cards import parse_card
from billing.proof import audit
from billing.store import reports
from billing.usage import EMPTY, Usage
from engine.engine import Engine
from engine.errors import InvalidParameter
from engine.request import FinishReason
from engine.scheduling.group import seed_of
from engine.scheduling.settings import SchedulerSettings
from engine.settings import EngineSettings
from engine.structure import StructuredOutputs, source_of
from tests.api.bank import Bank
from tests.api.conftest import quiet
from tests.api.driver import Visit
from tests.sim.life import more_seeds
from tests.sim.random_grammar import EOS, RandomGrammar
from tests.support.caches import cache_of
from tests.support.chain_runner import ChainRunner, chain_layout, replay
from tests.support.memory_tier import MemoryTier
from tests.support.wire import FakeHouse
from tiers.policy.admission import WritePolicy

BLOCK = 4
RICH = 1 << 60
FEW = Quota(requests=9, concurrency=3, miss_tokens=300, output_tokens=60)
TENANTS = {"acme": RICH, "bolt": RICH, "poor": 150_000_000}  # units; `bolt` has the limits
POISON = 255  # a prompt that begins with this token cannot be computed
REFUSED = {400, 402, 403, 409, 429, 503}


def rule_of(regex):
    return source_of(StructuredOutputs(regex=regex))


def _number(source):
    return zlib.crc32(source.text.encode())


class Grammars:
    """Compiles a source to a grammar drawn by its text; a part of them cannot be compiled."""

    def compile(self, source):
        number = _number(source)
        if number % 5 == 0:
            raise InvalidParameter("nothing matches this", param=source.field)
        return RandomGrammar(number, slow=number % 2 == 0)


class Faulty(ChainRunner):
    """Fails where `POISON` begins a prompt, and now and then for a whole step."""

    def __init__(self, cache, chance):
        super().__init__(cache.pool.tensor)
        self._chance = random.Random(chance.random())
        self._poisoned = set()

    def step(self, batch):
        for span in batch.spans:
            if span.start == 0 and span.tokens[0] == POISON:
                self._poisoned.add(span.sequence_id)
        if self._poisoned & {span.sequence_id for span in batch.spans}:
            raise ValueError("a fault in one row")
        if len(batch.spans) > 1 and self._chance.random() < 0.01:
            raise RuntimeError("out of memory")
        return super().step(batch)


class Noting(Engine):
    """Notes what it was asked, and what it has answered."""

    def __init__(self, cache, bridge, chance):
        self.requests = {}
        self.outputs = defaultdict(list)

        def take(outputs):
            for output in outputs:
                self.outputs[output.request_id].append(output)
            bridge.deliver(outputs)

        settings = EngineSettings(
            scheduler=SchedulerSettings(max_running=6, step_tokens=16, mixed_step_tokens=8),
            eos_token_ids=frozenset({EOS}),
        )
        super().__init__(Faulty(cache, chance), cache, settings, take)

    def submit(self, request):
        super().submit(request)
        self.requests[request.request_id] = request

    @property
    def num_running(self):
        return len(self._answers.groups)


class Life:
    """One server, and what its clients asked and got. Use as a context."""

    def __init__(self, seed, folder):
        self.chance = chance = random.Random(seed * 6271 + 3)
        self.bank = Bank(folder, slice_tokens=chance.choice((2, 4, 64)))
        layout, draw = chain_layout(BLOCK), chance.choice
        sizes = draw((40, 60, 200)), draw((16, 80))
        policy = draw(list(WritePolicy))
        about = {"seed": seed, "block_bytes": layout.nbytes}
        disk = MemoryTier(draw((40, 600)), fault_rate=draw((0.0, 0.1)), **about)
        self.cache = cache_of(layout, *sizes, write_policy=policy, disk=disk)
        bridge, self.places = OutputBridge(), LocalPlaces()
        self.engine = Noting(self.cache, bridge, chance)
        limits = LimitSettings(tenants={"bolt": FEW})
        house = self.bank.house
        house.engine.close()
        parts = replace(
            house.wire.inference.engines[0],
            engine=self.engine,
            grammars=Grammars(),
            queue=QueueBound(self.engine, max_in_flight=chance.choice((8, 1024))),
        )
        wire = replace(
            house.wire,
            access=replace(
                house.wire.access, limits=WindowLimits(limits, MemoryStorage(), self.places)
            ),
            inference=replace(house.wire.inference, engines=[parts], bridge=bridge),
            settings=replace(
                house.wire.settings, write_timeout_s=0.1, keepalive_s=chance.choice((0.005, 15.0))
            ),
        )
        self.house = FakeHouse(wire, cast(Any, self.engine), house.meter)
        self.keys = {name: self.bank.customer(units, name) for name, units in TENANTS.items()}
        self._acts = (self._change_price, self._limit, self._suspend)
        self._num_cards = 1
        self._stops = chance.random() < 0.3
        self.said = Counter()
        self.statuses = Counter()

    async def run(self, num_requests):
        app = create_app(self.house.wire)
        self.engine.start()
        try:
            async with app.router.lifespan_context(app):
                clients = []
                for number in range(num_requests):
                    clients.append(asyncio.create_task(self._client(app, number)))
                    await asyncio.sleep(self.chance.choice((0, 0, 0.001, 0.01)))
                    if self.chance.random() < 0.1:
                        self._operate()
                    if self.chance.random() < 0.2:
                        await asyncio.to_thread(self.chance.choice(self._acts))
                async with asyncio.timeout(60):
                    await asyncio.gather(*clients)
                    await self._ask_what_cannot_be(app)
                await quiet(self.house, app)
        finally:
            self.engine.close()
        self._check()

    def close(self):
        self.house.wire.inference.encoders.close()
        self.cache.close()
        self.bank.close()

    def _operate(self):
        roots = {request.scope.root() for request in self.engine.requests.values()}
        if not roots:
            return
        root = self.chance.choice(sorted(roots))
        if self.chance.random() < 0.5:
            self.engine.call(lambda cache: cache.purge([root]))
        else:
            keys = [block.key for block in [*self.cache.index] if block.scope == root]
            self.engine.call(lambda cache: cache.evict([key for key in keys if key is not None]))

    def _change_price(self):
        """New requests have it; those under way keep theirs, as the audit finds out."""
        self._num_cards += 1
        moment = datetime.fromtimestamp(time.time() + self.chance.choice((0, 0, 0.01)), UTC)
        hit, miss, output = (self.chance.randrange(9) for _ in range(3))
        text = (
            f'[card]\nname="c"\nversion="{self._num_cards:03}"\n'
            f'valid_from={moment.isoformat()}\ncurrency="CNY"\n[[model]]\nmatch="*"\n'
            f'hit="0.{hit}"\nmiss="0.{miss}"\noutput="{output}"\n'
        )
        with contextlib.suppress(CardConflict):
            self.bank.accounts.apply_card(parse_card(text), by="test")

    def _limit(self):
        """A hard limit comes, changes or goes."""
        accounts, now_ns = self.bank.accounts, time.time_ns()
        if self.chance.random() < 0.3:
            with contextlib.suppress(UnknownBudget):
                remove_budget(accounts, "cap", by="test", reason="test")
            return
        amount = self.chance.choice((10_000_000, 300_000_000, RICH))
        budget = SpendLimit(name="cap", tenant="acme", amount=amount)
        set_budget(accounts, budget, by="test", now_ns=now_ns, reason="test")

    def _suspend(self):
        self.bank.accounts.set_suspended("bolt", self.chance.random() < 0.3, by="test")

    async def _client(self, app, number):
        """One request, as often as its client sends it."""
        chance = self.chance
        tenant, (path, body) = chance.choice(list(TENANTS)), self._body(number)
        headers = dict(self.keys[tenant])
        if chance.random() < 0.2:
            headers["idempotency-key"] = f"key{chance.randrange(5)}"
        leaves_s = chance.random() * 0.05 if chance.random() < 0.2 else None
        visits = [Visit(app, path, body, **headers).start()]
        if chance.random() < 0.2:
            visits.append(Visit(app, path, body, **headers).start())
        if leaves_s is not None:
            await asyncio.sleep(leaves_s)
            how = chance.random()
            if how < 0.6:
                visits[0].leave()
            elif how < 0.75:
                visits[0].broken = True
            elif how < 0.9:
                visits[0].stuck = True
            else:
                visits[0].task.cancel()
        for visit in visits:
            if visit.stuck:  # a refusal would wait for it
                await asyncio.wait([visit.task], timeout=1)
                visit.task.cancel()
            await asyncio.wait([visit.task])
            if not visit.task.cancelled():
                assert isinstance(visit.task.exception(), OSError | None)
            if visit.messages:
                self._take(visit, body, left=leaves_s is not None and visit is visits[0])

    async def _ask_what_cannot_be(self, app):
        """Once nobody else asks: others with such a grammar may be refused for something else."""
        regex = next(each for each in map(str, range(99)) if not _number(rule_of(each)) % 5)
        body = {"model": "bytes", "prompt": [1], "stream": False}
        body |= {"structured_outputs": {"regex": regex}}
        visit = Visit(app, "/v1/completions", body, **self.keys["acme"]).start()
        await visit.task
        self._take(visit, body, left=False)

    def _body(self, number):
        chance = self.chance
        body = {
            "model": "bytes",
            "max_tokens": chance.choice((1, 2, 5, 12, 30)),
            "seed": chance.choice((None, 1, 2)),
            "n": chance.choice((1, 1, 1, 3)),
            "stream": chance.random() < 0.5,
        }
        if self._stops and chance.random() < 0.3:
            body["stop"] = [chr(chance.randrange(50)) for _ in range(4)]
        if body["stream"]:
            body["stream_options"] = {"include_usage": True}
        if chance.random() < 0.5:
            regex = chance.choice("abcdefghij") * chance.randrange(1, 4)
            body["structured_outputs"] = {"regex": regex}
        words = "".join(chance.choice("xyz") for _ in range(chance.choice((0, 3, 9))))
        text = chance.choice(("", "law " * 5, "rules " * 12)) + words or "hi"
        if chance.random() < 0.3:
            said = [{"role": "user", "content": text}]
            return "/v1/chat/completions", body | {"messages": said}
        prompts = list(text.encode())
        if chance.random() < 0.05:
            prompts = [POISON, *prompts]
        elif chance.random() < 0.2:
            prompts = [prompts, [*prompts, number % 50]]
        return "/v1/completions", body | {"prompt": prompts}

    def _take(self, visit, body, *, left):
        """What a client was told agrees with what the engine has made."""
        status = visit.messages[0]["status"]
        self.statuses[status] += 1
        if status != 200:
            assert left or status in REFUSED or status == 500, (status, visit.text)
            return
        if body["stream"]:
            lines = [line[6:] for line in visit.text.split("\n") if line.startswith("data: {")]
            parts = [json.loads(line) for line in lines]
        else:
            parts = [json.loads(visit.text)] if visit.text else []
        told = Counter[str]()
        texts = defaultdict(str)
        for part in parts:
            if part.get("error"):
                return
            for choice in part["choices"]:
                texts[choice["index"]] += choice.get("text") or ""
            told.update({k: v for k, v in (part.get("usage") or {}).items() if type(v) is int})
        if not told:
            assert left, visit.text
            return
        name = parts[0]["id"].partition("-")[2]
        entry = Usage(miss=told["prompt_tokens"], output=told["completion_tokens"])
        self.said[name] += 1
        for number, text in texts.items() if "prompt" in body else ():
            part, index = divmod(number, body["n"])
            tokens = self._tokens(self._ids(name)[part], index)
            assert bytes(tokens).decode().startswith(text), "the text is another's"
        assert self._computed(name).prompt == entry.prompt
        assert entry.output <= self._computed(name).output

    def _ids(self, name):
        """The engine's requests of a request."""
        return [each for each in self.engine.requests if each.partition(".")[0] == name]

    def _tokens(self, engine_id, index):
        outputs = self.engine.outputs[engine_id]
        return [token for each in outputs if each.index == index for token in each.tokens]

    def _computed(self, name):
        ends = [self.engine.outputs[each][-1].counts for each in self._ids(name)]
        return sum(map(Usage.from_counts, ends), EMPTY)

    # After the life.

    def _check(self):
        for engine_id, request in self.engine.requests.items():
            self._check_tokens(engine_id, request)
        self._check_ledger()
        assert not self.places._running, "a place was not given back"
        self.cache.operations.check()

    def _check_tokens(self, engine_id, request):
        """Each sequence has the tokens of a cold run, or a beginning of them."""
        outputs = self.engine.outputs[engine_id]
        assert [engine_id] == [each.request_id for each in outputs if each.last]
        grammar = cast(RandomGrammar | None, request.grammar)
        for index in range(request.params.n):
            seed = request.params.seed
            expected = replay(
                request.tokens,
                request.params.max_tokens or 0,
                seed=seed_of(seed, index) if index and seed is not None else seed,
                grammar=grammar.begin(0) if grammar is not None else None,
                end=EOS,
            )
            got = self._tokens(engine_id, index)
            finish = next((each.finish for each in outputs if each.finish), None)
            whole = finish in (FinishReason.STOP, FinishReason.LENGTH) and outputs[-1].last
            assert got == expected[: len(got)], engine_id
            if whole and not self._stops and not self._was_cut(engine_id):
                assert got == expected, engine_id

    def _was_cut(self, engine_id):
        """Money ended it, or its client."""
        charge = self.charges[engine_id.partition(".")[0]]
        return Outcome.FINISHED is not Outcome(charge.details["outcome"])

    @property
    def charges(self):
        if not hasattr(self, "_charges"):
            found = self.bank.charges()
            assert len(found) == len({entry.request_id for entry in found}), "charged twice"
            self._charges = {entry.request_id: entry for entry in found}
        return self._charges

    def _check_ledger(self):
        taken = {engine_id.partition(".")[0] for engine_id in self.engine.requests}
        assert taken <= self.charges.keys()
        for name in self.charges.keys() - taken:  # the server gave it up after its hold was taken
            assert 0 == self.charges[name].amount and name not in self.said, name
        assert self.said.keys() <= taken
        refunds = [each for each in self.bank.entries if each.kind is Kind.CORRECTION]
        for refund in refunds:  # of what was lost, and came by a retry
            why, _, name = refund.request_id.partition(":")
            assert why == "retry" and name not in self.said, refund
        for name, entry in self.charges.items():
            usage = Usage.from_record(entry.details.get("usage", {}))
            assert usage.cache_write <= usage.miss
            usage = replace(usage, cache_write=0)  # a part of the prompt that is counted again
            outcome, computed = Outcome(entry.details["outcome"]), self._computed(name)
            if outcome is Outcome.FINISHED:
                assert self._stops or computed == usage, name
                assert replace(computed, output=usage.output) == usage, name
                assert usage.output <= computed.output, name
            elif outcome is Outcome.CLIENT_GONE:  # what no slice covers is not billed
                assert replace(computed, output=usage.output) == usage, name
                assert usage.output <= computed.output, name
            else:
                assert usage == EMPTY or usage.prompt == computed.prompt, (name, outcome)
                assert usage.output <= computed.output, (name, outcome)
        with self.bank.store.reading() as connection:
            assert [] == reports.hold_list(connection)
        for tenant, paid in TENANTS.items():
            entries = [*self.charges.values(), *refunds]
            mine = [entry for entry in entries if entry.tenant == tenant]
            assert -sum(entry.amount for entry in mine) == self.bank.spent(paid, tenant)
            assert tenant != "poor" or self.bank.accounts.tenant(tenant).balance >= 0
        assert [] == audit.verify(self.bank.store).problems


async def lived(seed, folder, num_requests=40):
    with contextlib.closing(Life(seed, folder)) as life:
        await life.run(num_requests)
        return life.statuses


@pytest.mark.parametrize("first", range(0, 6, 3))
async def test_whoever_comes_is_answered_exactly_and_billed_once(first, tmp_path):
    statuses = Counter()
    for seed in range(first, first + 3):
        statuses += await lived(seed, tmp_path / str(seed))
    assert {200, 400, 402, 429} <= statuses.keys(), statuses


def _live(seed):
    with TemporaryDirectory() as folder:
        asyncio.run(lived(seed, Path(folder)))


if __name__ == "__main__":
    logging.disable()
    more_seeds(_live)
