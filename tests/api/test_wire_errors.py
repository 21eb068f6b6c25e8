"""Every refusal has OpenAI's shape, names the field and says what to do; nothing gets a 422. What a
stranger may put into a body is answered with a 4xx, after little work."""

import gc
import inspect
from dataclasses import replace

import orjson
import pytest
from pydantic import ValidationError

from api import errors as api_errors
from api.errors import TABLE, NotJson
from api.routes.tokenize import DetokenizeBody
from api.shapes.body import ITEMS_MAX, MESSAGES_MAX, parse
from api.shapes.schemas import BIASES_MAX, IDS_MAX, STOP_CHARS_MAX, ChatBody, CompletionBody
from billing import errors as billing_errors
from billing.errors import LedgerUnavailable
from engine import errors as engine_errors
from engine.errors import EngineClosed, InvalidParameter, PromptTooLong, QueueFull
from engine.structure import MAX_DEPTH, MAX_VALUES
from tests.api.conftest import refusal, running
from tests.support.wire import ByteTokenizer, Script, byte_model, fake_house

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
SECRET = "the prompt must not come back"
USER = {"role": "user", "content": SECRET}
LONGEST = byte_model().max_chars
IMAGE = {"role": "user", "content": [{"type": "image_url"}]}
SPAWN = {"type": "namespace", "name": "agents", "tools": [{"type": "function", "name": "spawn"}]}
SEARCH = {"type": "web_search"}


def chat(**fields):
    return {"model": "bytes", "messages": [USER]} | fields


def text(**fields):
    return {"model": "bytes", "prompt": SECRET} | fields


def asked(**fields):
    return {"model": "bytes", "input": SECRET} | fields


def said(*parts, **fields):
    return chat(messages=[{"role": "user", "content": list(parts)}], **fields)


def structured(**fields):
    return chat(structured_outputs=fields)


def tool(**fields):
    return {"type": "function", "function": {"name": "f", **fields}}


def nested(levels):
    document = {}
    for _ in range(levels):
        document = {"a": document}
    return document


def calling(*calls):
    return [USER, {"role": "assistant", "content": "", "tool_calls": list(calls)}]


