"""A server before an endpoint of its clients' own protocol: what passes, and what it costs."""

import json
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from api.relay.protocol import is_cut
from billing.money import UNITS
from billing.prices.cards import parse_card
from cachesvc.config.errors import ConfigError
from cachesvc.server.relay.core import _picked
from engine.errors import ModelError
from tests.api.relaying import ALL, charges, paying, relaying, unreported, usage_of, usages
from tests.support.billing import card_text, priced
from tests.support.remote_engine import event
from tests.support.stand_in import served, tls
from tests.support.upstream import (
    CACHED,
    CHAT,
    COMPLETIONS,
    MESSAGES,
    OUTPUT,
    PATHS,
    PROMPT,
    RESPONSES,
    STREAMS,
    USAGE_CHUNK,
    WHOLE,
    UpstreamServer,
    body,
    compact,
    joined,
    named,
    stream_of,
)

pytestmark = pytest.mark.anyio
CONTEXT = 4000


@pytest.mark.parametrize("path", PATHS)
async def test_an_answer_passes_byte_for_byte_and_costs_the_same_streamed(up, tmp_path, path):
    async with relaying(tmp_path, up) as (service, client):
        whole = await client.post(path, json=body(path))
        assert (200, compact(WHOLE[path])) == (whole.status_code, whole.content)
        options = {"stream_options": {"include_usage": True}}
        streamed = await client.post(path, json=body(path, stream=True, **options))
        assert joined(stream_of(path)) == streamed.content
        assert "text/event-stream; charset=utf-8" == streamed.headers["content-type"]
        assert [ALL, ALL] == usages(service)
        first, second = charges(service)
        assert first.amount == second.amount != 0
        assert path == up.asked[-1][0]


@pytest.mark.parametrize("stream", [False, True])
async def test_over_tls_an_answer_leaves_its_connection_to_the_next(
    up, tmp_path, monkeypatch, stream
):
    up.socket = tls(tmp_path, monkeypatch).wrap_socket(up.socket, server_side=True)
    up.script = {path: [*script, 0.06] for path, script in up.script.items()}  # and then it ends
    async with relaying(tmp_path, up) as (service, client):
        for path in PATHS:
            for _ in range(30):
                before = up.num_connections
                for _ in range(4):
                    await client.post(path, json=body(path, stream=stream))
                    await anyio.sleep(0.1)
                if up.num_connections - before < 2:  # a look at the endpoint may have taken one
                    break
            else:
                raise AssertionError(f"each answer of {path} took a connection")
        assert all(used == ALL for used in usages(service))


@pytest.mark.parametrize("root", ["/v1", "/openai/v1/", "/v1beta/openai", "/api/paas/v4"])
async def test_a_url_may_have_the_version_as_openais_clients_take_it(up, tmp_path, root):
    up.root = root.rstrip("/")
    async with relaying(tmp_path, SimpleNamespace(url=up.url + root)) as (service, client):
        assert CONTEXT == service.core.engine.max_tokens, "its models were listed"
        for path in PATHS:
            assert 200 == (await client.post(path, json=body(path))).status_code
        assert [ALL] * len(PATHS) == usages(service)


def test_a_list_of_models_may_be_bare_and_tell_the_context_as_anthropic_does():
    said = json.dumps([{"id": "up", "max_input_tokens": CONTEXT}]).encode()
    assert CONTEXT == _picked("http://up", 200, said, "up").max_context


async def test_a_header_tells_what_fireworks_had_cached(up, tmp_path):
    bare = {name: n for name, n in WHOLE[CHAT]["usage"].items() if "details" not in name}
    up.whole[CHAT] = compact({**WHOLE[CHAT], "usage": bare})
    unknown = {"miss": PROMPT, "unreported": PROMPT, "output": OUTPUT}
    async with relaying(tmp_path, up) as (service, client):
        for told in (str(CACHED), "101", "-1", "²"):
            expected = ALL if told == str(CACHED) else unknown
            up.headers = {"fireworks-cached-prompt-tokens": told}
            await client.post(CHAT, json=body(CHAT))
            assert expected == usages(service)[-1], told


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_usage_is_asked_for_and_not_shown_to_who_did_not_ask(up, tmp_path, path):
    async with relaying(tmp_path, up) as (service, client):
        streamed = await client.post(path, json=body(path, stream=True))
        expected = [each for each in stream_of(path) if each != USAGE_CHUNK]
        assert joined(expected) == streamed.content
        assert {"include_usage": True} == up.asked[0][2]["stream_options"]
        of_litellm = {"choices": [{"index": 0, "delta": {}}], "usage": WHOLE[CHAT]["usage"]}
        up.script[path] = [event(of_litellm) if e == USAGE_CHUNK else e for e in stream_of(path)]
        streamed = await client.post(path, json=body(path, stream=True, stream_options={"x": 1}))
        assert joined(expected) == streamed.content
        assert {"x": 1, "include_usage": True} == up.asked[1][2]["stream_options"]
        assert [ALL, ALL] == usages(service)


