"""Any interleaving of requests gives each the tokens of a cold, lone run, and leaks nothing.

`tests.sim.world` holds what may happen, `tests.sim.life` draws what does. A failing run prints its
seed.
"""

import random

import pytest

from engine.request import FinishReason
from tests.sim.life import Life
from tests.sim.random_grammar import RandomGrammar, RandomState
from tests.sim.watched import BLOCK
from tests.sim.world import World
from tiers.memory.tails import MAX_CANDIDATES
from tiers.policy.admission import WritePolicy


@pytest.mark.parametrize("seed", range(4))
def test_each_token_is_computed_once_whichever_client_leaves(seed):
    """With room for all and one token to generate, no row that others may read is made twice."""
    chance = random.Random(seed * 6607)
    world = World(
        device_blocks=2000,
        seed=seed,
        max_running=(1, 2, 6, 12)[seed],
        step_tokens=chance.choice((4, 8, 16)),
        late_copies=seed == 3,
    )
    life = Life(world, chance, plain=True)
    life.run(100)
    world.check()
    assert {1} == set(world.runner.rows.values())
    assert life.cancelled


def test_forced_tokens_change_no_answer_and_save_a_step_each():
    """The same tokens with and without jumping, alone, sampled n times, and preempted."""
    answers, steps = [], []
    for jump_forward in (True, False):
        world = World(device_blocks=16, host_blocks=16, jump_forward=jump_forward)
        for number in range(6):
            asked = {"n": 1 + number % 2, "seed": number, "grammar": RandomGrammar(number)}
            world.submit(f"r{number}", [number] * 9, max_tokens=30, **asked)
        world.check()
        answers.append([world.tokens(f"r{n}", i) for n in range(6) for i in range(1 + n % 2)])
        steps.append(world.engine.stats().num_steps)
        jumped = sum(o.num_jumped for outputs in world.outputs.values() for o in outputs)
        assert world.engine.stats().jumped_tokens == jumped
        assert (jumped > 0) is jump_forward
    assert answers[0] == answers[1]
    assert steps[0] < steps[1]


def test_a_grammar_that_allows_nothing_ends_its_request_alone():
    class Dead(RandomGrammar):
        def begin(self, min_tokens: int) -> RandomState:
            state = RandomState(self.seed)
            state.stuck = "nothing can follow"
            return state

    world = World(device_blocks=60)
    world.submit("good", [1, 2, 3])
    world.ask("dead", [1, 2, 3], grammar=Dead(1), n=2)
    [output] = world.outputs.pop("dead")
    assert (FinishReason.UNMATCHED, "nothing can follow") == (output.finish, output.error)
    world.check()


def test_prompts_that_part_are_all_served_from_the_disk_when_they_come_together():
    """One brings the shared block up; the others wait for it, and still load what follows it."""
    write_through = WritePolicy.WRITE_THROUGH
    world = World(device_blocks=60, disk_blocks=500, write_policy=write_through)
    prompts = [[1] * BLOCK + [10 + number] * (3 * BLOCK + 1) for number in range(4)]
    for number, prompt in enumerate(prompts):
        world.submit(f"cold{number}", prompt, max_tokens=1)
    world.sink()
    for number, prompt in enumerate(prompts):
        world.submit(f"warm{number}", prompt, max_tokens=1)
    world.check()
    for number in range(4):
        assert world.counts(f"warm{number}").hit == 4 * BLOCK
        assert world.counts(f"warm{number}").hit_disk >= 3 * BLOCK


def test_a_weak_hash_costs_hits_and_never_an_answer(monkeypatch):
    """Five keys for all blocks of one kind: what has the same key and other tokens is a miss."""

    def weak(data: bytes) -> bytes:
        return bytes([sum(data) % 5]) * 16

    monkeypatch.setattr("tiers.blocks.chain.xxhash.xxh3_128_digest", weak)
    chance = random.Random(5)
    world = World(device_blocks=30, share_tails=False)
    for number in range(120):
        first = [chance.randrange(6) for _ in range(BLOCK)]
        world.submit(f"r{number}", [*first, number % 50], max_tokens=2)
        if number % 3 == 0:
            world.run()
    world.check()
    assert world.cache.index.collisions > 10
    assert any(outputs[-1].counts.hit for outputs in world.outputs.values())


