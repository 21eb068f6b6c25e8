"""Finds the endpoint that requests pass to, and what it serves; the counterpart of a model here."""

import asyncio
import logging
import math
import re
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn, TypeVar

import orjson

from api.errors import Unsupported
from api.relay.body import VERSION
from api.relay.protocol import CHAT, COMPLETIONS, RESPONSES
from api.served_model import Endpoint
from cachesvc.config.errors import ConfigError
from cachesvc.config.settings import Settings
from cachesvc.server.backend import CoreElsewhere, NoBlocks, cache_stats
from cachesvc.server.vllm.arguments import asked_context
from engine.errors import EngineAway, ModelError, RemoteAway, RemoteBusy, RemoteFault
from engine.openmp import run_apart
from engine.promise import Equal, Promise
from engine.remote.client import EngineHttp
from engine.remote.find import FIND_S, find_each
from engine.remote.upstreams import Upstream, Upstreams
from engine.request import FinishReason, Request, StepOutput
from engine.stats import EngineStats
from tiers.blocks.keys import CacheScope
from tiers.node.counters import NodeCounters
from tiers.node.messages import engine_layout
from tiers.operations.face import CacheOperations

logger = logging.getLogger(__name__)

PROMISE = Promise(Equal.NONE, "an endpoint elsewhere computes it")
_CONTEXTS = ("max_model_len", "context_length", "max_context_length", "context_window")
# Where engines have cache_salt, by the `owned_by` of their models.
_CHATS = frozenset({CHAT.path, COMPLETIONS.path})
_SALTED = {"vllm": _CHATS | {RESPONSES.path}, "sglang": _CHATS, "cachesvc": _CHATS}
LAYOUT = engine_layout(1, 1, 16, "float32")  # of no block
T = TypeVar("T")


class NoTokens:
    """Takes the place of a tokenizer and of a compiler of grammars. Everything is refused."""

    vocab_size = 1 << 31
    max_token_bytes = 1
    has_chat_template = True
    chat_template = None
    special_token_ids: frozenset[int] = frozenset()

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise Unsupported(
            "This model's requests pass to an endpoint that gives no tokens, so nothing can be "
            "tokenized, counted, quoted or kept here."
        )

    @property
    def tokenizer(self) -> Any:
        return self

    encode = decode = render = token_bytes = compile = _refuse


class RelayEngine:
    """Counts what passes. It computes nothing: requests go from the event loop to the endpoint."""

    failure: BaseException | None = None

    def __init__(
        self,
        on_outputs: Callable[[Sequence[StepOutput]], None],
        sites: Sequence[Upstream],
        max_tokens: int,
    ) -> None:
        self.sites = Upstreams(sites)
        self.operations = NoBlocks()
        self._cache = cache_stats(LAYOUT, NodeCounters())
        self._on_outputs = on_outputs
        self._num_running = self._num_passed = self._num_prompt = 0
        self.max_tokens = max_tokens

    def began(self) -> None:
        self._num_running += 1

    def ended(self, output: StepOutput) -> None:
        self._num_running -= 1
        self._num_passed += 1
        self._num_prompt += output.counts.miss
        self._on_outputs([output])

    def submit(self, request: Request) -> None:
        raise AssertionError("a relay takes no tokens")

    def abort(
        self, request_id: str, reason: FinishReason = FinishReason.ABORT, index: int | None = None
    ) -> None:
        """Does nothing: no request is here."""

    def predicted_wait_s(self, share: str, num_tokens: int) -> float:
        return 0.0 if self.max_tokens else math.inf  # of a model that is absent

    def call(self, function: Callable[[CacheOperations], T]) -> "Future[T]":
        future: Future[T] = Future()
        try:
            future.set_result(function(self.operations))
        except Exception as error:  # noqa: BLE001 - handed to who asked
            future.set_exception(error)
        return future

    def stats(self) -> EngineStats:
        return EngineStats(
            num_running=self._num_running,
            num_waiting=0,
            num_loading=0,
            num_preemptions=0,
            num_steps=self._num_passed,
            prompt_tokens_computed=self._num_prompt,
            jumped_tokens=0,
            cache=self._cache,
            engines=tuple(each.use() for each in self.sites.each),
        )

    async def watch(self) -> None:
        """Looks for the sites that are away, without an end. Closes all at its own."""
        try:
            await self.sites.watch()
        finally:
            await self.sites.close()


