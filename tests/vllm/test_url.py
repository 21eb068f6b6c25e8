"""A server before a `vllm serve`: the page's walk, and LoRA adapters, of which each answers, and
hits, as itself."""

import json
import os
import re
import shlex
from contextlib import ExitStack

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.api.real_service import served
from tests.live_server import SCRIPT, serve
from tests.patience import PATIENCE_S, ended
from tests.support.models import save_adapter
from tests.vllm.processes import ROOT, Serving

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800), pytest.mark.anyio]

ADAPTERS = {"sql": 1, "poem": 2}  # by their seeds
PROMPT = " ".join(f"Person {n} lives in town {n * 7 % 97}." for n in range(20))


@pytest.fixture(scope="module")
def adapters(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for name, seed in ADAPTERS.items():
        save_adapter(folder / name, plain, seed=seed, r=8)
    return {name: str(folder / name) for name in ADAPTERS}


@pytest.fixture(scope="module")
def engine(model, adapters, tmp_path_factory):
    """The URL of vLLM as an operator starts it."""
    loras = [f"{name}={folder}" for name, folder in adapters.items()]
    options = {"max_model_len": 2048, "max_num_seqs": 4, "max_lora_rank": 8}
    flags = ("--enable-lora", "--lora-modules", *loras)
    log, env = tmp_path_factory.mktemp("vllm") / "log", {"VLLM_CPU_KVCACHE_SPACE": "1"}
    with ExitStack() as stack:
        serving = Serving(model, log, *flags, env=env, **options)
        stack.callback(serving.kill)
        serving.wait()
        yield serving.url


async def test_each_adapter_answers_as_itself_and_hits_what_itself_computed(
    engine, model, adapters, tmp_path
):
    names = [model.name, *adapters]
    asked = {"prompt": PROMPT, "temperature": 0, "max_tokens": 6}
    settings = {"engine_backend": engine, "model_adapters": adapters}
    async with served(tmp_path, model, **settings) as (_, client):
        client.timeout = httpx.Timeout(PATIENCE_S)
        models = (await client.get("/v1/models")).json()["data"]
        served_as = {each["id"] for each in models}
        assert set(adapters) < served_as
        texts, hits = {}, {}
        for turn in range(2):
            for name in names:
                given = str(model) if name == model.name else name
                answer = await client.post("/v1/completions", json={**asked, "model": given})
                assert 200 == answer.status_code, answer.text
                usage = answer.json()["usage"]
                texts[turn, name] = answer.json()["choices"][0]["text"]
                hits[turn, name] = usage["prompt_tokens_details"]["cached_tokens"]
        direct = httpx.Client(timeout=PATIENCE_S)
        theirs = {
            name: direct.post(f"{engine}/v1/completions", json={**asked, "model": name}).json()
            for name in names
        }
    assert {name: texts[0, name] for name in names} == {
        name: each["choices"][0]["text"] for name, each in theirs.items()
    }
    assert [0, 0, 0] == [hits[0, name] for name in names]
    assert all(hits[1, name] >= 128 for name in names), hits


def test_the_walk_before_a_vllm_that_runs_is_billed_as_its_page_says(engine, model, tmp_path):
    page = (ROOT / "docs" / "vllm.md").read_text()
    walk = page.partition("## Before a vLLM that already runs")[2].partition("\n## ")[0]
    for written, meant in {"http://127.0.0.1:8100": engine, "/models/qwen3-8b": str(model)}.items():
        walk = walk.replace(written, meant)
    first, second, asks = re.findall(r"```console\n(.*?)```", walk, re.S)
    flags = shlex.split(first)[6:]
    assert ["$", "vllm", "serve", str(model), "--port", "8100"] == shlex.split(first)[:6]
    assert flags and set(flags) <= set(Serving.usual), "as the fixture starts it"
    start, found, *told = second.splitlines()
    assert start.startswith("$ cachesvc serve --engine")
    environment = os.environ | {"CACHESVC_SERVER__DATA_DIR": str(tmp_path / "data")}
    environment["PATH"] = f"{SCRIPT.parent}{os.pathsep}{environment['PATH']}"
    log = tmp_path / "serve.log"
    with serve(log, *shlex.split(start)[3:], **environment) as (_, url):
        said = log.read_text()
        found = found.replace(str(model), model.name)  # which it is called there
        for line in [found, *told]:  # but for versions, lengths and its own address
            parts = re.split(r"[\d.]+ |http://127.0.0.1:8000|\.\.\.\)?", line.removeprefix("... "))
            assert [] == [part for part in parts if part not in said], said
        script = re.sub(r"^[$>] ", "", asks, flags=re.M).replace("http://127.0.0.1:8000", url)
        done = ended("bash", "-c", f"set -e\n{script}cachesvc usage --json", env=environment)
        assert 0 == done.returncode, done.stdout + done.stderr
    decoder, answers, rest = json.JSONDecoder(), [], done.stdout
    while rest.startswith('{"id"'):
        answer, end = decoder.raw_decode(rest)
        answers.append(answer["usage"])
        rest = rest[end:].lstrip()
    cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in answers]
    assert cached[0] == 0 < cached[1] and 2 == len(answers), answers
    [row] = json.loads(done.stdout[done.stdout.rindex("\n[") :])
    assert (2, cached[1]) == (row["requests"], row["hit_device_tokens"])
    assert sum(usage["prompt_tokens"] for usage in answers) == cached[1] + row["miss_tokens"]