TAILED = list(range(2 * BLOCK + 2))  # two blocks and two tokens


@pytest.mark.parametrize(
    ("prompt", "computed", "blocks"),
    [
        pytest.param([*TAILED[:8], 40, 41], 2, 1, id="nothing matches: a new block"),
        pytest.param([*TAILED, 30], 1, 0, id="all matches: extended in place"),
        pytest.param([*TAILED[:-1], 33, 34], 2, 1, id="the beginning matches: copied"),
    ],
)
def test_a_tail_is_taken_as_far_as_it_matches(prompt, computed, blocks):
    world = World(device_blocks=100)
    world.ask("first", TAILED, max_tokens=1)
    before, free = world.runner.computed, world.cache.pool.num_free
    counts = world.ask("next", prompt, max_tokens=1)
    assert (len(prompt) - computed, computed) == (counts.hit_device, counts.miss)
    assert (computed, blocks) == (world.runner.computed - before, free - world.cache.pool.num_free)
    assert 1 == world.ask("first again", TAILED, max_tokens=1).miss
    world.check()


def test_tail_still_being_computed_is_waited_for():
    world = World(device_blocks=100, step_tokens=8)
    for name in ("a", "b", "c"):
        world.submit(name, TAILED, max_tokens=1)
    world.check()
    assert world.runner.computed == len(TAILED)


def test_a_computed_tail_is_not_waited_for_while_its_request_runs():
    world = World(device_blocks=100)
    prompt = list(range(2 * BLOCK + 1))
    world.submit("long", prompt, max_tokens=12)
    world.submit("short", prompt, max_tokens=1)
    for _ in range(3):
        world.step()
    assert ["long"] == world.live() and len(world.tokens("long")) < BLOCK
    world.check()


def test_tail_candidates_of_one_prefix_are_few_and_none_says_what_another_does():
    world = World(device_blocks=100)
    prefix = list(range(2 * BLOCK))
    for length in (1, 2, 3):
        world.ask(f"longer {length}", [*prefix, *[40] * length], max_tokens=1)
    assert 1 == world.cache.index.num_partials
    for number in range(2 * MAX_CANDIDATES):
        world.ask(f"divergence {number}", [*prefix, 10 + number], max_tokens=1)
    assert MAX_CANDIDATES == world.cache.index.num_partials
    world.ask("twice", [*prefix, 49], max_tokens=2, n=2)
    assert MAX_CANDIDATES == world.cache.index.num_partials
    partials = [block.tokens for block in world.cache.index.iter_partials()]
    assert len(partials) == len(set(partials))
    for max_tokens in (4, 2):  # what fills a block leaves nothing to say for its beginning
        world.ask(f"full {max_tokens}", [*prefix, 5], max_tokens=max_tokens)
        full = [b.tokens for b in world.cache.index]
        partials = [block.tokens for block in world.cache.index.iter_partials()]
        assert not any(tokens.startswith(p) for p in partials for tokens in full)
    world.check()


def test_tail_of_a_block_that_is_still_loading_is_computed():
    """Two reads bring the whole prompt up, and the second is slow; a shorter prompt ends in it."""
    world = World(device_blocks=100, write_policy=WritePolicy.WRITE_THROUGH)
    prompt = list(range(6 * BLOCK + 1))
    world.ask("cold", prompt, max_tokens=1)
    world.sink()
    world.submit("whole", prompt, max_tokens=1)
    world.turn()
    world.step()
    assert 2 == world.mover.num_jobs
    world.mover.run_job(0)
    world.submit("part", prompt[: 4 * BLOCK + 2], max_tokens=1)
    world.turn()
    assert ["whole"] == world.live()
    assert (4 * BLOCK, 2) == (world.counts("part").hit, world.counts("part").miss)
    world.check()