def build(settings: Settings, on_outputs: Callable[[Sequence[StepOutput]], None]) -> CoreElsewhere:
    """Asks the endpoint for its models. Raises ConfigError and ModelError."""
    engine, name = settings.engine, settings.model.name
    if settings.model.adapters:
        raise ConfigError("a relay has no adapters: serve one as a model of its own, with --model")
    key = engine.key.get_secret_value()
    sought = run_apart(lambda: asyncio.run(find_each(engine.urls, partial(_found, key, name))))
    found = [each for each in sought if each is not None]
    model = found[0].model
    if others := {each.model for each in found} - {model}:
        raise ModelError(f"the endpoints have {model} and {others.pop()}, not one model")
    asked = asked_context(settings)
    max_context = asked or min(each.max_context for each in found)
    if not max_context:
        raise ConfigError(
            f"{engine.urls[0]} does not say how long the context of {model} is, which bounds what "
            f"is held for a prompt: give it as --vllm.max-model-len TOKENS"
        )
    logger.info(
        f"requests pass to {', '.join(engine.urls)}, for the model {model} there, "
        f"{max_context} tokens of context"
    )
    salted = frozenset.intersection(*(each.salted for each in found))
    counts_one = any(each.counts_one for each in found)

    async def join(url: str) -> None:
        """Raises ModelError for another endpoint than those that the server has started with."""
        late = await _found(key, name, url)
        told = ""
        if late.model != model:
            told = f"has {late.model}, not {model}"
        elif not asked and late.max_context < max_context:
            told = f"has a context of {late.max_context} tokens, not {max_context}"
        elif late.counts_one and not counts_one:
            told = "counts the first prompt of a request alone, which the others do not"
        elif not late.salted >= salted:
            told = "has no cache_salt, which keeps tenants apart at the others"
        if told:
            raise ModelError(f"the endpoint at {url} {told}")

    sites = [
        Upstream(_http(url, key, engine.max_time), find=partial(join, url), is_found=bool(one))
        for url, one in zip(engine.urls, sought, strict=True)
    ]
    relay = RelayEngine(on_outputs, sites, max_context)
    endpoint = Endpoint(
        sites=relay.sites,
        model=model,
        key=key,
        salted=salted,
        counts_one=counts_one,
        began=relay.began,
        ended=relay.ended,
    )
    core = _core(relay, f"{engine.urls[0]} {model}")
    return replace(core, endpoint=endpoint, watch=relay.watch)


def absent(
    settings: Settings,
    on_outputs: Callable[[Sequence[StepOutput]], None],
    find: Callable[[], Awaitable[None]],
) -> CoreElsewhere:
    """Takes the place of a model's engine of which nothing is known, as none of its URLs answers.
    Once `find` has found what answers there, and raises nothing, its `watch` ends."""
    model = settings.model
    sites = [Upstream(_http(url), find=find, is_found=False) for url in settings.engine.urls]
    core = _core(RelayEngine(on_outputs, sites, 0), model.client_name)
    adapters = dict.fromkeys(model.adapters, b"")
    return replace(core, adapters=adapters, is_absent=True, watch=sites[0].join)


def _core(relay: RelayEngine, weights: str) -> CoreElsewhere:
    tokens = NoTokens()
    return CoreElsewhere(
        loaded=tokens,
        layout=LAYOUT,
        scope=CacheScope(weights=weights.encode(), tokenizer=b"elsewhere"),
        operations=relay.operations,
        engine=relay,
        grammars=tokens,
        promise=PROMISE,
        opened=ExitStack(),
    )


def _http(url: str, key: str = "", whole_s: float | None = None) -> EngineHttp:
    """HTTP to an endpoint. A URL may have the version, as OpenAI's clients take it."""
    return EngineHttp(url, key, whole_s, cut="/v1" if re.search(r"//.+/v\d", url) else "")


@dataclass(frozen=True, slots=True)
class _Found:
    model: str
    max_context: int = 0  # 0: it does not say
    salted: frozenset[str] = frozenset()
    counts_one: bool = False


async def _found(key: str, name: str, url: str) -> _Found:
    """The endpoint's model of this name, or the only one that it has."""
    http = _http(url, key, FIND_S)
    headers = {"anthropic-version": VERSION} | ({"x-api-key": key} if key else {})  # Anthropic's
    try:
        async with http.request("GET", "/v1/models", headers=headers) as said:
            status, data = said.status, await said.whole()
        if status == 429 or status >= 500:
            kind = RemoteBusy if status == 429 else RemoteAway
            raise kind(f"GET /v1/models gives {status}")
    except RemoteFault as fault:
        raise EngineAway(f"the endpoint at {url} cannot be used: {fault}") from fault
    finally:
        await http.close()
    return _picked(url, status, data, name)


def _picked(url: str, status: int, said: bytes, name: str) -> _Found:
    try:
        answer = orjson.loads(said)
    except orjson.JSONDecodeError:
        answer = None
    if status in (401, 403):
        raise ModelError(f"the endpoint at {url} wants another engine.key")
    data = answer.get("data") if isinstance(answer, dict) else answer  # Together's is a list
    cards = [each for each in data if isinstance(each, dict)] if isinstance(data, list) else []
    if status == 404:
        logger.warning(f"the endpoint at {url} lists no models; {name} is taken to be one")
        return _Found(name)
    card = next((each for each in cards if each.get("id") == name), None)
    if card is None and len(cards) == 1:
        card = cards[0]
    if status != 200 or card is None or not isinstance(card.get("id"), str):
        has = ", ".join(str(each.get("id")) for each in cards[:10]) or f"{status}"
        raise ModelError(
            f"the endpoint at {url} has no model {name}: GET /v1/models gives {has}. Name one "
            "of them with --model"
        )
    owner, meta = str(card.get("owned_by")), card.get("meta")  # llama-server's
    lengths = [card.get(each) for each in (*_CONTEXTS, "max_input_tokens")]  # Anthropic's
    lengths += [meta.get("n_ctx")] if isinstance(meta, dict) else []
    length = next((each for each in lengths if type(each) is int and each > 0), 0)
    return _Found(card["id"], length, _SALTED.get(owner, frozenset()), owner == "llamacpp")
