"""SGLang's controller over our backend and over its own: its threads store, ask and load."""

import pytest

pytestmark = pytest.mark.sglang
NUM_PAGES = 24
PATIENCE_S = 60


def stored(sglang, controller, tokens, pool):
    """Backs free pages of the host pool up, and waits for it. The pages that were stored."""
    indices = pool.alloc(len(tokens))
    hashes = controller.get_hash_str(tokens, None, page_size=sglang.PAGE)
    controller.write_storage(indices, tokens, hashes, [])
    operation = controller.ack_backup_queue.get(timeout=PATIENCE_S)
    pool.free(indices)
    return operation.completed_tokens // sglang.PAGE


def fetched(sglang, controller, tokens, pool):
    """Prefetches a prompt to free pages, and waits for it. The pages that came."""
    controller.prefetch("request", tokens, None, [])
    operation = controller.prefetch_hit_queue.get(timeout=PATIENCE_S)
    operation.host_indices = pool.alloc(operation.storage_hit_count)
    controller.prefetch_buffer.put(operation)
    came = 0
    while not (ack := controller.ack_prefetch_queue.get(timeout=PATIENCE_S)).completed_req:
        came = ack.completed_tokens or came
    pool.free(operation.host_indices)
    return came // sglang.PAGE


@pytest.fixture
def backends(sglang, model, tmp_path):
    return {"ours": ("dynamic", sglang.options(tmp_path / "kv")), "file": ("file", {})}


@pytest.mark.parametrize("name", ["ours", "file"])
@pytest.mark.parametrize("kind", ["mha", "mla"])
def test_a_prompt_that_was_backed_up_is_prefetched_after_a_restart(
    sglang, backends, name, kind, monkeypatch, tmp_path
):
    monkeypatch.setenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", str(tmp_path))
    pool = getattr(sglang, kind)(num_pages=2 * NUM_PAGES)
    tokens = [*range(NUM_PAGES * sglang.PAGE)]
    wanted = sglang.filled(pool, NUM_PAGES)
    with sglang.controller(*backends[name], pool) as controller:
        assert NUM_PAGES == stored(sglang, controller, tokens, pool)
        in_place = controller.page_get_func == controller._page_get_zero_copy
        assert in_place is (name == "ours")
    pool.clear()
    sglang.wiped(pool, NUM_PAGES)
    with sglang.controller(*backends[name], pool) as controller:
        longer = [*tokens, *range(7, 7 + sglang.PAGE)]
        assert NUM_PAGES == fetched(sglang, controller, longer, pool)
        assert wanted == sglang.pages_of(pool, NUM_PAGES)
        assert 0 == fetched(sglang, controller, [1, *tokens[1:]], pool), "another prompt"


def test_with_sglangs_failure_injector_what_is_prefetched_is_right(sglang, backends, monkeypatch):
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE", "0.3")
    pool, tokens, lengths = sglang.mha(num_pages=8), [*range(8 * sglang.PAGE)], set()
    with sglang.controller(*backends["ours"], pool) as controller:
        for turn in range(60):
            pool.clear()
            wanted, prompt = sglang.filled(pool, 8, turn), [turn, *tokens[1:]]
            num_stored = stored(sglang, controller, prompt, pool)
            pool.clear()
            sglang.wiped(pool, 8)
            came = fetched(sglang, controller, prompt, pool)
            assert wanted[:came] == sglang.pages_of(pool, came)
            lengths.add((num_stored, came))
        controller.storage_backend._backend.close()  # which their proxy does not pass on
    assert {(8, 8), (8, 0), (0, 0)} == lengths