# Refused with 400 and the name of the field; below, also with a code of their own.
OF_CHAT = {"max_tokens": [0, "3"], "max_completion_tokens": [-1], "temperature": [2.1, "hot"]}
OF_CHAT |= {"top_p": [0], "min_p": [-1], "n": [0, 65, True], "stop": [["a"] * 17, "", 5]}
OF_CHAT |= {"logit_bias": [{"the": 3}, {"3": 101}, {"257": 1}], "stop_token_ids": [[9999]]}
OF_CHAT |= {"presence_penalty": [-3], "top_logprobs": [3], "stream": ["yes"]}
NO_PROMPTS = ("", [], ["a", ""], [1, "a"], [[1], []], 7, [300])
WRONG = [
    (CHAT, chat(messages=[{"role": "usr", "content": SECRET}]), "messages[0].role"),
    (CHAT, chat(messages=[{"content": SECRET}]), "messages[0].role"),
    (CHAT, chat(messages=[{"role": "function", "content": "x"}]), "messages"),
    (CHAT, chat(messages=[{"role": "user", "content": 3}]), "messages[0].content"),
    *((CHAT, chat(**{name: value}), name) for name, values in OF_CHAT.items() for value in values),
    (CHAT, chat(min_tokens=9, max_tokens=3), "min_tokens"),
    (CHAT, chat(logprobs=True, top_logprobs=21), "top_logprobs"),
    (CHAT, chat(response_format={"type": "xml"}), "response_format.type"),
    (CHAT, chat(response_format={"type": "json_schema"}), "response_format.json_schema"),
    (
        CHAT,
        chat(response_format={"type": "json_schema", "json_schema": {"name": "x"}}),
        "response_format.json_schema.schema",
    ),
    (CHAT, structured(), "structured_outputs"),
    (CHAT, structured(regex="a", choice=["b"]), "structured_outputs"),
    (CHAT, structured(regex=3), "structured_outputs.regex"),
    (CHAT, structured(structural_tag="x"), "structured_outputs.structural_tag"),
    (CHAT, structured(json="{"), "structured_outputs.json"),
    (CHAT, structured(regex="a" * 70_000), "structured_outputs.regex"),
    (
        CHAT,
        structured(regex="a") | {"response_format": {"type": "json_object"}},
        "structured_outputs",
    ),
    (TEXT, {"model": "bytes"}, "prompt"),
    *((TEXT, text(prompt=prompt), "prompt") for prompt in NO_PROMPTS),
    (TEXT, text(prompt=["a"] * 33, n=2), "n"),
    ("/tokenize", {}, "prompt"),
    ("/tokenize", {"messages": []}, "messages"),
    ("/detokenize", {"tokens": [999]}, "tokens"),
    ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
    (RESPONSES, asked(background=True), "background"),
    (RESPONSES, asked(conversation="c"), "conversation"),
    (RESPONSES, asked(truncation="auto"), "truncation"),
    (RESPONSES, asked(include=["web_search_call.action.sources"]), "include"),
    (RESPONSES, asked(input=""), "input"),
    (RESPONSES, asked(input=[{"type": "item_reference", "id": "x"}]), "input[0]"),
    (RESPONSES, asked(input=[{"type": "function_call", "name": "f"}]), "input[0].call_id"),
    (RESPONSES, asked(tools=[SEARCH]), "tools[0].type"),
    (RESPONSES, asked(tools=[{**SPAWN, "tools": [SEARCH]}]), "tools[0].tools[0].type"),
    (RESPONSES, asked(tools=[{**SPAWN, "tools": [SPAWN]}]), "tools[0].tools[0].type"),
    (RESPONSES, asked(tools=[SPAWN, SPAWN]), "tools"),
    (RESPONSES, asked(tools=[{**SPAWN, "tools": 5}]), "tools[0].tools"),
    (RESPONSES, asked(metadata={"a": "x" * 513}), "metadata.a"),
    (RESPONSES, asked(metadata={f"key{n}": "x" for n in range(17)}), "metadata"),
    (RESPONSES, asked(user="x" * 513), "user"),
    (RESPONSES, asked(reasoning={"summary": "x" * 513}), "reasoning.summary"),
    (RESPONSES, asked(prompt_cache_key="x" * 513), "prompt_cache_key"),
]
TOO_MUCH = [
    (CHAT, chat(messages=[USER] * (MESSAGES_MAX + 1)), "messages"),
    (CHAT, said(*[{"type": "text", "text": "a"}] * (ITEMS_MAX + 1)), "messages[0].content"),
    (CHAT, chat(tools=[tool()] * (ITEMS_MAX + 1)), "tools"),
    (CHAT, chat(tools=[tool(parameters=nested(MAX_DEPTH))]), "tools"),
    (CHAT, chat(tools=[tool(parameters={"enum": [1] * MAX_VALUES})]), "tools"),
    (CHAT, chat(messages=calling(nested(MAX_DEPTH))), "messages[1].tool_calls"),
    (CHAT, chat(stop=["a" * (STOP_CHARS_MAX + 1)]), "stop"),
    (CHAT, chat(stop_token_ids=[1] * (ITEMS_MAX + 1)), "stop_token_ids"),
    (CHAT, chat(logit_bias={str(i): 1 for i in range(BIASES_MAX + 1)}), "logit_bias"),
    (CHAT, chat(logit_bias={"9" * 5000: 1}), "logit_bias"),
    (CHAT, chat(repetition_penalty=1e-300), "repetition_penalty"),
    (CHAT, chat(top_k=1 << 40), "top_k"),
    (CHAT, chat(seed=-(1 << 63) - 1), "seed"),
    (CHAT, chat(min_tokens=1 << 40), "min_tokens"),
    (TEXT, text(max_tokens=1 << 40), "max_tokens"),
    (CHAT, structured(json={"enum": [1] * MAX_VALUES}), "structured_outputs.json"),
    (CHAT, structured(choice=["a"] * MAX_VALUES), "structured_outputs.choice"),
    (TEXT, text(prompt=[1] * (IDS_MAX + 1)), "prompt"),
]
TOO_LONG = [
    (CHAT, chat(max_tokens=5000), "max_tokens"),
    (CHAT, chat(max_completion_tokens=5000), "max_completion_tokens"),
    (RESPONSES, asked(max_output_tokens=5000), "max_output_tokens"),
    (TEXT, text(prompt="x" * 5000), "prompt"),
    (CHAT, chat(messages=[{"role": "user", "content": "x" * (LONGEST + 1)}]), "messages"),
    (CHAT, chat(messages=[USER | {"name": "x" * (LONGEST + 1)}]), "messages"),
    (CHAT, chat(tools=[tool(description="x" * LONGEST)]), "messages"),
    (TEXT, text(prompt="x" * (LONGEST + 1)), "prompt"),
    ("/tokenize", {"prompt": "x" * (LONGEST + 1)}, "prompt"),
]
CODED = [
    (CHAT, {"messages": [USER]}, 400, "model", "invalid_value"),
    (CHAT, {"model": "bytes"}, 400, "messages", "invalid_value"),
    (CHAT, chat(model=3), 400, "model", "invalid_value"),
    (CHAT, chat(model="gpt-9"), 404, "model", "model_not_found"),
    (CHAT, chat(messages=[]), 400, "messages", "invalid_value"),
    (CHAT, chat(messages="hi"), 400, "messages", "invalid_value"),
    (CHAT, chat(messages=[IMAGE]), 400, "messages[0].content[0]", "unsupported_parameter"),
    (CHAT, chat(tool_choice="required"), 400, "tool_choice", "invalid_value"),
    (TEXT, text(echo=True, logprobs=1, stream=True), 400, "logprobs", "unsupported_parameter"),
    (CHAT, chat(cachesvc={"share": "nobody's"}), 403, "cachesvc.share", "insufficient_scope"),
    (CHAT, chat(cachesvc={"max_prise": "1"}), 400, "cachesvc.max_prise", "invalid_value"),
    (TEXT, text(best_of=3), 400, "best_of", "unsupported_parameter"),
    (TEXT, text(suffix="end"), 400, "suffix", "unsupported_parameter"),
    (RESPONSES, asked(previous_response_id="resp_x"), 404, "previous_response_id", "not_found"),
    *((path, body, 400, param, "context_length_exceeded") for path, body, param in TOO_LONG),
]
CASES = CODED + [(path, body, 400, param, None) for path, body, param in WRONG + TOO_MUCH]


