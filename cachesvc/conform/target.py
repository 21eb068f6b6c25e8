"""The server that is asked, over HTTP. Any number of threads."""

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from cachesvc.conform.question import Question, ServedAnswer, read_answer

ANSWER_S = 600.0
BUSY = (429, 503)  # asked again after the time that the server names
BUSY_S, MAX_BUSY_S, MAX_BUSY = 1.0, 30.0, 20
UNIQUE = "{unique}"  # stands for a text that no other request has

# What makes a request read nothing from a cache, by the `owned_by` of the server's models.
COLD: Mapping[str, Mapping[str, Any]] = {
    "cachesvc": {"cachesvc": {"cache": False}},
    "vllm": {"cache_salt": UNIQUE},
    "sglang": {"extra_key": UNIQUE},
    "llamacpp": {"cache_prompt": False},
}
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class TargetError(Exception):
    """The server cannot be reached or refuses. The message says what it answered."""


@dataclass(frozen=True, slots=True)
class Target:
    """A server and a model of it. `serves` is what our own tells of its engine and contents."""

    url: str
    model: str
    owner: str
    key: str | None = None
    serves: Mapping[str, str] | None = None

    def ask(self, question: Question, *, cold: bool = False) -> ServedAnswer:
        """The server's answer. Raises TargetError."""
        body = question.body(self.model) | {"ignore_eos": True}
        if cold:
            body |= json.loads(json.dumps(COLD[self.owner]).replace(UNIQUE, uuid4().hex))
        try:
            return read_answer(_json(self.url, "/v1/completions", self.key, body))
        except (ValueError, KeyError, TypeError) as error:
            raise TargetError(f"{self.url} answered what is no completion: {error}") from error


def find_target(url: str, *, model: str | None, key: str | None) -> Target:
    """The server at `url` and the model to ask, its first if none is named. Raises TargetError."""
    url = url.rstrip("/").removesuffix("/v1")
    if not url.startswith(("http://", "https://")):
        raise TargetError(f"{url} is not the URL of a server; write http://HOST:PORT")
    models = _json(url, "/v1/models", key).get("data") or []
    named = [each for each in models if model in (None, each.get("id"))]
    if not named:
        served = ", ".join(str(each.get("id")) for each in models) or "none"
        raise TargetError(f"{url} does not serve {model}; it serves {served}")
    owner = str(named[0].get("owned_by", ""))
    if owner not in COLD:
        raise TargetError(f"nothing is known that makes a request to {owner!r} cold")
    serves = (named[0].get("exactness") or {}).get("serves")
    return Target(url, str(named[0]["id"]), owner, key, serves)


def _json(url: str, path: str, key: str | None, body: Any = None) -> Any:
    """The JSON that the server answers, asked again while it is busy."""
    headers = {"content-type": "application/json"}
    if key is not None:
        headers["authorization"] = f"Bearer {key}"
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, headers)  # noqa: S310  checked before
    tried = 0
    while True:
        tried += 1
        try:
            with _OPENER.open(request, timeout=ANSWER_S) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            if error.code not in BUSY or tried > MAX_BUSY:
                said = error.read()[:300].decode("utf-8", "replace")
                raise TargetError(f"{url}{path} answered {error.code}: {said}") from error
            wait = error.headers.get("retry-after") or ""
            time.sleep(min(float(wait) if wait.isdigit() else BUSY_S, MAX_BUSY_S))
        except (OSError, http.client.HTTPException) as error:
            raise TargetError(f"{url} does not answer: {type(error).__name__} {error}") from error
        except ValueError as error:
            raise TargetError(f"{url}{path} answered no JSON: {error}") from error
