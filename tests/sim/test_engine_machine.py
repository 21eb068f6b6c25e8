"""Any interleaving of requests gives each the tokens of a cold, lone run, and leaks nothing.

The model is `ChainRunner`, whose KV proves the prefix it was computed from; the disk is in memory
and slow and faulty by a seed. A failing run prints its seed. `Watched` looks at each request as it
begins to run: what it is about to compute must not stand anywhere it could be read from.
"""

import itertools
import random
from array import array
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace

import numpy as np
import pytest

from engine.batch import Batch, Sampled
from engine.chain_runner import (
    ChainRunner,
    advance,
    before,
    chain_layout,
    content_at,
    replay,
)
from engine.engine import Engine, EngineSettings
from engine.group import seed_of
from engine.queue import QueueOrder
from engine.request import FinishReason, Request, SamplingParams, StepOutput
from engine.scheduler import SchedulerSettings
from engine.sequence import Sequence
from tiers.admission import Promotion, WritePolicy
from tiers.cache import CacheSettings, TieredCache
from tiers.contents import Content
from tiers.errors import MissReason
from tiers.events import EventKind
from tiers.index import BlockState
from tiers.keys import CacheScope, PrefixKey
from tiers.memory import MemoryTier, SteppedMover
from tiers.policy import PolicyName
from tiers.quota import Shares
from tiers.tier import TierName
from tiers.upkeep import UpkeepSettings

BLOCK = 4
EOS = 50  # beyond the tokens that the model chooses by itself; a grammar may allow it


