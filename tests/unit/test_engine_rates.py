"""What the engine learns of its own speed, and what it gives prompts beside those who decode."""

from tests.sim.world import World
from tiers.transfer.economy import LoadEconomy


def test_prefill_is_timed_to_where_the_device_is_waited_for(monkeypatch):
    """Three chunks, of which only the last chooses a token: one observation of all of them."""
    world = World(device_blocks=100, step_tokens=16)
    seen: list[int] = []
    monkeypatch.setattr(
        LoadEconomy, "observe_prefill", lambda economy, tokens, seconds: seen.append(tokens)
    )
    world.submit("one", list(range(48)), max_tokens=2)
    world.run()
    assert [48] == seen


def chunks(num_decoding: int, num_waiting: int) -> int:
    """Prompt tokens of the step after `num_waiting` prompts came beside those who decode."""
    world = World(device_blocks=400, max_running=16, step_tokens=64)
    for number in range(num_decoding):
        world.submit(f"d{number}", [number] * 4, max_tokens=50)
    while any(world.phase(f"d{number}") != "decode" for number in range(num_decoding)):
        world.step()
    for number in range(num_waiting):
        world.submit(f"w{number}", [number + 20] * 80, max_tokens=1)
    before = world.engine.stats().prompt_tokens_computed
    while (computed := world.engine.stats().prompt_tokens_computed) == before:
        world.step()
    return computed - before


def test_the_more_wait_for_a_first_token_the_more_is_prefilled_beside_decoding():
    assert [32, 32, 64, 64] == [chunks(2, 1), chunks(2, 2), chunks(2, 4), chunks(1, 8)]
