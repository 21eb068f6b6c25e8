"""vLLM with a node under it gives the tokens that vLLM gives alone, from every tier, after restarts
and after every kill: of models that keep one kind of KV, and of those that have windows or
recurrent states beside full attention, in blocks of their own.
"""

import random
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from redis import Redis

from tests.patience import until
from tests.redis_server import redis_server
from tests.support.threads import beside
from tests.unit.test_disk_faults import flip
from tests.vllm.processes import Engine, RunningNode
from tiers.disk.inspection.view import open_view
from tiers.disk.open import open_disk
from tiers.node.below import disk_folder
from tiers.node.client import NodeClient
from tiers.node.messages import described_layout

pytestmark = [pytest.mark.vllm, pytest.mark.redis, pytest.mark.timeout(1800)]

COMMON: dict[str, Any] = {"vocab_size": 1000, "hidden_size": 64, "intermediate_size": 128}
COMMON |= {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
COMMON |= {"max_position_embeddings": 4096}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2}


def llama():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**COMMON, head_dim=32))


def gemma3():
    kinds = ["sliding_attention"] * 3 + ["full_attention"]
    return transformers.Gemma3ForCausalLM(
        transformers.Gemma3TextConfig(**COMMON, head_dim=32, sliding_window=256, layer_types=kinds)
    )


def gpt_oss():
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "beta_fast": 32.0}
    rope |= {"beta_slow": 1.0, "original_max_position_embeddings": 2048, "truncate": False}
    more = {"num_local_experts": 4, "rope_parameters": rope, **EXPERTS}
    kinds = ["sliding_attention", "full_attention"] * 2
    return transformers.GptOssForCausalLM(
        transformers.GptOssConfig(
            **COMMON, **more, head_dim=32, sliding_window=128, layer_types=kinds
        )
    )


def qwen3_next():
    heads = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "head_dim": 64}
    dims = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
    experts = {"num_experts": 4, "shared_expert_intermediate_size": 64, **EXPERTS}
    kinds = ["linear_attention"] * 3 + ["full_attention"]
    return transformers.Qwen3NextForCausalLM(
        transformers.Qwen3NextConfig(
            **{**COMMON, **heads, **dims, **experts}, moe_intermediate_size=64, layer_types=kinds
        )
    )


# dtype and the most tokens that a block has. vLLM's CPU build has one dtype for Qwen3-Next. vLLM
# computes 640 tokens in a step, so a state in the middle of a prompt is that at the end of a step.
MODELS: dict[str, tuple[Callable[[], transformers.PreTrainedModel], str, int]] = {
    "llama": (llama, "float32", 128),
    "gemma3": (gemma3, "float32", 128),
    "gpt_oss": (gpt_oss, "float32", 128),
    "qwen3_next": (qwen3_next, "bfloat16", 640),
}


def saved(make, folder):
    torch.manual_seed(0)
    model = make()
    with torch.no_grad():
        for weights in model.parameters():
            if weights.dim() > 1:
                weights.mul_(3)  # else every answer is the same token
    model.save_pretrained(folder)
    return folder


def prompt(seed, length):
    return [(place * 7919 + seed * 31) % 900 + 50 for place in range(length)]