class RandomGrammar:
    """Allows and forces tokens by a seed and the tokens before; `engine.structure.Grammar`."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def begin(self, min_tokens: int) -> "RandomState":
        return RandomState(self.seed)


class RandomState:
    """A run of forced tokens, or a choice that may include the end, then the next."""

    def __init__(self, seed: int) -> None:
        self.forced: deque[int] = deque()
        self.stuck: str | None = None
        self._taken = [seed]
        self._look_ahead()

    @property
    def allowed(self) -> np.ndarray:
        return _mask([self.forced[0]] if self.forced else self._choice)

    def accept(self, token: int) -> None:
        if self.forced:
            assert token == self.forced.popleft()
        else:
            assert token in self._choice
        self._taken.append(token)
        if not self.forced:
            self._look_ahead()

    def _look_ahead(self) -> None:
        chance = random.Random(repr(self._taken))
        self._choice = chance.sample(range(50), 3) + [EOS] * (chance.random() < 0.1)
        if chance.random() < 0.4:
            self.forced += [chance.randrange(50) for _ in range(chance.randrange(1, 12))]


def _mask(tokens: Seq[int]) -> np.ndarray:
    bits = np.zeros(64, dtype=np.bool_)
    bits[list(tokens)] = True
    return np.packbits(bits, bitorder="little").view(np.int32)


ADAPTERS = {"a": b"A" * 16, "b": b"B" * 16, "twin of a": b"A" * 16}  # contents by name
PLACEHOLDER = 49  # the token that stands for a picture
PICTURES = (b"a cat" * 4, b"a dog" * 4)


class Watched(ChainRunner):
    """Checks of every sequence that begins to run that it takes all that stands of its prompt."""

    def __init__(self, cache: TieredCache, sequence_of: Callable[[int], Sequence]) -> None:
        super().__init__(cache.pool.tensor, adapters=ADAPTERS)
        self._cache = cache
        self._sequence_of = sequence_of
        self._begun: set[int] = set()
        self.num_checked = 0

    def step(self, batch: Batch) -> list[Sampled]:
        for span in batch.spans:
            if span.sequence_id not in self._begun:
                self._begun.add(span.sequence_id)
                self._check(self._sequence_of(span.sequence_id))
        return super().step(batch)

    def forget(self, sequence_id: int) -> None:
        super().forget(sequence_id)
        self._begun.discard(sequence_id)

    def _check(self, sequence: Sequence) -> None:
        """The first block that it computes does not stand, and no other computes it now.

        Blocks beyond may: behind a gap, as where a load failed, nothing is looked for.
        """
        if sequence.chain.private or sequence.params.prompt_logprobs is not None:
            return  # it asked to compute the prompt
        self.num_checked += 1
        first = sequence.num_standing // BLOCK
        for block in self._cache.index.match(sequence.chain)[first : first + 1]:
            assert block in sequence.blocks, f"{block} is computed twice"


class World:
    """An engine without a thread, driven step by step, and what it has answered."""

    def __init__(
        self,
        *,
        device_blocks: int = 24,
        host_blocks: int = 32,
        disk_blocks: int = 200,
        fault_rate: float = 0.0,
        seed: int = 0,
        share_tails: bool = True,
        write_policy: WritePolicy = WritePolicy.ON_EVICT,
        order: QueueOrder = QueueOrder.CACHED_FIRST,
        max_running: int = 6,
        step_tokens: int = 16,
        policy: str = "lru",
        jump_forward: bool = True,
        promotion: Promotion = Promotion.KEEP,
        quotas: dict[PrefixKey, float] | None = None,
        upkeep: UpkeepSettings | None = None,
    ) -> None:
        """`quotas` are parts of every tier, by scope."""
        layout = chain_layout(BLOCK)
        self.now_s = 1_000_000.0
        shares = None
        if quotas is not None:
            shares = Shares(1_000_000, {root: int(1e6 * part) for root, part in quotas.items()})
        tier = MemoryTier(
            disk_blocks,
            fault_rate=fault_rate,
            seed=seed,
            block_bytes=layout.nbytes,
            shares=shares,
        )
        self.tier = tier
        self.mover = SteppedMover(tier, seed=seed)
        self.cache = TieredCache(
            layout,
            CacheSettings(
                device_bytes=device_blocks * layout.nbytes,
                host_bytes=host_blocks * layout.nbytes,
                share_tails=share_tails,
                write_policy=write_policy,
                weigh_loads=False,
                policy=policy,
                promotion=promotion,
                upkeep=upkeep or UpkeepSettings(),
            ),
            disk=tier,
            mover=self.mover,
            shares=shares,
            clock=lambda: self.now_s,
            wall_clock=lambda: self.now_s,
        )
        self.events = self.cache.stream.subscribe(capacity=1_000_000)
        self.told: set[tuple[TierName, PrefixKey]] = set()
        self.runner = Watched(self.cache, lambda number: self.engine._sequences[number])
        scheduler = SchedulerSettings(
            max_running=max_running,
            step_tokens=step_tokens,
            mixed_step_tokens=step_tokens // 2,
            order=order,
        )
        settings = EngineSettings(
            scheduler=scheduler,
            eos_token_ids=frozenset({EOS}),
            jump_forward=jump_forward,
            adapters=ADAPTERS,
        )
        self.engine = Engine(self.runner, self.cache, settings, self._take)
        self.grammars: dict[str, RandomGrammar] = {}
        self.outputs: dict[str, list[StepOutput]] = {}
        self.requests: dict[str, Request] = {}

    def submit(
        self,
        name: str,
        prompt: Seq[int],
        max_tokens: int = 4,
        n: int = 1,
        tenant: bytes = b"",
        cache: bool = True,
        seed: int | None = None,
        grammar: RandomGrammar | None = None,
        prompt_logprobs: int | None = None,
        adapter: str | None = None,
        contents: tuple[Content, ...] = (),
    ) -> None:
        if grammar is not None:
            self.grammars[name] = grammar
        digest = ADAPTERS[adapter] if adapter is not None else b""
        self.outputs[name] = []
        self.requests[name] = Request(
            request_id=name,
            tokens=array("i", prompt),
            params=SamplingParams(
                temperature=0,
                max_tokens=max_tokens,
                n=n,
                seed=seed,
                prompt_logprobs=prompt_logprobs,
            ),
            scope=CacheScope(tenant=tenant, adapter=digest),
            adapter=adapter,
            contents=contents,
            cache=cache,
            grammar=grammar,
        )
        self.engine.submit(self.requests[name])

    def live(self) -> list[str]:
        return [name for name, outputs in self.outputs.items() if not _ended(outputs)]

    def step(self) -> None:
        """One turn, with every job of the disk done before it."""
        self.mover.run(100)
        self.engine.turn()

    def run(self, max_turns: int = 5000) -> None:
        """Step until every request has ended."""
        turns = 0
        while self.live():
            turns += 1
            assert turns < max_turns, f"stuck: {self.live()} {self.engine.stats()}"
            if not self.engine.turn():
                self.mover.run(2)

    def tokens(self, name: str, index: int = 0) -> list[int]:
        return [t for o in self.outputs[name] if o.index == index for t in o.tokens]

    def counts(self, name: str):  # type: ignore[no-untyped-def]
        return self.outputs[name][-1].counts

    def check(self) -> None:
        """Every request got a cold run's tokens, or a beginning of them if it was aborted."""
        for name, outputs in self.outputs.items():
            for index in range(self.requests[name].params.n):
                expected = self._cold(self.requests[name], index)
                got = self.tokens(name, index)
                reason = next((o.finish for o in outputs if o.index == index and o.finish), None)
                if reason is FinishReason.ABORT or reason is None:
                    assert got == expected[: len(got)], name
                else:
                    stopped = bool(expected) and expected[-1] == EOS
                    assert reason is (FinishReason.STOP if stopped else FinishReason.LENGTH), name
                    assert got == expected, name
            self._check_prompt_logprobs(name)
            counts = outputs[-1].counts
            assert counts.hit + counts.miss == counts.prompt
            billed = {replace(o.counts, output=0) for o in outputs if o.tokens}
            assert len(billed) <= 1, "hits and misses changed after the first admission"
            assert sum(outputs[0].miss_reasons.values()) in (0, outputs[0].counts.miss)
            _check_lookup(outputs[0])

    def _check_prompt_logprobs(self, name: str) -> None:
        """They are told once, of every prompt token but the first, from the true prefix."""
        told = [one for output in self.outputs[name] for one in output.prompt_logprobs]
        request = self.requests[name]
        if request.params.prompt_logprobs is None:
            assert not told
            return
        prompt, values = request.tokens, [before(request.scope.adapter)]
        for position, token in enumerate(prompt[:-1]):
            values.append(advance(values[-1], token, content_at(request.contents, position)))
        expected = list(zip(prompt[1:], values[1:], strict=True))
        got = [(one.token, one.logprob) for one in told]
        if self.outputs[name][-1].finish is FinishReason.ABORT:
            assert got == expected[: len(got)]
        else:
            assert got == expected
        assert self.outputs[name][-1].counts.hit == 0

    def _cold(self, request: Request, index: int) -> list[int]:
        """The tokens of a cold, lone run."""
        params = request.params
        seed = params.seed
        if index and seed is not None:
            seed = seed_of(seed, index)
        grammar = self.grammars.get(request.request_id)
        room = self.engine.max_tokens - len(request.tokens)
        return replay(
            request.tokens,
            min(params.max_tokens or 0, room),
            seed=seed,
            grammar=grammar.begin(0) if grammar else None,
            end=EOS,
            adapter=request.scope.adapter,
            contents=request.contents,
        )

    def settle(self) -> None:
        """Let everything under way end."""
        self.cache.step()
        while self.cache.is_moving:
            self.mover.run(1000)
            self.cache.step()

    def stands(self, keys: Seq[PrefixKey]) -> list[bool]:
        """Whether the KV of each block is in any tier."""
        blocks = [self.cache.index.get(key) for key in keys]
        above = [block is not None and block.state is BlockState.READY for block in blocks]
        return [a or b for a, b in zip(above, self.tier.held(keys), strict=True)]

    def check_idle(self) -> None:
        """Nothing is in use, and slots and frames are conserved."""
        self.settle()
        assert not self.engine._scheduler.has_work
        for block in [*self.cache.index, *self.cache.index.iter_partials()]:
            assert block.pins == 0 and block.busy == 0, block
        self.cache.residency.check()
        self.check_events()

    def check_events(self) -> None:
        """Who applies the events knows exactly what stands where."""
        for event in self.events.take():
            assert event.key is not None
            place = (event.tier, event.key)
            if event.kind is EventKind.REMOVED:
                self.told.remove(place)
            else:
                assert place not in self.told, f"{event} was there already"
                self.told.add(place)
        stands = {(TierName.DEVICE, b.key) for b in self.cache.index if b.slot is not None}
        stands |= {(TierName.HOST, b.key) for b in self.cache.index if b.frame is not None}
        assert stands == self.told

    def _take(self, outputs: Seq[StepOutput]) -> None:
        for output in outputs:
            self.outputs[output.request_id].append(output)


