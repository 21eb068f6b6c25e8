"""vLLM with a node under it gives the tokens that vLLM gives alone, from every tier and after every
kill. One story, for an engine takes half a minute to start.
"""

import signal
import threading
from contextlib import ExitStack, closing

import pytest

from tests.crash.test_node_kill import record_offset
from tests.patience import until
from tests.support.threads import beside
from tests.unit.test_disk_faults import flip
from tiers.disk.open import open_disk
from tiers.node.below import disk_folder
from tiers.node.messages import described_layout

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

BLOCK = 128
PROMPTS = {
    name: [(place * 7919 + seed) % 40_000 + 100 for place in range(length)]
    for name, seed, length in (
        ("long", 1, 1_500), ("other", 2, 900), ("third", 3, 700), ("fourth", 4, 1_100),
    )
}  # fmt: skip
WHOLE = {name: (len(prompt) - 1) // BLOCK * BLOCK for name, prompt in PROMPTS.items()}


@pytest.fixture(scope="module")
def alone(model, started, tmp_path_factory):
    """What vLLM answers without us."""
    with started(model, None, tmp_path_factory.mktemp("alone")) as engine:
        answers = engine.generate(*PROMPTS.values())
    return {name: answer["tokens"] for name, answer in zip(PROMPTS, answers, strict=True)}


class Story:
    """Asks an engine, and compares each answer with vLLM's own."""

    def __init__(self, alone):
        self._alone = alone

    def ask(self, engine, *names, salt=None):
        answers = engine.generate(*(PROMPTS[name] for name in names), salt=salt)
        for name, answer in zip(names, answers, strict=True):
            assert self._alone[name] == answer["tokens"], f"other tokens for {name}: {answer}"
        return answers

    def expect(self, engine, name, tier):
        """The whole prompt but its last block is a hit of this tier, and the answer is the same."""
        engine.forget()
        (answer,) = self.ask(engine, name)
        assert ({tier: WHOLE[name]}, WHOLE[name]) == (answer["hits"], answer["cached"]), answer


def test_the_same_tokens_from_every_tier_and_after_every_kill(
    model, alone, node, started, tmp_path
):
    story = Story(alone)
    with ExitStack() as stack:
        first = stack.enter_context(started(model, node, tmp_path))
        for answer in story.ask(first, "long", "other"):
            assert ({}, 0) == (answer["hits"], answer["cached"])
        story.expect(first, "long", "host")

        # Another tenant's salt shares nothing.
        (answer,) = story.ask(first, "long", salt="another tenant")
        assert ({}, 0) == (answer["hits"], answer["cached"])

        # vLLM dies while it stores; another finds what was whole.
        first.tell("generate", prompts=[PROMPTS["third"]])
        first.kill()
        second = stack.enter_context(started(model, node, tmp_path))
        story.ask(second, "third")
        story.expect(second, "long", "host")
        assert 0 == node.pool()["lost"]

        # The node dies: everything is a miss, and nothing fails. It comes back with its disk.
        node.until_on_disk()
        node.kill()
        second.forget()
        (answer,) = story.ask(second, "other")
        assert ({}, 0) == (answer["hits"], answer["cached"])
        second.forget()  # nothing waits to be stored once the node is back
        node.start()
        wait_for_link(story, second)
        story.expect(second, "other", "disk")

        # It dies in the middle of a load.
        second.forget()
        node.signal(signal.SIGSTOP)
        threading.Timer(0.5, node.kill).start()
        story.ask(second, "long")
        node.start()
        wait_for_link(story, second)

        # A record on the disk is damaged: the rest is computed.
        second.forget()
        node.until_on_disk()
        layout = described_layout(node.pool()["layout"])
        node.stop()
        damage(node.disk, layout)
        node.start()
        wait_for_link(story, second)
        second.forget()
        for name in (*PROMPTS, *PROMPTS):  # then from vLLM's own cache
            story.ask(second, name)
        assert {"checksum"} == set(node.pool()["disk"]["faults"])

        # A second engine beside it, on the same node.
        second.forget()
        third = stack.enter_context(started(model, node, tmp_path))
        story.expect(third, "fourth", "host")
        answers = []
        with beside(lambda: answers.append(story.ask(third, *PROMPTS))):
            answers.append(story.ask(second, *PROMPTS))
        assert 2 == len(answers)
        counts = node.pool()
        assert (0, 0) == (counts["lost"], counts["collisions"])


def wait_for_link(story, engine):
    """An engine leaves a node that failed alone for a second; ask until it is back."""
    until(lambda: engine.forget() or story.ask(engine, "third")[0]["hits"])


def damage(disk, layout):
    """Flip a bit in the payload of every other block, in the order of their keys."""
    folder = disk_folder(disk, layout)
    with closing(open_disk(folder, layout, 2 << 30)) as tier, tier.view() as view:
        keys = sorted(block.key for block in view.blocks())
        places = [record_offset(tier, key) for key in keys[::2]]
    for shard, offset in places:
        flip(folder / shard / "data.mdb", offset + layout.nbytes // 4)
