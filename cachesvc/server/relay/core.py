"""Finds the endpoint that requests pass to, and what it serves; the counterpart of a model here."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, TypeVar

import orjson

from api.errors import Unsupported
from api.relay.body import VERSION
from api.relay.protocol import CHAT, COMPLETIONS, RESPONSES
from api.served_model import Endpoint
from cachesvc.config.errors import ConfigError
from cachesvc.config.settings import Settings
from cachesvc.server.vllm.arguments import asked_context
from cachesvc.server.vllm.core import CoreElsewhere, NoBlocks, cache_stats
from engine.errors import EngineAway, ModelError, RemoteAway, RemoteFault
from engine.openmp import run_apart
from engine.promise import Equal, Promise
from engine.remote.client import EngineHttp
from engine.remote.find import OF_A_PROXY, find_each
from engine.remote.upstreams import Upstream, Upstreams
from engine.request import FinishReason, Request, StepOutput
from engine.stats import EngineStats
from tiers.blocks.keys import CacheScope
from tiers.node.counters import NodeCounters
from tiers.node.messages import engine_layout
from tiers.operations.face import CacheOperations
from tiers.stats import CacheStats

logger = logging.getLogger(__name__)

PROMISE = Promise(Equal.NONE, "an endpoint elsewhere computes it")
_CONTEXTS = ("max_model_len", "context_length", "max_context_length", "context_window")
# Where engines have cache_salt, by the `owned_by` of their models.
_CHATS = frozenset({CHAT.path, COMPLETIONS.path})
_SALTED = {"vllm": _CHATS | {RESPONSES.path}, "sglang": _CHATS, "cachesvc": _CHATS}
LOOK_S = 1.0  # between questions to a site that fails
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
        operations: NoBlocks,
        cache: CacheStats,
        on_outputs: Callable[[Sequence[StepOutput]], None],
        sites: Upstreams,
        max_tokens: int,
    ) -> None:
        self._sites = sites
        self._operations = operations
        self._cache = cache
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
        self,
        request_id: str,
        reason: FinishReason = FinishReason.ABORT,
        index: int | None = None,
    ) -> None:
        """Does nothing: no request is here."""

    def predicted_wait_s(self, share: str, num_tokens: int) -> float:
        return 0.0

    def call(self, function: Callable[[CacheOperations], T]) -> "Future[T]":
        future: Future[T] = Future()
        try:
            future.set_result(function(self._operations))
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
            engines=tuple(each.use() for each in self._sites.each),
        )

    async def watch(self) -> None:
        """Asks the sites that fail whether they are back, without an end, and takes in those that
        were not there at the start."""
        await asyncio.gather(self._look(), self._sites.join())

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            for each in self._sites.each:
                if each.is_found and not each.is_up:
                    await each.probe(counting=False)


def build(
    settings: Settings,
    on_outputs: Callable[[Sequence[StepOutput]], None],
) -> CoreElsewhere:
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
    layout = engine_layout(1, 1, 16, "float32")
    operations, tokens = NoBlocks(), NoTokens()
    salted = frozenset.intersection(*(each.salted for each in found))

    async def join(url: str) -> None:
        """Raises ModelError for another endpoint than those that the server has started with."""
        late = await _found(key, name, url)
        told = ""
        if late.model != model:
            told = f"has {late.model}, not {model}"
        elif not asked and late.max_context < max_context:
            told = f"has a context of {late.max_context} tokens, not {max_context}"
        elif not late.salted >= salted:
            told = "has no cache_salt, which keeps tenants apart at the others"
        if told:
            raise ModelError(f"the endpoint at {url} {told}")

    pairs = zip(engine.urls, sought, strict=True)
    finds = [(url, None if one is not None else partial(join, url)) for url, one in pairs]
    sites = Upstreams(
        [Upstream(EngineHttp(url, key, engine.max_time), find=find) for url, find in finds]
    )
    stats = cache_stats(layout, NodeCounters())
    relay = RelayEngine(operations, stats, on_outputs, sites, max_context)
    return CoreElsewhere(
        loaded=tokens,
        layout=layout,
        scope=CacheScope(weights=f"{engine.urls[0]} {model}".encode(), tokenizer=b"elsewhere"),
        operations=operations,
        engine=relay,
        grammars=tokens,
        promise=PROMISE,
        opened=ExitStack(),
        endpoint=Endpoint(
            sites=sites,
            model=model,
            key=key,
            salted=salted,
            counts_one=any(each.counts_one for each in found),
            began=relay.began,
            ended=relay.ended,
            watch=relay.watch,
        ),
    )


@dataclass(frozen=True, slots=True)
class _Found:
    model: str
    max_context: int = 0  # 0: it does not say
    salted: frozenset[str] = frozenset()
    counts_one: bool = False


async def _found(key: str, name: str, url: str) -> _Found:
    """The endpoint's model of this name, or the only one that it has."""
    http = EngineHttp(url, key)
    headers = {"anthropic-version": VERSION}  # for an endpoint that is Anthropic's
    headers |= {"x-api-key": key} if key else {}
    try:
        async with http.request("GET", "/v1/models", headers=headers) as said:
            status, data = said.status, await said.whole()
        if status in OF_A_PROXY:
            raise RemoteAway(f"GET /v1/models gives {status}")
    except RemoteFault as fault:
        raise EngineAway(f"the endpoint at {url} cannot be used: {fault}") from None
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
    data = answer.get("data") if isinstance(answer, dict) else None
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
    lengths = [card.get(each) for each in _CONTEXTS]
    lengths += [meta.get("n_ctx")] if isinstance(meta, dict) else []
    length = next((each for each in lengths if type(each) is int and each > 0), 0)
    return _Found(card["id"], length, _SALTED.get(owner, frozenset()), owner == "llamacpp")