def _check_lookup(told: StepOutput) -> None:
    """The runs lie end to end and sum to the counts, class by class."""
    if told.lookup is None or told.finish is FinishReason.ABORT:
        return
    place, by_source = 0, dict.fromkeys([*TierName, None], 0)
    for run in told.lookup.runs:
        assert run.start == place and run.num_tokens > 0, told.lookup
        place += run.num_tokens
        by_source[run.source] += run.num_tokens
    counts = told.counts
    assert place == counts.prompt and by_source[None] == counts.miss
    assert by_source[TierName.DEVICE] == counts.hit_device
    assert by_source[TierName.HOST] == counts.hit_host
    assert by_source[TierName.DISK] == counts.hit_disk


def _ended(outputs: list[StepOutput]) -> bool:
    return bool(outputs) and outputs[-1].last


def _pictures(prompt: Seq[int], chance: random.Random) -> tuple[Content, ...]:
    """What each run of placeholders in the prompt stands for: a picture, or just itself."""
    contents = []
    place = 0
    for token, run in itertools.groupby(prompt):
        length = len(list(run))
        picture = chance.choice((None, *PICTURES)) if token == PLACEHOLDER else None
        if picture is not None:
            contents.append(Content(place, length, picture))
        place += length
    return tuple(contents)


def _trunk(chance: random.Random) -> list[int]:
    """The beginning of prompts; every other one with a picture in it."""
    words = [chance.randrange(49) for _ in range(chance.randrange(1, 30))]
    if chance.random() < 0.5:
        place = chance.randrange(len(words))
        words[place:place] = [PLACEHOLDER] * chance.randrange(1, 8)
    return words


