"""Every refusal has OpenAI's shape, names the field and says what to do; nothing gets a 422."""

import inspect

import orjson
import pytest

from api import errors as api_errors
from api.errors import TABLE
from billing import errors as billing_errors
from billing.errors import LedgerUnavailable
from engine import errors as engine_errors
from engine.errors import EngineClosed, InvalidParameter, PromptTooLong, QueueFull
from tests.api.conftest import refusal, running
from tests.support.wire import Script, byte_model, fake_house

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
SECRET = "the prompt must not come back"
MESSAGES = [{"role": "user", "content": SECRET}]


def chat(**fields: object) -> dict[str, object]:
    return {"model": "bytes", "messages": MESSAGES} | fields


def text(**fields: object) -> dict[str, object]:
    return {"model": "bytes", "prompt": SECRET} | fields


CASES = [
    (CHAT, {"messages": MESSAGES}, 400, "model", "invalid_value"),
    (CHAT, {"model": "bytes"}, 400, "messages", "invalid_value"),
    (CHAT, chat(model=3), 400, "model", "invalid_value"),
    (CHAT, chat(model="gpt-9"), 404, "model", "model_not_found"),
    (CHAT, chat(messages=[]), 400, "messages", "invalid_value"),
    (CHAT, chat(messages="hi"), 400, "messages", "invalid_value"),
    (CHAT, chat(messages=[{"role": "usr", "content": SECRET}]), 400, "messages[0].role", None),
    (CHAT, chat(messages=[{"content": SECRET}]), 400, "messages[0].role", None),
    (CHAT, chat(messages=[{"role": "function", "content": "x"}]), 400, "messages", None),
    (CHAT, chat(messages=[{"role": "user", "content": 3}]), 400, "messages[0].content", None),
    (
        CHAT,
        chat(messages=[{"role": "user", "content": [{"type": "image_url"}]}]),
        400,
        "messages[0].content[0]",
        "unsupported_parameter",
    ),
    (CHAT, chat(max_tokens=0), 400, "max_tokens", None),
    (CHAT, chat(max_tokens="3"), 400, "max_tokens", None),
    (CHAT, chat(max_completion_tokens=-1), 400, "max_completion_tokens", None),
    (CHAT, chat(max_tokens=5000), 400, "max_tokens", "context_length_exceeded"),
    (
        "/v1/responses",
        {"model": "bytes", "input": "hi", "max_output_tokens": 5000},
        400,
        "max_output_tokens",
        "context_length_exceeded",
    ),
    (
        CHAT,
        chat(max_completion_tokens=5000),
        400,
        "max_completion_tokens",
        "context_length_exceeded",
    ),
    (CHAT, chat(temperature=2.1), 400, "temperature", None),
    (CHAT, chat(temperature="hot"), 400, "temperature", None),
    (CHAT, chat(top_p=0), 400, "top_p", None),
    (CHAT, chat(min_p=-1), 400, "min_p", None),
    (CHAT, chat(n=0), 400, "n", None),
    (CHAT, chat(n=65), 400, "n", None),
    (CHAT, chat(n=True), 400, "n", None),
    (CHAT, chat(stop=["a"] * 17), 400, "stop", None),
    (CHAT, chat(stop=""), 400, "stop", None),
    (CHAT, chat(stop=5), 400, "stop", None),
    (CHAT, chat(logit_bias={"the": 3}), 400, "logit_bias", None),
    (CHAT, chat(logit_bias={"3": 101}), 400, "logit_bias", None),
    (CHAT, chat(logit_bias={"257": 1}), 400, "logit_bias", None),
    (CHAT, chat(stop_token_ids=[9999]), 400, "stop_token_ids", None),
    (CHAT, chat(min_tokens=9, max_tokens=3), 400, "min_tokens", None),
    (CHAT, chat(presence_penalty=-3), 400, "presence_penalty", None),
    (CHAT, chat(top_logprobs=3), 400, "top_logprobs", None),
    (CHAT, chat(logprobs=True, top_logprobs=21), 400, "top_logprobs", None),
    (CHAT, chat(stream="yes"), 400, "stream", None),
    (CHAT, chat(response_format={"type": "xml"}), 400, "response_format.type", None),
    (CHAT, chat(tool_choice="required"), 400, "tool_choice", "invalid_value"),
    (TEXT, text(echo=True, logprobs=1, stream=True), 400, "logprobs", "unsupported_parameter"),
    (CHAT, chat(cachesvc={"share": "nobody's"}), 403, "cachesvc.share", "insufficient_scope"),
    (CHAT, chat(cachesvc={"max_prise": "1"}), 400, "cachesvc.max_prise", "invalid_value"),
    (TEXT, {"model": "bytes"}, 400, "prompt", None),
    (TEXT, text(prompt=""), 400, "prompt", None),
    (TEXT, text(prompt=[]), 400, "prompt", None),
    (TEXT, text(prompt=["a", ""]), 400, "prompt", None),
    (TEXT, text(prompt=[1, "a"]), 400, "prompt", None),
    (TEXT, text(prompt=[[1], []]), 400, "prompt", None),
    (TEXT, text(prompt=7), 400, "prompt", None),
    (TEXT, text(prompt=[300]), 400, "prompt", None),
    (TEXT, text(prompt="x" * 5000), 400, "prompt", "context_length_exceeded"),
    (TEXT, text(best_of=3), 400, "best_of", "unsupported_parameter"),
    (TEXT, text(suffix="end"), 400, "suffix", "unsupported_parameter"),
    (TEXT, text(prompt=["a"] * 33, n=2), 400, "n", None),
    ("/tokenize", {}, 400, "prompt", None),
    ("/detokenize", {"tokens": [999]}, 400, "tokens", None),
    ("/detokenize", {"tokens": ["a"]}, 400, "tokens[0]", None),
]


@pytest.mark.parametrize(("path", "body", "status", "param", "code"), CASES)
async def test_a_wrong_field_is_named(client, path, body, status, param, code):
    response = await client.post(path, json=body)
    error = response.json()["error"]
    assert (status, param) == (response.status_code, error["param"])
    assert {"message", "type", "param", "code"} == set(error)
    assert code is None or code == error["code"]
    assert len(error["message"]) > 15
    assert SECRET not in response.text


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
    from dataclasses import replace

    from tests.support.wire import ByteTokenizer

    class Plain(ByteTokenizer):
        has_chat_template = False

    house = fake_house(models=[replace(byte_model(), tokenizer=Plain())])
    async with running(house) as (_, client):
        error = (await client.post(CHAT, json=chat())).json()["error"]
        assert "unsupported_parameter" == error["code"]
        assert "/v1/completions" in error["message"]


SAID_AT_START = {
    engine_errors.AdapterError,
    engine_errors.ModelError,
    engine_errors.EngineAway,
    billing_errors.StoreError,
    billing_errors.ExportError,
    billing_errors.ReceiverError,
    billing_errors.ReceiptKeyError,
    billing_errors.CardConflict,
    billing_errors.PriceError,
    billing_errors.InvalidUsage,
    billing_errors.AccountError,
    billing_errors.GateError,
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
