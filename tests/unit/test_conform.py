"""`cachesvc conform`: an honest server passes, and each kind of dishonesty is found and named."""

import json
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest

from cachesvc.conform.question import ServedAnswer, read_answer, rounds
from cachesvc.conform.report import faults, summary
from cachesvc.conform.suite import KINDS
from tests.support.commands import call, said
from tests.support.stand_in import Handler, StandIn, served

Answers = Callable[[list[int], dict[str, Any], int], list[int]]


def tokens_of(prompt: list[int], body: dict[str, Any]) -> list[int]:
    """What a model without a cache says: all of the prompt and the seed count."""
    start = sum(token * (place + 1) for place, token in enumerate(prompt)) + body.get("seed", 0)
    return [(start + 31 * number) % 97 for number in range(body["max_tokens"])]


class Server(StandIn):
    """A server with the wire of `owner`. `answers` gets the prompt, the body and how many leading
    tokens earlier prompts had; cold requests have none."""

    def __init__(self, owner: str, answers: Answers, *, logprob: float = -1.0) -> None:
        super().__init__(_Completions)
        self.owner, self.answers, self.logprob = owner, answers, logprob
        self.seen: list[list[int]] = []
        self.lock = threading.Lock()
        self.asked = 0
        self.status: Callable[[int], int] = lambda number: 200
        self.cached_in_usage: Callable[[int, bool], int | None] = lambda known, cold: known

    def completion(self, body: dict[str, Any]) -> dict[str, Any]:
        prompt = body["prompt"]
        if isinstance(prompt, str):
            prompt = [ord(letter) for letter in prompt]
        cold = body.get("cachesvc") == {"cache": False}
        with self.lock:
            known = 0 if cold else max((_common(prompt, each) for each in self.seen), default=0)
            if not cold:
                self.seen.append(prompt)
        tokens = [str(each) for each in self.answers(prompt, body, known)]
        moved = 0.0 if not known else self.logprob + 1.0
        told = {"tokens": tokens, "token_logprobs": [-1.0 + moved] * len(tokens)}
        told_cached = self.cached_in_usage(known, cold)
        details = {"cached_tokens": told_cached, "cached_tokens_details": {"device": known}}
        return {
            "choices": [{"text": " ".join(tokens), "logprobs": told}],
            "usage": {"prompt_tokens_details": details},
        }


class _Completions(Handler):
    server: Server

    def do_GET(self) -> None:
        self.say_json({"data": [{"id": "m", "owned_by": self.server.owner}]})

    def do_POST(self) -> None:
        body, server = self.read_json(), self.server
        with server.lock:
            server.asked += 1
            status = server.status(server.asked)
        self.say_json(server.completion(body) if status == 200 else {}, status)


def _common(a: list[int], b: list[int]) -> int:
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


@pytest.fixture
def serve():
    with ExitStack() as servers:
        yield lambda *given, **options: servers.enter_context(served(Server(*given, **options)))


def honest(prompt, body, known):
    return tokens_of(prompt, body)


def conform(url: str, *options: str) -> tuple[int, dict[str, Any]]:
    ended = call("conform", url, "--block", 8, "--longest", 40, "--json", *options)
    return ended.exit_code, json.loads(ended.stdout)


def test_an_honest_server_conforms_in_every_way_of_asking(serve):
    code, told = conform(serve("cachesvc", honest).url, "--cases", "150", "--bits")
    assert (code, told["flips"], told["moves"], told["faults"]) == (0, 0, 0, [])
    assert told["cases"] >= 150 and set(told["kinds"]) == set(KINDS)
    assert told["tiers"]["device"] > 0


def test_a_hit_that_changes_an_answer_is_found_with_its_place(serve):
    def at_a_border(prompt, body, known):
        tokens = tokens_of(prompt, body)
        return tokens if known != 16 else [*tokens[:2], 0, *tokens[3:]]

    server = serve("cachesvc", at_a_border)
    code, told = conform(server.url, "--cases", "100")
    assert code == 1 and 0 < told["flips"] < told["cases"]
    assert {flip["at"] for flip in told["first_flips"]} == {2}
    assert {flip["given"]["cached"] for flip in told["first_flips"]} == {16}