async def test_a_body_passes_unchanged_but_for_what_is_the_tenants(up, tmp_path):
    up.cards = [{"id": "inner-name", "max_model_len": CONTEXT}]
    odd = {"seed": 12345678901234567, "what": {"in": [1, 2.5, None]}, "file_id": {"type": "string"}}
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    async with relaying(tmp_path, up) as (_, client):
        asked = body(CHAT, **odd, user="alice", metadata={"a": "b"}, service_tier="priority")
        asked["messages"] = [{"role": "user", "content": [image, {"type": "text", "text": "?"}]}]
        assert 200 == (await client.post(CHAT, json=asked)).status_code
        went = up.asked[-1][2]
        assert "inner-name" == went.pop("model")
        user = went.pop("user")
        assert user != "alice" and len(user) == 32
        kept = {k: v for k, v in asked.items() if k not in ("model", "user", "metadata")}
        kept.pop("service_tier")
        assert kept == went
        await client.post(CHAT, json=asked)
        assert user == up.asked[-1][2]["user"], "the endpoint can tell users apart"
        names = {"metadata": {"user_id": "alice"}, "prompt_cache_isolation_key": "alice"}
        named = body(MESSAGES, **names, cache_salt="mine")
        await client.post(MESSAGES, json=named)
        assert "alice" not in json.dumps(up.asked[-1][2])
        assert up.asked[-1][2]["cache_salt"] not in ("mine", "")
        await client.post(RESPONSES, json=body(RESPONSES, store=True))
        assert up.asked[-1][2]["store"] is False, "the account is shared by all tenants"


async def test_events_of_every_form_pass_and_are_read(up, tmp_path):
    """Comments, names, ids, lines of either end, a document on two lines, kinds that nobody knows,
    an odd index, usage in every chunk. After the end nothing passes."""
    usage = WHOLE[CHAT]["usage"]
    first = json.dumps(usage | {"completion_tokens": 1}).encode()
    said = [
        b": OPENROUTER PROCESSING\n\n",
        b'event: x\nid: 7\nretry: 10\ndata: {"type": "unknown.kind", "more": [1]}\r\n\r\n',
        b'data: {"choices": [{"index": null, "delta": {"content": "H"}}],\r\n',
        b'data: "usage": %s}\n\r\n' % first,
        b'data: {"choices": [{"index": [0], "delta": {}, "finish_reason": "stop"}]}\r\r',
        b"data:%s\n\n" % json.dumps({"choices": [], "usage": usage}).encode(),
        b"data:[DONE]\n\n",
    ]
    up.script[CHAT] = [*said, b'data: {"choices": [{"delta": {"content": "more"}}]}\n\n']
    async with relaying(tmp_path, up) as (service, client):
        options = {"include_usage": True, "continuous_usage_stats": True}
        answer = await client.post(CHAT, json=body(CHAT, stream=True, stream_options=options))
        assert joined(said) == answer.content
        assert options == up.asked[0][2]["stream_options"]
        assert [ALL] == usages(service)


async def test_log_probabilities_of_an_uncounted_answer_are_no_output(up, tmp_path):
    [choice] = WHOLE[CHAT]["choices"]
    likely = {"content": [{"token": "H", "top_logprobs": [{"token": "How"}] * 20}]}
    up.whole[CHAT] = compact({"choices": [{**choice, "logprobs": likely}]})
    async with relaying(tmp_path, up) as (service, client):
        asked = body(CHAT, logprobs=True)
        await client.post(CHAT, json=asked)
        assert [unreported(**asked) | {"output": len("Hi!")}] == usages(service)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"engine_vllm": {"max-model-len": 64, "seed": 1}}, "leave seed out"),
        ({"model_exact": "always"}, "nothing is promised of an engine at a URL"),
        ({"model_adapters": {"a": "/a"}}, "a relay has no adapters"),
    ],
)
async def test_what_would_have_no_effect_is_refused_at_the_start(up, tmp_path, settings, told):
    with pytest.raises((ConfigError, ModelError), match=told):
        async with relaying(tmp_path, up, **settings):
            pass


