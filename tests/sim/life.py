"""What happens in a `World`: requests that share beginnings and ends, cancels, faults, operators.

Each prompt is a trunk and some words, or an earlier prompt again, or the next turn of one. Cancels
come in every phase of a request, and who was cancelled is often asked for again at once.
"""

import itertools
import math
import sys
from collections import Counter, defaultdict
from typing import Any

import pytest

from engine.errors import InvalidParameter
from tests.sim.random_grammar import RandomGrammar
from tests.sim.watched import ADAPTERS, BLOCK, VOCAB_SIZE
from tests.sim.world import PICTURES, PLACEHOLDER
from tests.support.chain_runner import replay
from tiers.blocks.chain import Chain
from tiers.blocks.contents import Content
from tiers.blocks.keys import CacheScope
from tiers.policy.retention import PinError
from tiers.telemetry.events import CacheEvent

TENANTS = (b"", b"other", b"third")
SERVED: dict[str, tuple[Any, ...]] = {  # what a hostile client may ask for, and is served
    "temperature": (0, 1e-300, 1e-5, 1.0, 100.0),
    "top_p": (1e-300, 0.5, 1.0),
    "top_k": (0, 1, 7, (1 << 31) - 1),
    "min_p": (0.0, 0.5, 1.0),
    "repetition_penalty": (0.01, 0.5, 10.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "logit_bias": ({}, dict.fromkeys(range(VOCAB_SIZE), -100.0), {3: 100.0}),
    "logprobs": (None, 0, 20),
}
REFUSED: dict[str, tuple[Any, ...]] = {
    "temperature": (-1.0, 1e300, math.nan, math.inf, "hot"),
    "top_p": (0.0, -1e-300, 1.5, math.nan),
    "top_k": (-1, 1 << 70),
    "min_p": (-0.1, 2.0, math.nan),
    "repetition_penalty": (0.0, 1e-300, 1e300, math.nan),
    "presence_penalty": (-1e300, math.nan),
    "frequency_penalty": (math.inf, 3.0),
    "logit_bias": ({VOCAB_SIZE: 1.0}, {0: math.nan}, {0: 1e300}),
    "logprobs": (-1, 1 << 70),
    "seed": (1 << 70,),
    "min_tokens": (-1, 1 << 70),
}
MAX_TURNS = 2000  # that any request may take, whoever comes and goes beside it


def more_seeds(live):
    """Lives seeds from FIRST up to LAST, the last two words of the command; tells which fail."""
    for seed in range(*map(int, sys.argv[-2:])):
        try:
            live(seed)
        except Exception as error:  # noqa: BLE001 - told, and the next one is tried
            print(f"seed {seed}: {error!r}", flush=True)


def root_of(tenant):
    return CacheScope(tenant=tenant).root()


class Life:
    """One run. `acts` are what an operator or an accident does now and then.

    A `plain` life has requests that generate one token and read and write the cache alone.
    `arrivals` is the chance that requests come in a turn; with few, many find the engine idle.
    """

    def __init__(self, world, chance, *, plain=False, arrivals=0.4):
        self.world = world
        self.chance = chance
        self.plain = plain
        self.arrivals = arrivals
        self.trunks = {tenant: [self._trunk() for _ in range(3)] for tenant in TENANTS}
        self.sent = []  # what each request was asked with
        self.cancelled = Counter()  # by phase
        self.purges = []
        self.stood = set()  # pinned blocks that were seen in a tier
        self.num_lost = 0  # blocks that the cache has said to be lost

    def run(self, num_requests, acts=()):
        world, chance = self.world, self.chance
        while len(self.sent) < num_requests or world.live():
            if len(self.sent) < num_requests and chance.random() < self.arrivals:
                for _ in range(chance.choice((1, 1, 2, 4))):
                    self._send()
            if world.live() and chance.random() < 0.06:
                self._cancel()
            if acts and chance.random() < 0.1:
                chance.choice(acts)()
            world.now_s += chance.random()
            if not world.turn() or chance.random() < 0.3:
                world.mover.run(chance.randrange(3))
            self._check_pins()
            assert max(world.turns.values(), default=0) <= MAX_TURNS, world.turns
        world.settle()

    # What may happen beside requests.

    def pin(self):
        tenant = self.chance.choice(TENANTS)
        chain = Chain(root_of(tenant), self.chance.choice(self.trunks[tenant]), BLOCK)
        name, until_s = self.chance.choice("abc"), self.world.now_s + self.chance.randrange(5, 60)
        try:
            self.world.cache.operations.pin(name, chain, until_s)
        except PinError:
            return

    def unpin(self):
        self.world.cache.operations.unpin(self.chance.choice("abc"))

    def evict(self):
        tenant = self.chance.choice(TENANTS)
        chain = Chain(root_of(tenant), self.chance.choice(self.trunks[tenant]), BLOCK)
        self.world.cache.operations.evict(chain.keys)

    def evict_idle(self):
        """Idle blocks leave the device, and mostly those that the disk has the host as well."""
        cache, below = self.world.cache, self.chance.random() < 0.8
        for block in [*cache.index]:
            if block.slot is not None and not block.ref_count:
                cache.residency.evict_device(block)
            idle = not (block.ref_count or block.busy or block.pinned)
            if below and block.frame is not None and block.held_below and idle:
                cache.residency.evict_host(block)

    def purge(self):
        self.purges.append(
            self.world.cache.operations.purge([root_of(self.chance.choice(TENANTS))])
        )

    def break_step(self):
        """Now and then: the next step fails, and none of those who run in it."""
        self.world.runner.broken = self.chance.random() < 0.2

    def preempt(self):
        scheduler = self.world.engine._scheduler
        if scheduler.running:
            scheduler._preempt(self.chance.choice(scheduler.running))

    def lose(self):
        """The disk loses a few blocks, and tells nobody."""
        self.world.disk_loses = True
        keys = list(self.world.tier._blocks)
        self.world.tier.discard(
            self.chance.sample(keys, min(len(keys), self.chance.randrange(1, 6)))
        )

    def jump(self):
        """The clock does."""
        self.world.now_s += self.chance.choice((-3600, 3600, -5, 60))

    def trouble_disk(self):
        """From now on the disk fails always, now and then, or never."""
        self.world.tier.fault_rate = self.chance.choice((0.0, 0.0, 0.3, 1.0))

    # Requests.

    def _send(self):
        kind = self.chance.random()
        if self.sent and kind < 0.25:
            self._again(self.chance.randrange(max(0, len(self.sent) - 12), len(self.sent)))
        elif self.sent and kind < 0.4:
            self._next_turn(self.chance.randrange(len(self.sent)))
        else:
            tenant = self.chance.choice(TENANTS)
            trunk = self.chance.choice(self.trunks[tenant])
            if self.chance.random() < 0.5:
                trunk = trunk[: self.chance.randrange(1, len(trunk) + 1)]
            self._submit(tenant, trunk + self._words(self.chance.choice((0, 0, 1, 3, 9))))

    def _again(self, number):
        """An earlier prompt; at times another tenant's, or for another adapter."""
        before = dict(self.sent[number])
        if self.chance.random() < 0.1:
            before["tenant"] = self.chance.choice(TENANTS)
        if self.chance.random() < 0.1 and not self.plain:
            before["adapter"] = self.chance.choice((None, *ADAPTERS))
        self._submit(**before)

    def _next_turn(self, number):
        before = dict(self.sent[number])
        answer = self.world.tokens(f"r{number}")
        before["prompt"] = [*before["prompt"], *answer, *self._words(self.chance.randrange(1, 6))]
        self._submit(**before)

    def _submit(self, tenant, prompt, adapter=None, contents=None):
        chance, world = self.chance, self.world
        name, prompt = f"r{len(self.sent)}", prompt[: world.engine.max_tokens - 1]
        if contents is None and not self.plain:
            adapter = chance.choice((None, None, *ADAPTERS))
            contents = _pictures(prompt, chance)
        contents = tuple(one for one in contents or () if one.end <= len(prompt))
        asked = {"tenant": tenant, "prompt": prompt, "adapter": adapter, "contents": contents}
        self.sent.append(asked)
        if self.plain:
            world.submit(name, prompt, max_tokens=1, tenant=tenant)
            return
        if chance.random() < 0.1:  # what will be answered is asked for before it is
            digest = ADAPTERS[adapter] if adapter else b""
            answer = replay(prompt, 5, adapter=digest, contents=contents)
            self.trunks[tenant][chance.randrange(3)] = prompt + answer
        if chance.random() < 0.05:
            chance.choice((world.runner.poisoned, world.runner.mad)).add(name)
        if chance.random() < 0.1:
            self._ask_too_much(asked)
        hostile = {}
        if chance.random() < 0.3:
            fields = chance.sample(sorted(SERVED), chance.randrange(1, 5))
            hostile = {field: chance.choice(SERVED[field]) for field in fields}
        world.submit(
            name,
            **asked,
            sampling=hostile,
            share=chance.choice(("", "", "other", "third")),
            max_tokens=chance.choice((0, *range(1, 12))),
            prompt_logprobs=0 if chance.random() < 0.1 else None,
            grammar=self._grammar() if chance.random() < 0.3 else None,
            n=chance.choice((1, 1, 1, 3)),
            cache=chance.random() > 0.1,
            seed=chance.choice((None, None, 1, 2)),
        )

    def _grammar(self):
        return RandomGrammar(len(self.sent) % 7, slow=self.chance.random() < 0.5)

    def _ask_too_much(self, asked):
        """What is out of its range is refused by name, and leaves nothing behind."""
        field = self.chance.choice(sorted(REFUSED))
        value = self.chance.choice(REFUSED[field])
        with pytest.raises(InvalidParameter) as refused:
            self.world.submit("refused", **asked, sampling={field: value})
        assert field == refused.value.param

    def _cancel(self):
        """Somebody leaves, from whichever phase; often the same prompt comes again."""
        world, chance = self.world, self.chance
        phases = defaultdict(list)
        for name in world.live():
            phases[world.phase(name)].append(name)
        phase = chance.choice(sorted(phases))
        name = chance.choice(phases[phase])
        self.cancelled[phase] += 1
        one = phase == "decode" and chance.random() < 0.3
        if chance.random() < 0.2:
            world.run_out(name)
        else:
            world.engine.abort(name, index=0 if one else None)
        for _ in range(chance.choice((0, 1, 1, 2))):
            self._again(int(name[1:]))

    def _check_pins(self):
        """A pinned block that stood in a tier stands in one for as long as it is pinned.

        Where the disk is behind, one may be lost to a running request; then it is counted. A purge
        that is under way takes what is pinned meanwhile.
        """
        pinned = {key for pin in self.world.cache.operations.pins() for key in pin.keys}
        self.stood &= pinned
        events = self.world.cache.residency.counters.events
        before = self.num_lost
        self.num_lost = sum(n for (_, event), n in events.items() if event is CacheEvent.LOST)
        if not pinned or not all(purge.done() for purge in self.purges):
            self.stood = set()
            return
        standing = self.world.stands(list(pinned))
        now = {key for key, stands in zip(pinned, standing, strict=True) if stands}
        assert len(self.stood - now) <= self.num_lost - before, "a pinned block was lost"
        self.stood = now

    def _words(self, count):
        return [self.chance.randrange(50) for _ in range(count)]

    def _trunk(self):
        """The beginning of prompts; every other one with a picture in it."""
        words = [self.chance.randrange(49) for _ in range(self.chance.randrange(1, 30))]
        if self.chance.random() < 0.5:
            place = self.chance.randrange(len(words))
            words[place:place] = [PLACEHOLDER] * self.chance.randrange(1, 8)
        return words


def _pictures(prompt, chance):
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