def test_moved_log_probabilities_fail_only_where_bits_are_asked_for(serve):
    server = serve("cachesvc", honest, logprob=-1.000001)
    code, told = conform(server.url, "--cases", "60")
    assert code == 0 and told["moves"] > 0 and told["largest_move"] == pytest.approx(1e-6)
    code, told = conform(server.url, "--cases", "60", "--bits", "--seed", "2")
    assert code == 1 and told["faults"][0].startswith("log-probabilities moved in")


def test_a_seed_that_a_hit_forgets_is_found_in_sampled_answers_alone(serve):
    def forgets(prompt, body, known):
        return tokens_of(prompt, body | ({"seed": 0} if known and "seed" in body else {}))

    code, told = conform(serve("cachesvc", forgets).url, "--cases", "60")
    assert code == 1
    assert all(flip["question"]["seed"] is not None for flip in told["first_flips"])


def test_a_server_that_does_not_repeat_itself_is_told_apart_from_a_wrong_cache(serve):
    def by_batch(prompt, body, known):
        other = body.get("cachesvc") and len(prompt) > 8 and next(draws) % 2
        return tokens_of(prompt, body | ({"seed": 5} if other else {}))

    draws = iter(range(10_000))
    code, told = conform(serve("cachesvc", by_batch).url, "--cases", "200")
    assert code == 1 and told["kinds"]["cold again"]["flips"] > 0
    unsteady = "read no cache: the server does not repeat itself"
    assert any(unsteady in each for each in told["faults"])


def test_a_cache_that_never_serves_and_a_cold_answer_from_a_cache_do_not_conform(serve):
    server = serve("cachesvc", honest)
    server.cached_in_usage = lambda known, cold: 0
    code, told = conform(server.url, "--cases", "40")
    assert (code, told["cached_tokens"]) == (1, 0)
    assert told["faults"] == ["no answer says that its prompt was cached: is the cache on?"]
    server.cached_in_usage = lambda known, cold: 8 if cold else known
    code, told = conform(server.url, "--cases", "40", "--seed", "2")
    assert code == 1 and "tokens of cold answers came from a cache" in told["faults"][0]
    server.cached_in_usage = lambda known, cold: None
    code, told = conform(server.url, "--cases", "40", "--seed", "3")
    assert (code, told["cached_tokens"]) == (0, None)


def test_a_busy_server_is_asked_again_and_one_that_fails_ends_the_run(serve, monkeypatch):
    monkeypatch.setattr("cachesvc.conform.target.BUSY_S", 0.001)
    server = serve("cachesvc", honest)
    server.status = lambda number: 503 if number % 7 == 3 else 200
    code, told = conform(server.url, "--cases", "60")
    assert (code, told["faults"]) == (0, [])
    ends = server.asked + 60
    server.status = lambda number: 200 if number < ends else 500
    assert "answered 500" in said("conform", server.url, "--seed", 2, code=1)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [(["http://127.0.0.1:9"], "does not answer"), (["ftp://x"], "not the URL of a server")],
)
def test_wrong_input_is_said_in_a_sentence(arguments, says):
    ended = call("conform", *arguments)
    assert ended.exit_code != 0
    assert says in ended.stderr + str(ended.exception)


def test_a_server_or_a_model_that_cannot_be_asked_is_refused(serve):
    cold = said("conform", serve("someone", honest).url, code=1)
    assert "makes a request to 'someone' cold" in cold
    other = said("conform", serve("x", honest).url, "--model", "other", code=1)
    assert "does not serve other; it serves m" in other


def test_answers_are_read_from_each_servers_form():
    content = [{"token": "x", "logprob": -0.5}]
    llama = {"choices": [{"text": "x", "logprobs": {"content": content}}]}
    assert read_answer(llama) == ServedAnswer(("x",), (-0.5,))
    assert read_answer({"choices": [{"text": "all of it"}]}) == ServedAnswer(("all of it",))
    with pytest.raises(ValueError, match="no choices"):
        read_answer({"error": "busy"})


def test_trunks_end_at_borders_and_beside_them_and_never_begin_alike():
    made = rounds(block=8, max_tokens=2, seed=3, longest=40, as_text=False)
    trunks = [next(made)[0].prompt for _ in range(24)]
    assert {8, 7, 9, 16, 15, 17, 24, 23, 25, 40, 39} <= {len(trunk) for trunk in trunks}
    assert len({tuple(trunk[:4]) for trunk in trunks}) == len(trunks)


def test_nothing_compared_does_not_conform():
    assert faults(summary([]), bits=False) == ["nothing was compared"]