def _drive(world: World, chance: random.Random, num_requests: int) -> None:
    """Random arrivals over shared prefixes, cancels, and steps, until all is answered."""
    trunk = [_trunk(chance) for _ in range(4)]
    sent = turns = 0
    while sent < num_requests or world.live():
        turns += 1
        assert turns < 20_000, f"stuck: {world.live()} {world.engine.stats()}"
        if sent < num_requests and chance.random() < 0.4:
            for _ in range(chance.choice((1, 1, 2, 4))):
                base = chance.choice(trunk)
                prompt = (
                    base[: chance.randrange(1, len(base) + 1)] if chance.random() < 0.5 else base
                )
                prompt = prompt + [
                    chance.randrange(50) for _ in range(chance.choice((0, 0, 1, 3, 9)))
                ]
                prompt = prompt[: world.engine.max_tokens - 1]
                adapter = chance.choice((None, None, *ADAPTERS))
                contents = _pictures(prompt, chance)
                if chance.random() < 0.2:
                    digest = ADAPTERS[adapter] if adapter else b""
                    answer = replay(prompt, 5, adapter=digest, contents=contents)
                    trunk[chance.randrange(4)] = prompt + answer
                world.submit(
                    f"r{sent}",
                    prompt,
                    max_tokens=chance.choice((0, *range(1, 12))),
                    prompt_logprobs=0 if chance.random() < 0.15 else None,
                    grammar=RandomGrammar(sent % 7) if chance.random() < 0.3 else None,
                    n=chance.choice((1, 1, 1, 3)),
                    tenant=chance.choice((b"", b"", b"other")),
                    cache=chance.random() > 0.1,
                    seed=chance.choice((None, None, 1, 2)),
                    adapter=adapter,
                    contents=contents,
                )
                sent += 1
        if world.live() and chance.random() < 0.05:
            world.engine.abort(chance.choice(world.live()))
        if not world.engine.turn() or chance.random() < 0.3:
            world.mover.run(chance.randrange(3))


