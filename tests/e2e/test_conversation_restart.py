"""A conversation that a restart interrupts goes on where it was, from the tokens it was left in."""

import json
import urllib.error
import urllib.request
from typing import Any

import pytest

from tests.live_server import ForkedServer
from tests.patience import PATIENCE_S
from tests.support.models import save_tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

BLOCK = 16
LETTERS = {  # what a model of random bytes says is seldom text
    "type": "json_schema",
    "name": "letters",
    "schema": {"type": "string", "pattern": "^[a-z]{40}$"},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("restart")
    save_tiny_model(folder / "tiny")
    server = ForkedServer(folder, folder / "tiny")
    server.start()
    yield server
    server.kill()


def post(server: ForkedServer, path: str, **body: Any) -> dict[str, Any]:
    return asked(server, path, "POST", {"model": "tiny", **body})


def asked(server: ForkedServer, path: str, method: str = "GET", body: Any = None) -> dict[str, Any]:
    request = urllib.request.Request(
        server.url + path,
        method=method,
        data=None if body is None else json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        found: dict[str, Any] = json.load(answer)
        return found


def test_previous_response_id_works_after_a_restart_and_hits(server):
    answer: dict[str, Any] = {}
    for number in range(3):
        more = {"previous_response_id": answer["id"]} if answer else {}
        before = answer
        answer = post(
            server,
            "/v1/responses",
            input=f"Question {number}: tell me all that you know of it, please.",
            text={"format": LETTERS},
            temperature=0,
            **more,
        )
        if before:
            left = before["usage"]["input_tokens"] + before["usage"]["output_tokens"]
            cached = answer["usage"]["input_tokens_details"]["cached_tokens"]
            # All but the last block, of which some was generated and never computed.
            assert cached >= left - 2 * BLOCK > before["usage"]["input_tokens"]
        server.stop()
        server.start()
    assert answer["id"] == asked(server, f"/v1/responses/{answer['id']}")["id"]
    gone = asked(server, f"/v1/responses/{answer['id']}", "DELETE")
    assert gone["deleted"]
    server.stop()
    server.start()
    with pytest.raises(urllib.error.HTTPError, match="404"):
        asked(server, f"/v1/responses/{answer['id']}")


def test_a_cache_is_kept_over_a_restart_and_hit(server):
    law = "The law of the land is long, and this is how it begins. " * 4
    made = post(server, "/v1/caches", name="law", ttl="1h", prompt=law)
    assert made["num_tokens"] >= BLOCK
    server.stop()
    server.start()
    kept = asked(server, "/v1/caches/law")
    names = ("id", "num_tokens", "expires_at", "model")
    assert [made[name] for name in names[:2]] == [kept[name] for name in names[:2]]
    assert abs(made["expires_at"] - kept["expires_at"]) <= 2
    assert "tiny" == kept["model"]
    answer = post(server, "/v1/completions", prompt=law + "And then?", max_tokens=1)
    assert answer["usage"]["prompt_cache_hit_tokens"] >= made["num_tokens"]
    assert asked(server, "/v1/caches/law", "DELETE")["deleted"]
    assert [] == asked(server, "/v1/caches")["data"]


def test_explain_quotes_a_request_from_a_file_and_a_cache_warms_its_prefix(server, tmp_path):
    tale = "There once was a town where nobody slept, for the bells rang. " * 4
    body = tmp_path / "request.json"
    body.write_text(json.dumps({"model": "tiny", "prompt": tale + "And then?", "max_tokens": 1}))
    quote = server.told("explain", str(body))
    assert (0, quote["prompt_tokens"]) == (quote["hit_tokens"], quote["miss_tokens"])
    assert 0 < float(quote["price"]["prompt"]) <= float(quote["price"]["at_most"])
    cold = post(server, "/v1/completions", prompt=tale, max_tokens=1)["usage"]["prompt_tokens"]
    server.stop()
    server.start()
    below = server.told("explain", str(body))["hit_tokens_by_tier"]
    assert (0, 0) == (below["device"], below["host"])
    assert below["disk"] >= cold - BLOCK
    post(server, "/v1/caches", name="tale", ttl="1h", prompt=tale)
    above = server.told("explain", str(body))["hit_tokens_by_tier"]
    assert {"device": below["disk"], "host": 0, "disk": 0} == above
    assert asked(server, "/v1/caches/tale", "DELETE")["deleted"]
