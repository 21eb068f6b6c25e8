"""Two ranks of tensor parallelism over one node: the same tokens, each hit counted once, and a pin
and a purge that reach every part. MLA's latents are the same on both, and are stored once."""

import time
from contextlib import closing

import pytest
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

from cachesvc.server.vllm.node_operations import NodeOperations
from cachesvc.vllm.link import RETRY_S
from cachesvc.vllm.reports import Reports
from tests.patience import until
from tests.vllm.processes import Engine, RunningNode, connector
from tests.vllm.test_connector import COMMON, EXPERTS, block_size, llama, prompt, saved
from tiers.blocks.chain import Chain

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

PROMPT, OTHER = prompt(1, 700), prompt(2, 500)


def deepseek():
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "v_head_dim": 128}
    latents = {"kv_lora_rank": 512, "q_lora_rank": None}  # as vLLM's kernel for a CPU wants them
    return DeepseekV2ForCausalLM(
        DeepseekV2Config(
            **{**COMMON, **heads, **latents, **EXPERTS, "num_hidden_layers": 2},
            qk_rope_head_dim=64,
            qk_nope_head_dim=128,
            n_routed_experts=4,
            first_k_dense_replace=2,
            moe_intermediate_size=64,
            n_shared_experts=1,
        )
    )


@pytest.mark.parametrize(("make", "num_parts"), [(llama, 2), (deepseek, 1)])
def test_two_ranks_are_one_engine_to_hits_pins_and_purges(make, num_parts, tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # both on one node of memory
    folder, options = saved(make, tmp_path / "model"), {"skip_tokenizer_init": True}
    options |= {"tensor_parallel_size": 2, "gpu_memory_utilization": 0.2}
    node = RunningNode(tmp_path)
    node.start()
    with closing(Reports(tmp_path / "reports.sock")) as reports:
        told = connector(node.socket, weigh_loads=False, reports=str(reports.path))
        engine = Engine(folder, None, tmp_path / "ours.log", kv_transfer_config=told, **options)

        def computed(ids):
            (answer,) = engine.generate(ids)
            assert not answer["hits"]
            return answer["tokens"]

        def ask(ids, tokens, tier):
            whole = (len(ids) - 1) // size * size
            for again in range(3):
                engine.forget()
                node.until_on_disk()
                (answer,) = engine.generate(ids)
                found = "host" if again and "host" in answer["hits"] else tier  # loaded meanwhile
                if answer["hits"] or not tier:
                    break
                time.sleep(RETRY_S)  # its answer was late, and the engine leaves the node so long
            assert (tokens, {found: whole} if tier else {}) == (answer["tokens"], answer["hits"])
            return whole // size

        try:
            reports.take()
            ready = reports.engine
            expected = computed(PROMPT)
            until(lambda: node.stats()["pools"])
            size = block_size(node)
            num_blocks = ask(PROMPT, expected, "host")
            stored = (len(PROMPT) + 11) // size  # the last of 12 tokens is only sampled
            assert num_parts * stored == node.pool()["stored"]
            ask(OTHER, computed(OTHER), "host")
            with closing(
                NodeOperations(
                    *(node.socket, ready.groups, ready.num_ranks),
                    forget=lambda: engine.forget() or True,
                    in_flight=frozenset,
                )
            ) as operations:
                root = ready.scope.root()
                operations.pin("system", Chain(root, PROMPT, size), time.time() + 3600)
                assert num_parts * num_blocks == node.pool()["pinned_blocks"]
                operations.saved().result(120)
                node.stop()
                node.start()
                until(lambda: node.stats()["num_clients"] > 1)  # the engine joins it by itself
                ask(PROMPT, expected, "disk")
                purged = operations.purge([root]).result(120)
                assert 0 == purged.num_left == node.pool()["num_blocks"]
                ask(PROMPT, expected, None)
        finally:
            engine.kill()
            node.kill()