@pytest.mark.parametrize("policy", [policy.value for policy in PolicyName])
@pytest.mark.parametrize("write_policy", list(WritePolicy))
@pytest.mark.parametrize("share_tails", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_any_interleaving_is_exact(
    seed: int, share_tails: bool, write_policy: WritePolicy, policy: str
) -> None:
    chance = random.Random(seed * 7919)
    world = World(
        device_blocks=chance.choice((14, 24, 60)),
        host_blocks=chance.choice((0, 16, 40)),
        disk_blocks=chance.choice((10, 300)),
        fault_rate=(0.0, 0.1, 0.4)[seed],
        seed=seed,
        share_tails=share_tails,
        write_policy=write_policy,
        policy=policy,
    )
    _drive(world, chance, num_requests=60)
    world.check()
    world.check_idle()
    assert world.runner.num_checked > 30


def test_forced_tokens_change_no_answer_and_save_a_step_each() -> None:
    """The same tokens with and without jumping, alone, sampled n times, and preempted."""
    answers, steps = [], []
    for jump_forward in (True, False):
        world = World(device_blocks=16, host_blocks=16, jump_forward=jump_forward)
        for number in range(6):
            world.submit(
                f"r{number}",
                [number] * 9,
                max_tokens=30,
                n=1 + number % 2,
                seed=number,
                grammar=RandomGrammar(number),
            )
        world.run()
        world.check()
        world.check_idle()
        answers.append([world.tokens(f"r{n}", i) for n in range(6) for i in range(1 + n % 2)])
        steps.append(world.engine.stats().num_steps)
        jumped = sum(o.num_jumped for outputs in world.outputs.values() for o in outputs)
        assert world.engine.stats().jumped_tokens == jumped
        assert (jumped > 0) is jump_forward
    assert answers[0] == answers[1]
    assert steps[0] < steps[1]


def test_each_forced_token_saves_a_decode_step() -> None:
    """Of one sequence alone, steps and jumped tokens make up the answer."""
    steps = {}
    for jump_forward in (True, False):
        world = World(device_blocks=60, step_tokens=64, jump_forward=jump_forward)
        world.submit("alone", [1, 2, 3], max_tokens=40, grammar=RandomGrammar(3))
        world.run()
        world.check()
        stats = world.engine.stats()
        steps[jump_forward] = stats.num_steps
        assert stats.num_steps + stats.jumped_tokens == len(world.tokens("alone"))
    assert steps[True] < steps[False]


def test_a_grammar_that_allows_nothing_ends_its_request_alone() -> None:
    class Dead(RandomGrammar):
        def begin(self, min_tokens: int) -> RandomState:
            state = RandomState(self.seed)
            state.stuck = "nothing can follow"
            return state

    world = World(device_blocks=60)
    world.submit("good", [1, 2, 3])
    world.submit("dead", [1, 2, 3], grammar=Dead(1), n=2)
    world.run()
    [output] = world.outputs.pop("dead")
    assert (FinishReason.ERROR, "nothing can follow") == (output.finish, output.error)
    world.check()
    world.check_idle()


def test_requests_that_arrive_together_compute_a_shared_prefix_once() -> None:
    """Computed tokens are the unique tokens, whoever asked first."""
    world = World(device_blocks=100)
    prefix = list(range(30))
    for number in range(8):
        world.submit(f"r{number}", [*prefix, 40 + number, 3], max_tokens=1)
    world.run()
    world.check()
    assert world.runner.computed == len(prefix) + 8 * 2
    assert world.engine.stats().prompt_tokens_computed == len(prefix) + 8 * 2


def test_a_waiter_takes_over_when_the_producer_is_cancelled() -> None:
    world = World(device_blocks=100, step_tokens=8)
    prompt = list(range(40))
    world.submit("first", prompt)
    world.step()
    world.step()
    world.submit("second", prompt)
    world.step()
    world.engine.abort("first")
    world.run()
    world.check()
    assert world.counts("second").hit_device >= 8


def test_a_fully_cached_prompt_computes_one_token_and_writes_nothing() -> None:
    for length in (16, 18):
        world = World(device_blocks=100)
        prompt = list(range(length))
        world.submit("cold", prompt, max_tokens=1)
        world.run()
        computed = world.runner.computed
        world.submit("warm", prompt, max_tokens=1)
        world.run()
        world.check()
        assert world.runner.computed == computed
        assert world.counts("warm").miss == 1 and world.counts("warm").hit_device == length - 1


def test_a_pool_too_small_for_all_serves_all() -> None:
    world = World(device_blocks=14, host_blocks=16, max_running=6)
    for number in range(12):
        world.submit(f"r{number}", [number] * 20, max_tokens=10)
    world.run()
    world.check()
    world.check_idle()
    assert world.engine.stats().num_preemptions > 0


def test_hits_come_from_each_tier_and_are_counted_there() -> None:
    """The same prompt from the device, then from the host, then from the disk."""
    world = World(device_blocks=12, host_blocks=16, disk_blocks=500)
    prompt = [*range(20), 7]
    world.submit("cold", prompt)
    world.run()
    world.submit("device", prompt)
    world.run()
    assert world.counts("device").hit_device == 20
    world.submit("flood0", [45] * 40)
    world.run()
    world.submit("host", prompt)
    world.run()
    assert world.counts("host").hit_host >= 16
    for number in range(1, 6):
        world.submit(f"flood{number}", [number] * 40)
        world.run()
        world.mover.run(10)
    world.submit("disk", prompt)
    world.run()
    assert world.counts("disk").hit_disk == 20
    world.check()
    world.check_idle()


def test_prompts_that_part_are_all_served_from_the_disk_when_they_come_together() -> None:
    """One brings the shared block up; the others wait for it, and still load what follows it."""
    write_through = WritePolicy.WRITE_THROUGH
    world = World(device_blocks=60, disk_blocks=500, write_policy=write_through)
    prompts = [[1] * BLOCK + [10 + number] * (3 * BLOCK + 1) for number in range(4)]
    for number, prompt in enumerate(prompts):
        world.submit(f"cold{number}", prompt, max_tokens=1)
    world.run()
    world.check_idle()
    for block in [*world.cache.index]:
        if block.slot is not None:
            world.cache.residency.evict_device(block)
        if block.key is not None and block.frame is not None:
            world.cache.residency.evict_host(block)
    for number, prompt in enumerate(prompts):
        world.submit(f"warm{number}", prompt, max_tokens=1)
    world.run()
    world.check()
    world.check_idle()
    for number in range(4):
        assert world.counts(f"warm{number}").hit == 4 * BLOCK
        assert world.counts(f"warm{number}").hit_disk >= 3 * BLOCK


def test_generated_tokens_are_cached_as_well_as_prompts() -> None:
    """Turn two of a chat brings the first answer back; only what is new is computed."""
    world = World(device_blocks=100)
    prompt = list(range(10))
    world.submit("turn1", prompt, max_tokens=12)
    world.run()
    answer = world.tokens("turn1")
    world.submit("turn2", [*prompt, *answer, 3, 4], max_tokens=1)
    world.run()
    world.check()
    # The last answered token was never computed: nobody had asked what follows it.
    assert world.counts("turn2").hit_device == len(prompt) + len(answer) - 1


def test_a_weak_hash_costs_hits_and_never_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five keys for all blocks of one kind: what has the same key and other tokens is a miss."""

    def weak(data: bytes) -> bytes:
        return bytes([sum(data) % 5]) * 16

    monkeypatch.setattr("tiers.chain.xxhash.xxh3_128_digest", weak)
    chance = random.Random(5)
    world = World(device_blocks=30, share_tails=False)
    for number in range(120):
        first = [chance.randrange(6) for _ in range(BLOCK)]
        world.submit(f"r{number}", [*first, number % 50], max_tokens=2)
        if number % 3 == 0:
            world.run()
    world.run()
    world.check()
    assert world.cache.index.collisions > 10
    assert any(outputs[-1].counts.hit for outputs in world.outputs.values())


def _tail_world() -> tuple[World, list[int]]:
    """A prompt of two blocks and two tokens, served once; its tail is in the cache."""
    world = World(device_blocks=100)
    prompt = list(range(2 * BLOCK + 2))
    world.submit("first", prompt, max_tokens=1)
    world.run()
    return world, prompt


def test_tail_without_a_candidate_takes_a_new_block() -> None:
    world, prompt = _tail_world()
    computed = world.runner.computed
    world.submit("other", [*prompt[:8], 40, 41], max_tokens=1)
    world.run()
    world.check()
    assert world.runner.computed - computed == 2


def test_tail_still_being_computed_is_waited_for() -> None:
    world = World(device_blocks=100, step_tokens=8)
    prompt = list(range(2 * BLOCK + 2))
    for name in ("a", "b", "c"):
        world.submit(name, prompt, max_tokens=1)
    world.run()
    world.check()
    assert world.runner.computed == len(prompt)


def test_tail_shared_by_two_at_once_is_copied_before_both_append() -> None:
    """They answer differently from the same tail on, each in a block of its own."""
    world, prompt = _tail_world()
    world.submit("x", prompt, max_tokens=6, seed=1)
    world.submit("y", prompt, max_tokens=6, seed=2)
    world.submit("z", prompt, max_tokens=6, seed=3, n=3)
    world.run()
    world.check()
    world.check_idle()
    assert world.tokens("x") != world.tokens("y")
    assert world.counts("x").miss == world.counts("y").miss == 1


def test_tail_whose_tokens_all_match_is_extended_in_place() -> None:
    world, prompt = _tail_world()
    used = world.cache.pool.num_free
    computed = world.runner.computed
    world.submit("longer", [*prompt, 30], max_tokens=1)
    world.run()
    world.check()
    assert world.runner.computed - computed == 1
    assert world.cache.pool.num_free == used


def test_tail_that_parts_in_the_middle_is_copied_up_to_there() -> None:
    world, prompt = _tail_world()
    computed = world.runner.computed
    world.submit("parting", [*prompt[:-1], 33, 34], max_tokens=1)
    world.run()
    world.check()
    assert world.counts("parting").hit_device == len(prompt) - 1
    assert world.runner.computed - computed == 2
    world.submit("first again", prompt, max_tokens=1)
    world.run()
    world.check()
    assert world.counts("first again").miss == 1


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("max_tokens", [1, 3])
@pytest.mark.parametrize("place", [6, 8, 9])
def test_equal_placeholders_of_other_pictures_do_not_meet(
    place: int, max_tokens: int, together: bool
) -> None:
    """In full blocks and in tails, one after another and at once; each finds its own again."""
    prompt = [*range(place), *[PLACEHOLDER] * 8]
    world = World(device_blocks=100)
    for again in ("", " again"):
        for name, picture in (("cat", PICTURES[0]), ("dog", PICTURES[1]), ("text", None)):
            for length in (3, 8):  # with three tokens of a picture the prompt ends in a tail
                contents = () if picture is None else (Content(place, length, picture),)
                tokens = [*prompt[: place + length], *([7] if length == 8 else [])]
                world.submit(f"{name}{length}{again}", tokens, max_tokens, contents=contents)
                if not together:
                    world.run()
        world.run()
    world.check()
    world.check_idle()
    for name in ("cat", "dog"):
        assert world.counts(f"{name}3").hit <= place and world.counts(f"{name}8").hit <= place
        assert world.counts(f"{name}8 again").hit_device >= (place + 8) // BLOCK * BLOCK


def test_a_load_that_fails_is_a_miss_with_its_reason_and_the_request_succeeds() -> None:
    world = World(device_blocks=12, host_blocks=16, disk_blocks=500)
    prompt = [*range(20), 7]
    world.submit("cold", prompt)
    world.run()
    for number in range(7):
        world.submit(f"flood{number}", [40 + number] * 40)
        world.run()
        world.mover.run(10)
    world.tier.fault_rate = 1.0
    world.submit("again", prompt)
    world.run(max_turns=500)
    world.check()
    assert world.counts("again").hit_disk == 0
    reasons = {reason for output in world.outputs["again"] for reason in output.miss_reasons}
    assert reasons & {MissReason.CHECKSUM, MissReason.IO_ERROR}
    world.check_idle()