@pytest.mark.parametrize("name", MODELS)
def test_every_group_resumes_with_the_same_tokens(name, started, tmp_path):
    make, dtype, most_tokens = MODELS[name]
    folder = saved(make, tmp_path / name)
    options = {"skip_tokenizer_init": True, "dtype": dtype, "max_num_batched_tokens": 640}
    options["weigh_loads"] = False  # so small a model computes faster than it loads
    long = prompt(1, 2 * most_tokens + 700)
    prompts = {
        "whole": long,
        "longer": long + prompt(5, 300),
        "parting": long[: most_tokens + 100] + prompt(7, 500),
        "cut short": prompt(11, most_tokens + 400),
    }
    with started(folder, None, tmp_path, **options) as alone:
        expected = {key: alone.generate(ids)[0]["tokens"] for key, ids in prompts.items()}
    assert 1 < len({tuple(tokens) for tokens in expected.values()}), "answers tell prompts apart"

    def check(engine, node, key, tier):
        """The answer is vLLM's own, and all that can be of its prompt was a hit of this tier."""
        engine.forget()
        (answer,) = engine.generate(prompts[key])
        assert expected[key] == answer["tokens"], (key, tier, answer)
        block = block_size(node)
        assert block <= most_tokens
        shared = most_tokens + 100 if key == "parting" else len(long) - 1
        hits = {tier: shared // block * block} if tier is not None else {}
        assert hits == answer["hits"], (key, block, answer)

    with redis_server(tmp_path) as url, Redis.from_url(url) as store:
        more = ("--remote-url", url, "--remote-writes", "all")
        one, two = (RunningNode(tmp_path / each, more=more) for each in ("one", "two"))
        try:
            one.start()
            with started(folder, one, tmp_path, **options) as engine:
                check(engine, one, "whole", None)
                for key in ("whole", "parting", "longer"):
                    check(engine, one, key, "host")
                engine.forget()
                (answer,) = engine.generate(prompts["whole"], salt="another tenant")
                assert ({}, 0) == (answer["hits"], answer["cached"]), "nothing is shared"
                engine.forget(external=True)  # as who changes weights in place does
                check(engine, one, "whole", None)
                check(engine, one, "whole", "host")
                engine.forget()
                engine.tell("generate", prompts=[prompts["cut short"]])
                engine.kill()  # while it stores
                one.until_on_disk()
            assert not any(pool["lost"] for pool in one.stats()["pools"])
            one.stop()
            one.start()
            two.start()
            with started(folder, one, tmp_path, **options) as engine:
                check(engine, one, "whole", "disk")
                if name == "llama":
                    with started(folder, one, tmp_path, **options) as other:
                        ask_both(*(Story(each, prompts, expected) for each in (engine, other)))
                    assert not one.pool()["collisions"]
            assert store.dbsize()
            with started(folder, two, tmp_path, **options) as engine:
                check(engine, two, "whole", "remote")
                two.stop()
                if name != "gpt_oss":  # whose groups are those of gemma3
                    story = Story(engine, prompts, expected)
                    survive_faults(story, tmp_path / "faulty", two.socket)
        finally:
            one.kill()
            two.kill()


def block_size(node):
    """How many tokens vLLM puts into a block. A block is as large as a state, whose dtype depends
    on the processor."""
    return max(described_layout(pool["layout"]).block_size for pool in node.stats()["pools"])


@dataclass(frozen=True)
class Story:
    """Prompts to an engine whose answers stay the same, whatever happens to its node."""

    engine: Engine
    prompts: Mapping[str, Sequence[int]]
    expected: Mapping[str, Sequence[int]]

    def ask(self, *keys):
        """The tokens that hit of each prompt, if vLLM itself has none."""
        hits = {}
        for key in keys or self.prompts:
            self.engine.forget()
            (answer,) = self.engine.generate(self.prompts[key])
            assert self.expected[key] == answer["tokens"], (key, answer)
            hits[key] = sum(answer["hits"].values())
        return hits

    def ask_until_hit(self):
        """The same, once the engine has found the node again, which it leaves for a second."""
        for _ in range(30):
            if any((hits := self.ask("whole")).values()):
                return hits
        raise AssertionError("the engine did not come back to the node")


def ask_both(one, other):
    """Two engines on one node at once."""
    answers = []
    with beside(lambda: answers.append(one.ask())):
        answers.append(other.ask())
    assert 2 == len(answers)


def survive_faults(story, folder, socket):
    """A node hangs, dies, finds its records damaged, loses parts and is too small."""
    node = RunningNode(folder, socket=socket)
    small = RunningNode(folder / "small", socket=socket)
    node.start()
    try:
        story.ask()
        best = story.ask()
        story.engine.forget()
        node.until_on_disk()
        node.signal(signal.SIGSTOP)
        assert {"parting": 0} == story.ask("parting")
        node.signal(signal.SIGCONT)
        node.kill()
        assert {"whole": 0} == story.ask("whole")
        node.start()
        assert best["whole"] == story.ask_until_hit()["whole"], "from the disk"
        layouts = [described_layout(pool["layout"]) for pool in node.stats()["pools"]]
        for layout in layouts:
            story.engine.forget()
            node.until_on_disk()
            node.stop()
            damage(node.disk, layout)
            node.start()
            until(lambda: node.stats()["pools"])  # the engine has found it again
            assert shorter(story.ask(), best)
        assert any(pool["disk"]["faults"] for pool in node.stats()["pools"])

        story.ask_until_hit()
        for seed in range(2):
            story.engine.forget()
            for layout in layouts:
                evict_some(node, layout, seed)
            assert shorter(story.ask(), best)

        node.stop()
        small.start("1MiB", "4MiB")
        story.ask_until_hit()
        assert shorter(story.ask(), best)
    finally:
        small.kill()
        node.kill()


def shorter(hits, best):
    return all(hits[key] <= best[key] for key in hits)


def evict_some(node, layout, seed):
    """Remove half of the blocks of a layout from memory and disk."""
    with open_view(disk_folder(node.disk, layout)) as view:
        keys = sorted(block.key.hex() for block in view.blocks())
    gone = random.Random(seed).sample(keys, len(keys) // 2)
    with closing(NodeClient(node.socket, layout)) as client:
        client.connect()
        client.operate("evict", keys=gone)


def record_offset(tier, key):
    """The shard that holds a block's record, and where in its file."""
    for slot in tier._slots:
        with slot.use() as shard:
            if found := shard.find([key]):
                return slot.path.name, found[0].place.offset
    raise AssertionError("the block is not on disk")


def damage(disk, layout):
    """Flip a bit in the payload of every other block, in the order of their keys."""
    folder = disk_folder(disk, layout)
    with closing(open_disk(folder, layout, 2 << 30)) as tier, tier.view() as view:
        keys = sorted(block.key for block in view.blocks())
        places = [record_offset(tier, key) for key in keys[::2]]
    for shard, offset in places:
        flip(folder / shard / "data.mdb", offset + layout.nbytes // 4)
