"""litellm's proxy before the server, asked by httpx as any OpenAI client would ask it."""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
from cells import ASKED, MODEL, QUESTION, SPENT, TOOL, URL, cell, main

CONFIG = {
    "model_list": [
        {
            "model_name": "served",
            "litellm_params": {
                "model": f"openai/{MODEL}",
                "api_base": f"{URL}/v1",
                "api_key": "any",
            },
        }
    ],
    "litellm_settings": {"telemetry": False, "num_retries": 0},
    "general_settings": {"dangerously_permit_weak_or_unset_master_key": True},
}
proxy = httpx.Client(timeout=300)


def started(folder):
    """The proxy's process; `proxy` asks it from then on."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    config = Path(folder, "config.yaml")
    config.write_text(json.dumps(CONFIG))  # JSON is YAML
    command = [Path(sys.executable).with_name("litellm"), "--config", config]
    with Path(folder, "log").open("wb") as log:
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port)],
            stdout=log,
            stderr=log,
            env={**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"},  # fetches nothing
        )
    proxy.base_url = f"http://127.0.0.1:{port}"
    give_up = time.monotonic() + 240
    while time.monotonic() < give_up and process.poll() is None:
        try:
            if proxy.get("/health/liveliness").status_code == 200:
                return process
        except httpx.TransportError:
            time.sleep(0.2)
    process.kill()
    raise RuntimeError(Path(folder, "log").read_text()[-3000:])


def posted(path, **body):
    answer = proxy.post(path, json={"model": "served", **body})
    assert answer.status_code == 200, answer.text
    return answer


@cell
def chat_answer():
    answer = posted("/v1/chat/completions", messages=ASKED, temperature=0, max_tokens=16).json()
    assert "Paris" in answer["choices"][0]["message"]["content"]
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


@cell
def chat_limit():
    body = {"model": "served", "messages": ASKED, "max_tokens": 8, "user_id": SPENT}
    answer = proxy.post("/v1/chat/completions", json=body)
    assert answer.status_code == 429, answer.text
    error = answer.json()["error"]  # the proxy's own, around the message of the server
    assert "spend limit 'cap'" in error["message"] and "the limit ends at" in error["message"]
    return error["message"]


@cell
def chat_stream():
    text = posted(
        "/v1/chat/completions", messages=ASKED, temperature=0, max_tokens=16, stream=True
    ).text
    assert text.rstrip().endswith("data: [DONE]")
    lines = [line[6:] for line in text.splitlines() if line.startswith("data: {")]
    chunks = [json.loads(line) for line in lines]
    said = "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"])
    assert "Paris" in said
    return f"{len(chunks)} chunks"


@cell
def chat_tools():
    answer = posted(
        "/v1/chat/completions",
        messages=ASKED,
        tools=[TOOL],
        tool_choice="required",
        temperature=0,
        max_tokens=60,
    ).json()
    [call] = answer["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"])["city"] in ("rome", "paris")
    return call["function"]


@cell
def responses_answer():
    answer = posted("/v1/responses", input=QUESTION, temperature=0, max_output_tokens=16).json()
    assert "Paris" in answer["output"][0]["content"][0]["text"]
    return answer["status"]


@cell
def messages_answer():
    answer = posted("/v1/messages", messages=ASKED, temperature=0, max_tokens=16).json()
    assert "Paris" in answer["content"][0]["text"]
    return answer["usage"]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        process = started(folder)
        try:
            main("litellm")
        finally:
            process.terminate()
            process.wait(60)