async def test_an_engine_with_salts_keeps_tenants_apart(tmp_path):
    with served(UpstreamServer(owned_by="vllm")) as up:
        async with relaying(tmp_path, up) as (service, client):
            salts = []
            for name in ("acme", "bolt"):
                headers = paying(service, UNITS, name)
                for more in ({}, {"cache_salt": "x"}):
                    answer = await client.post(CHAT, json=body(CHAT, **more), headers=headers)
                    assert 200 == answer.status_code, answer.text
                    salts.append(up.asked[-1][2]["cache_salt"])
            assert 4 == len(set(salts)), "by tenant, and within one by its own salts"


async def test_no_header_of_the_tenant_goes_up_and_none_of_the_endpoint_comes_down(
    up, tmp_path, caplog
):
    mine = {"authorization": "Bearer mine", "x-api-key": "mine", "cookie": "a=b"}
    mine |= {"x-forwarded-for": "10.1.1.1", "forwarded": "for=10.1.1.1", "user-agent": "me"}
    mine |= {"anthropic-beta": "one-2025-01-01,two"}
    mine |= {"traceparent": "00-" + 32 * "a" + "-" + 16 * "b" + "-01"}
    async with relaying(tmp_path / "data", up, engine_key="sk-inside") as (_, client):
        for path in PATHS:
            answer = await client.post(path, json=body(path), headers=mine)
            assert 200 == answer.status_code, answer.text
            went = dict(up.asked[-1][1])
            assert {"x-inside", "set-cookie", "server", "date"}.isdisjoint(answer.headers)
            assert "Bearer sk-inside" == went.pop("authorization")
            went = {k: v for k, v in went.items() if k not in ("host", "connection")}
            assert "cachesvc" == went.pop("user-agent")
            went = {k: v for k, v in went.items() if not k.startswith(("content-", "accept"))}
            if path == MESSAGES:
                told = {"anthropic-version": "2023-06-01", "anthropic-beta": "one-2025-01-01,two"}
                assert told | {"x-api-key": "sk-inside"} == went
            else:
                assert {} == went
            assert "sk-inside" not in answer.text + str(answer.headers)
        up.status, up.refusal = 400, b'{"error": {"message": "no such plan for sk-inside"}}'
        assert "no such plan for ***" in (await client.post(CHAT, json=body(CHAT))).text
        stats = (await client.get("/metrics")).text
        assert "sk-inside" not in stats + caplog.text


async def test_the_journal_and_metrics_say_what_passed(up, tmp_path):
    bare = {**WHOLE[CHAT], "usage": {"prompt_tokens": PROMPT, "completion_tokens": OUTPUT}}
    up.script[CHAT] = [each.replace(b'"stop"', b'"length"') for each in stream_of(CHAT)]
    async with relaying(tmp_path, up) as (service, client):
        told = await client.post(CHAT, json=body(CHAT, stream=True))
        up.whole[CHAT] = compact(bare)
        untold = await client.post(CHAT, json=body(CHAT))
        assert [ALL, {"miss": PROMPT, "unreported": PROMPT, "output": OUTPUT}] == usages(service)
        metrics = (await client.get("/metrics")).text
        assert f'cachesvc_miss_tokens_total{{reason="unreported"}} {PROMPT}.0' in metrics
        assert f'cachesvc_prompt_tokens_total{{source="device"}} {CACHED}.0' in metrics
        assert f"cachesvc_generation_tokens_total {2 * OUTPUT}.0" in metrics
        for finish in ("stop", "length"):
            assert f'cachesvc_requests_total{{finish="{finish}"}} 1.0' in metrics
        for answer, is_unreported in ((told, False), (untold, True)):
            name = answer.headers["x-request-id"]
            shown = await client.get(f"/v1/cache/requests/{name}")
            assert is_unreported == ("did not say" in shown.text), shown.text
            assert PROMPT == shown.json()["prompt_tokens"], "not what its body could be at most"
            assert ["stop" if is_unreported else "length"] == shown.json()["finish_reasons"]
        assert 0 == service.core.engine.stats().num_running
        client.headers["authorization"] = f"Bearer {service.dashboard.parts.operator_token}"
        page = await client.get(f"/admin/requests/{told.headers['x-request-id']}")
        assert "told how many tokens it had" in page.text


