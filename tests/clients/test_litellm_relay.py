"""A server of ours before LiteLLM's proxy before another of ours: each bills what the last did."""

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from api.app import create_app
from tests.api.real_service import real_service
from tests.clients.matrix import PROGRAMS
from tests.e2e.test_relay_clients import charged
from tests.patience import PATIENCE_S
from tests.running_server import listening
from tests.support.litellm import litellm
from tests.support.upstream import BODIES, CHAT, COMPLETIONS, PATHS
from tests.support.wire import Script, fake_house

pytestmark = [pytest.mark.clients, pytest.mark.timeout(900)]


def test_litellms_proxy_passes_on_what_was_cached(tmp_path):
    house = fake_house()
    house.engine.script = Script(answer="one two", hits={"hit_disk": 8, "hit_host": 3})
    program = Path(PROGRAMS["litellm"].interpreter).with_name("litellm")
    with contextlib.ExitStack() as stack:
        stack.callback(house.close)
        inner = stack.enter_context(listening(create_app(house.wire)))
        proxy = stack.enter_context(litellm(program, inner, tmp_path, "bytes"))
        settings: dict[str, Any] = {"engine_vllm": {"max-model-len": 4000}}
        made = real_service(tmp_path, Path("bytes"), engine_backend=f"openai+{proxy}", **settings)
        service, app, _ = stack.enter_context(made)
        outer = stack.enter_context(listening(app))
        for path in PATHS:
            for stream in (False, True):
                asked = {"model": "bytes", "stream": stream, **BODIES[path]}
                asked |= {"prompt": "Hello, whoever you are."} if path == COMPLETIONS else {}
                answer = httpx.post(f"{outer}{path}", json=asked, timeout=PATIENCE_S)
                assert 200 == answer.status_code, answer.text
                assert not (stream and path in (CHAT, COMPLETIONS) and "usage" in answer.text)
        served = [each.served.usage for each in house.meter.charges if each.served is not None]
        assert 2 * len(PATHS) == len(served)
        at_once = [replace(each, hit_device=11, hit_host=0, hit_disk=0) for each in served]
        assert at_once == charged(service), "of the tiers LiteLLM tells nothing"