@pytest.mark.parametrize(("path", "body", "status", "param", "code"), CASES)
async def test_a_wrong_field_is_named(client, path, body, status, param, code):
    response = await client.post(path, json=body)
    error = response.json()["error"]
    assert (status, param) == (response.status_code, error["param"])
    assert {"message", "type", "param", "code"} == set(error)
    assert code is None or code == error["code"]
    assert 15 < len(error["message"]) < 400
    assert SECRET not in response.text


async def test_as_much_as_is_served_is_served(client):
    body = chat(
        max_tokens=2,
        tools=[tool(parameters={"type": "object", "default": nested(MAX_DEPTH - 5)})],
        messages=calling(nested(MAX_DEPTH - 2)),
        stop=["~" * STOP_CHARS_MAX],
    )
    answer = await client.post(CHAT, json=body)
    assert 200 == answer.status_code, answer.text


WRONG = [
    (ChatBody, "messages", [{"model": "m"}, 1]),
    (ChatBody, "tools", [1]),
    (ChatBody, "stop", [1]),
    (ChatBody, "stop_token_ids", [""]),
    (CompletionBody, "prompt", ["a", 1]),
    (DetokenizeBody, "tokens", [""]),
]


@pytest.mark.parametrize(("kind", "name", "wrong"), WRONG)
def test_a_list_is_looked_through_to_its_first_wrong_item(kind, name, wrong):
    """Pydantic's default reports them all, which took minutes for a body of 16 MiB."""
    given = wrong * 500 if isinstance(wrong, list) else wrong
    with pytest.raises(ValidationError) as refused:
        kind.model_validate({"model": "m", "messages": [USER], "prompt": "a", name: given})
    found = [error for error in refused.value.errors() if error["loc"][0] == name]
    assert 1 <= len(found) <= 3