def test_the_end_of_an_answer_at_its_limit_is_known_in_every_protocol():
    for end in ({"delta": {"stop_reason": "max_tokens"}}, {"response": {"status": "incomplete"}}):
        assert is_cut({"type": "an end", **end})
    assert not any(map(is_cut, WHOLE.values()))


async def test_a_whole_answer_without_usage_costs_what_the_body_could_be_at_most(up, tmp_path):
    """Streams: see what becomes of a killed endpoint."""
    async with relaying(tmp_path, up) as (service, client):
        for path in PATHS:
            up.whole[path] = compact({**WHOLE[path], "usage": None})
            answer = await client.post(path, json=body(path))
            assert 200 == answer.status_code, answer.text
            assert unreported(**body(path)) | {"output": len("Hi!")} == usages(service)[-1], path


READERS = ("mcp_servers", "plugins", "web_search_options", "data_sources")
READERS += ("search_parameters", "enable_search")


async def test_what_makes_the_prompt_longer_than_its_bytes_is_held_for_as_the_whole_context(
    up, tmp_path
):
    """Images and what the endpoint reads itself. A text that speaks of images is a text."""
    up.whole[CHAT] = compact({**WHOLE[CHAT], "usage": None})
    image = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}
    shot = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "image"}]}
    spoken = {"type": "text", "text": '{"type":"image_url","image_url":{"url":"x"}}'}
    said = [[{"role": "user", "content": [part]}] for part in (image, shot, spoken)]
    long = [{"messages": each} for each in said[:2]] + [{name: [{"id": "w"}]} for name in READERS]
    short = [{"messages": said[2]}, *({name: None} for name in READERS)]
    async with relaying(tmp_path, up) as (service, client):
        for more in long + short:
            assert 200 == (await client.post(CHAT, json=body(CHAT, **more))).status_code, more
        misses = [each["miss"] for each in usages(service)]
        assert {CONTEXT} == set(misses[: len(long)]) and CONTEXT > max(misses[len(long) :])


@pytest.mark.parametrize("stream", [False, True])
async def test_prompts_of_several_calls_in_one_answer_are_held_once_they_are_known(
    up, tmp_path, stream
):
    """Together they may be longer than the context. A body of one call cannot be."""
    told = {"input_tokens": 100, "cache_read_input_tokens": 2 * CONTEXT, "output_tokens": OUTPUT}
    up.whole[MESSAGES] = compact({**WHOLE[MESSAGES], "usage": told})
    head, text, end, _, done = STREAMS[MESSAGES]
    up.script[MESSAGES] = [*head, *text, *end, named("message_delta", usage=told), *done]
    counted = {"hit_device": 2 * CONTEXT, "miss": 100, "output": OUTPUT}
    tools = {"tools": [{"type": ["odd"]}, {"type": "web_search_20250305", "name": "web_search"}]}
    summary = {"context_management": {"edits": [{"type": "compact_20260112"}]}}
    cases = [("rich", tools, True), ("too", summary, True), ("one", {}, False)]
    async with relaying(tmp_path, up) as (service, client):
        for name, more, is_counted in (*cases, ("poor", summary, False)):
            asked = body(MESSAGES, stream=stream, **more)
            units = 10**6 * CONTEXT * (2 if name == "poor" else 40)
            answer = await client.post(MESSAGES, json=asked, headers=paying(service, units, name))
            assert 200 == answer.status_code, answer.text
            (entry,) = charges(service, name)
            expected = counted if is_counted else unreported(**asked) | {"output": OUTPUT}
            assert expected == usage_of(entry), name
            assert 0 <= service._money.accounts.tenant(name).balance


