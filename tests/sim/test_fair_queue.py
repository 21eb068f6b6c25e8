"""A tenant that floods the engine makes others wait little, through the real scheduler."""

from engine.scheduling.shares import part_of
from tests.sim.world import World


def turns_of(world, name):
    """Turns from now on until the request ends."""
    before = world.num_turns
    while name in world.live():
        world.step()
        world.num_turns += 1
    return world.num_turns - before


def clock_of(world):
    """The moment, in ns, that the engine's clock gives."""
    now, scheduler = [1], world.engine._scheduler
    world.engine._clock_ns = scheduler._clock_ns = lambda: now[0]
    scheduler._admission._clock_ns = scheduler._clock_ns
    return now


def polite_turns(num_storm, *, tokens=24, storm="storm", polite="polite"):
    world = World(device_blocks=1500, max_running=16, step_tokens=16)
    for number in range(num_storm):
        prompt = [number % 50, number // 50, *range(tokens)]
        world.submit(f"storm{number}", prompt, max_tokens=8, share=storm)
    turns = []
    for number in range(10):
        world.submit(f"polite{number}", [40, number, *range(tokens)], max_tokens=8, share=polite)
        turns.append(turns_of(world, f"polite{number}"))
    world.check()
    return turns


def test_a_storm_of_another_end_user_of_the_tenant_is_hardly_felt():
    """Beside its running requests, one user's storm makes another's wait for a place at most."""
    users = {"storm": part_of("acme", "storm"), "polite": part_of("acme", "polite")}
    quiet, stormy = polite_turns(0, **users), polite_turns(100, **users)
    undivided = polite_turns(100, storm="acme", polite="acme")
    assert sum(stormy) <= 3 * sum(quiet)
    assert 3 * max(stormy) < max(undivided)


def test_many_end_users_get_no_more_than_one_tenant():
    """Five users of one tenant and one other tenant: half of the work each, by tenant."""
    world = World(device_blocks=1500, max_running=4, step_tokens=16)
    users = [part_of("many", str(number)) for number in range(5)]
    for number in range(20):
        for place, share in enumerate([*users, "one"]):
            name = f"{share}-{number}"
            world.submit(name, [number, place, *range(20)], max_tokens=2, share=share)
    while len([name for name in world.live() if name.startswith("one")]) > 5:
        world.step()
    ended = [name for name in world.outputs if name not in world.live()]
    counts = {share: sum(name.startswith(f"{share}-") for name in ended) for share in users}
    assert 10 <= sum(counts.values()) <= 20, "15 of the other tenant's have ended"
    assert max(counts.values()) - min(counts.values()) <= 2
    world.check()


def test_a_long_prompt_of_another_share_does_not_hold_up_a_short_one():
    """It is served beside it, block by block, not after it."""
    world = World(device_blocks=1500, step_tokens=16)
    world.submit("long", [1] * 800, max_tokens=1, share="storm")
    world.step()
    world.submit("short", [2] * 12, max_tokens=1, share="polite")
    assert turns_of(world, "short") <= 3
    world.check()


def test_a_storm_of_samples_takes_no_more_places_than_there_are():
    """Twelve requests of 64 samples each, and one of a share that was seen before."""
    world = World(device_blocks=4000, max_running=16, step_tokens=16)
    world.submit("first", [40] * 20, max_tokens=8, share="polite")
    turns_of(world, "first")
    most = 0
    for number in range(12):
        world.submit(f"storm{number}", [number] * 20, max_tokens=60, n=64, share="storm")
    for _ in range(20):
        world.step()
    world.submit("polite", [40] * 20, max_tokens=8, share="polite")
    turns = 0
    while "polite" in world.live():
        world.step()
        turns += 1
        most = max(most, len(world.engine._scheduler.running))
    assert most <= 16
    assert turns <= 8 + 4, "it begins at once, and decodes in every step"
    world.check()


def test_the_predicted_wait_is_close_to_the_actual_wait():
    """By the storm's own backlog. A newcomer gets a small part of that wait."""
    world = World(device_blocks=1500, max_running=4, step_tokens=16)
    now = clock_of(world)

    def turn():
        now[0] += 10**8
        world.step()

    for number in range(80):
        world.submit(f"s{number}", [number % 50, number // 50, *range(20)], share="storm")
    assert 0.0 == world.engine.predicted_wait_s("storm", 22)
    for _ in range(40):
        turn()
    predicted_s = world.engine.predicted_wait_s("storm", 22)
    assert world.engine.predicted_wait_s("new", 22) < predicted_s / 10
    begun = now[0]
    while len(world.engine._scheduler.waiting):
        turn()
    took_s = (now[0] - begun) / 1e9
    assert 0.7 * took_s < predicted_s < 1.4 * took_s
    world.check()


def test_a_storm_waits_no_longer_than_predicted_while_others_go_on_asking():
    """Their requests to come take half of the work, and none of them waits at any moment."""
    world = World(device_blocks=1500, max_running=4, step_tokens=16)
    now, bound_s = clock_of(world), 10.0
    sent = {}
    waits = {}
    for turn in range(500):
        now[0] += 10**8
        for number in range(3):
            if world.engine.predicted_wait_s("storm", 22) <= bound_s:
                name = f"s{turn}-{number}"
                sent[name] = now[0] / 1e9
                prompt = [turn % 50, turn // 50, number, *range(20)]
                world.submit(name, prompt, max_tokens=8, share="storm")
        if turn % 10 == 0:
            world.submit(f"p{turn}", [turn % 50, turn // 50, 9, *range(20)], share="polite")
        world.step()
        waiting = {sequence.request.request_id for sequence in world.engine._scheduler.waiting}
        for name in sent.keys() - waits.keys() - waiting:
            waits[name] = now[0] / 1e9 - sent[name]
    later = [wait_s for name, wait_s in waits.items() if sent[name] > 12]
    assert len(later) > 10
    assert max(later) < 1.4 * bound_s
    world.check()