@pytest.mark.parametrize("raw", [b'{"tokens": [1]', b'{"tokens": [1}'])
def test_collections_go_on_after_a_body_that_is_no_json(raw):
    with pytest.raises(NotJson):
        parse(raw, DetokenizeBody)
    assert gc.isenabled()


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        (
            CHAT,
            chat(messages=[]),
            "'messages': should have at least 1 item, not 0; got a JSON array.",
        ),
        (CHAT, chat(cachesvc="details"), "'cachesvc': should be an object; got 'details'."),
        (CHAT, chat(structured_outputs=[]), "'structured_outputs': should be an object; got"),
        (CHAT, chat(user_id="é"), "'user_id': should match pattern"),
        (CHAT, chat(tools={}), "'tools': should be an array; got a JSON object."),
        ("/v1/caches", text(ttl="2y"), "'ttl': should be seconds, or a text such as"),
    ],
)
async def test_a_refusal_is_in_the_words_of_json(client, path, body, message):
    answer = await client.post(path, json=body)
    assert f"Invalid {message}" == answer.json()["error"]["message"][: len(message) + 8]


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b'"text"', b"null", b"3", b"\xff\xfe", b'{"model": NaN}']
)
async def test_a_body_that_is_no_json_object(client, body):
    response = await client.post(CHAT, content=body)
    assert (400, "invalid_json") == refusal(response)


async def test_routes_and_methods_that_do_not_exist(client):
    missing, wrong = await client.get("/v2/nothing"), await client.get(CHAT)
    assert (404, "not_found") == refusal(missing)
    assert (405, "method_not_allowed") == refusal(wrong)
    assert wrong.headers["allow"] == "POST"


@pytest.mark.parametrize(
    ("raised", "status", "code"),
    [
        (PromptTooLong("9 tokens, 8 fit"), 400, "context_length_exceeded"),
        (InvalidParameter("top_k is -5", "top_k"), 400, "invalid_value"),
        (QueueFull("full"), 503, "overloaded"),
        (EngineClosed("closing"), 503, "shutting_down"),
    ],
)
async def test_what_the_engine_refuses(client, house, raised, status, code):
    house.engine.script = Script(refuse=raised)
    response = await client.post(CHAT, json=chat())
    assert (status, code) == refusal(response)
    assert (status == 503) == ("retry-after" in response.headers)
    assert [1] == [charge.num_voided for charge in house.meter.charges]


async def test_a_ledger_that_cannot_write_fails_closed(client, house):
    house.meter.fail_settle = LedgerUnavailable("the disk is full")
    whole = await client.post(CHAT, json=chat())
    stream = await client.post(CHAT, json=chat(stream=True))
    assert (503, "ledger_unavailable") == refusal(whole)
    last = stream.text.removesuffix("data: [DONE]\n\n").split("data: ")[-1]
    assert orjson.loads(last)["error"]["code"] == "ledger_unavailable"
    assert '"finish_reason":"' not in stream.text


async def test_a_model_without_a_template_refuses_chat():
    class Plain(ByteTokenizer):
        has_chat_template = False

    house = fake_house(models=[replace(byte_model(), tokenizer=Plain())])
    async with running(house) as (_, client):
        error = (await client.post(CHAT, json=chat())).json()["error"]
        assert "unsupported_parameter" == error["code"]
        assert "/v1/completions" in error["message"]


SAID_AT_START = {
    *(engine_errors.AdapterError, engine_errors.ModelError, engine_errors.EngineAway),
    *(billing_errors.StoreError, billing_errors.ExportError, billing_errors.ReceiverError),
    *(billing_errors.ReceiptKeyError, billing_errors.CardConflict, billing_errors.PriceError),
    *(billing_errors.InvalidUsage, billing_errors.AccountError, billing_errors.GateError),
    billing_errors.UnknownHold,
}


def test_every_error_of_the_packages_has_its_row():
    """An operational error without a row would be a 500 that hides a fixable cause."""
    bases = {api_errors.ApiError, engine_errors.EngineError, billing_errors.BillingError}
    kinds = {
        kind
        for module in (api_errors, engine_errors, billing_errors)
        for _, kind in inspect.getmembers(module, inspect.isclass)
        if any(issubclass(kind, base) for base in bases) and kind not in bases
    }
    rowless = {kind for kind in kinds if not any(base in TABLE for base in kind.__mro__)}
    assert rowless <= SAID_AT_START, rowless - SAID_AT_START