KEPT = ("previous_response_id", "conversation", "background", "deferred")
DEARER = ("models", "fallbacks", "provider", "speed", "inference_geo", "extra_body")
INSIDE = ("extra_headers", "api_base", "kv_transfer_params", "priority", "chat_template")
INSIDE += ("lora_path", "bootstrap_host", "id_slot")
REFUSED: tuple[tuple[str, dict[str, Any]], ...] = (
    *((name, {name: "x"}) for name in KEPT + DEARER + INSIDE),
    ("prompt", {"prompt": {"id": "pmpt_1"}}),
    ("cachesvc", {"cachesvc": {"details": True}}),
    ("tools", {"tools": [{"type": "advisor_20260301", "model": "dear"}]}),
    ("n", {"n": 65}),
    ("max_output_tokens", {"max_output_tokens": 0}),
    ("model", {"model": "other"}),
    ("file_id", {"input": [{"type": "input_image", "file_id": "file-1"}]}),
    ("container", {"tools": [{"type": "code_interpreter", "container": "cntr_1"}]}),
    ("file_ids", {"tools": [{"container": {"type": "auto", "file_ids": ["file-1"]}}]}),
    ("vector_store_ids", {"tools": [{"type": "file_search", "vector_store_ids": ["vs_1"]}]}),
    ("item_reference", {"input": [{"type": "item_reference", "id": "msg_1"}]}),
)


async def test_what_cannot_pass_is_refused_by_name(up, tmp_path):
    async with relaying(tmp_path, up) as (service, client):
        for name, more in REFUSED:
            answer = await client.post(RESPONSES, json=body(RESPONSES, **more))
            assert answer.status_code in (400, 404), more
            assert name == answer.json()["error"]["param"]
        vendor = await client.post(CHAT, json=body(CHAT), headers={"x-cachesvc": "details"})
        tokens = await client.post("/tokenize", json={"model": "up", "prompt": "x"})
        for answer in (vendor, tokens):
            error = answer.json()["error"]
            assert (400, "unsupported_parameter") == (answer.status_code, error["code"])
        assert [] == up.asked and [] == charges(service)
        part = {"type": "tool_use", "id": "t", "name": "open", "input": {"file_ids": ["mine"]}}
        turns = [{"role": "assistant", "content": [part]}]
        assert 200 == (await client.post(MESSAGES, json=body(MESSAGES, messages=turns))).status_code


async def test_of_an_endpoint_that_counts_one_prompt_no_more_are_asked(tmp_path):
    """llama-server: what it says of its context is bounded by, and its other prompts were free."""
    meta = {"n_ctx": CONTEXT, "n_ctx_train": 9000}
    llama = UpstreamServer(owned_by="llamacpp", max_model_len=None, meta=meta)
    with served(llama) as up:
        async with relaying(tmp_path, up) as (service, client):
            several = {"prompt": ["Hello", "You"]}, {"prompt": [[1], [2]]}, {"n": 2}, {"n_cmpl": 2}
            for more in several:
                answer = await client.post(COMPLETIONS, json=body(COMPLETIONS, **more))
                assert 400 == answer.status_code
                assert "more than the 1 that" in answer.json()["error"]["message"]
            assert CONTEXT == service.core.engine.max_tokens and [] == up.asked == usages(service)
            for one in ("Hello", ["Hello"], [1, 2]):
                await client.post(COMPLETIONS, json=body(COMPLETIONS, prompt=one))
            assert [ALL] * 3 == usages(service)


async def test_a_prompt_that_may_be_long_is_priced_by_what_it_was(up, tmp_path):
    """A card with dearer long prompts: the body's bound is above its length, the prompt is not."""
    long = {"prompt_tokens": 200, "hit": "2", "miss": "20", "output": "40"}
    card = card_text("long", priced("*", "1", "10", "20", above=long))
    async with relaying(tmp_path, up) as (service, client):
        service._money.accounts.apply_card(parse_card(card), by="test")
        await client.post(CHAT, json=body(CHAT))
        (charge,) = charges(service)
        assert "standard" == charge.details["window"]
        cost = CACHED * 1 + (PROMPT - CACHED) * 10 + OUTPUT * 20
        assert -cost * UNITS // 10**6 == charge.amount
        up.whole[CHAT] = compact({**WHOLE[CHAT], "usage": None})
        await client.post(CHAT, json=body(CHAT))
        assert "above 200" == charges(service)[1].details["window"], "as it may have been"
