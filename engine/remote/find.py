"""Finds out what answers at a URL, and that it serves the model that is meant.

Raises ModelError, by name, for an engine that cannot be reached, is of no known kind, or has
another model, tokenizer or context length.
"""

import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import PurePath
from typing import Any, NamedTuple, TypeVar
from typing import Protocol as TypingProtocol

from engine.errors import AdapterError, EngineAway, ModelError, RemoteAway, RemoteBusy, RemoteFault
from engine.remote.client import EngineHttp
from engine.remote.metrics import labels_in
from engine.remote.protocol import Protocol
from engine.remote.sglang import SGLang
from engine.remote.upstreams import Remote
from engine.remote.vllm import Completions, Generate

logger = logging.getLogger(__name__)
T = TypeVar("T")

# Numbers, spaces, scripts, an emoji, code: where tokenizers of one family part.
PROBE = "Grüße,  世界! 12345.67 \n\tdef f(x):\n    return {'a': x**2}  🙂 naïve <|im_start|>user"
_SGLANG = "SGLang"
# Where engines say what they are, and a field that only they have.
_SAYS = (
    ("/server_info", _SGLANG, "tokenizer_path"),
    ("/get_server_info", _SGLANG, "tokenizer_path"),
    ("/version", "vLLM", "version"),
)
FIND_S = 60.0  # for each answer to what is asked here
OF_A_PROXY = (502, 503, 504)  # before an engine that does not answer
_LARK = {"grammar": 'start: %json {"type": "boolean"}'}  # no other backend than llguidance reads it


class Encoder(TypingProtocol):
    def encode(self, text: str) -> Any: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Meant:
    """What should be served. `names` are the model's, `adapters` those of its adapters."""

    names: Collection[str]
    tokenizer: Encoder
    adapters: Collection[str] = ()
    max_tokens: int | None = None  # None: whatever it has
    tagged: bool = False  # our connector runs there


async def find_each(urls: Sequence[str], find: Callable[[str], Awaitable[T]]) -> list[T | None]:
    """What there is at each URL, in their order; None where nothing answers. Raises EngineAway if
    nothing does at any."""
    found, away = list[T | None](), list[EngineAway]()
    for url in urls:
        try:
            found.append(await find(url))
        except EngineAway as error:
            found.append(None)
            away.append(error)
    if len(away) == len(urls):
        raise away[0]
    for one in away:
        logger.warning(f"{one}; it is used once it answers")
    return found


async def find(url: str, meant: Meant, key: str = "") -> Remote:
    http = EngineHttp(url, key, FIND_S)
    try:
        remote = await _found(http, meant)
    except RemoteFault as fault:
        raise EngineAway(f"the engine at {url} cannot be used: {fault}") from fault
    finally:
        await http.close()
    logger.info(
        f"the engine at {url} is {remote.kind} {remote.version}; it serves {remote.model} by "
        f"{remote.protocol.path}, {remote.max_tokens} tokens of context"
    )
    return remote


async def is_no_token_engine(urls: Sequence[str], key: str = "") -> bool:
    """Whether the first that answers lists models and is neither vLLM nor SGLang. Raises EngineAway
    if none answers."""
    away = list[EngineAway]()
    for url in urls:
        http = EngineHttp(url, key, FIND_S)
        try:
            if (await _said(http))[0]:
                return False
            status, answer = await _ask(http, "GET", "/v1/models")
            return status == 200 and isinstance(answer, dict) and "data" in answer
        except RemoteFault as fault:
            away.append(EngineAway(f"the engine at {url} cannot be used: {fault}"))
        finally:
            await http.close()
    raise away[0]


async def _found(http: EngineHttp, meant: Meant) -> Remote:
    kind, status, about = await _said(http)
    if not kind:
        _check_key(http, status)
        raise ModelError(
            f"what answers at {http.url} is neither vLLM nor SGLang: GET /version gives {status}. "
            f"To pass requests on as they are, name it as openai+{http.url}"
        )
    model, max_tokens = await _served(http, meant)
    await _same_tokenizer(http, meant, model)
    told = _sglang(about) if kind == _SGLANG else await _vllm(http, meant, model)
    if not told.block_size:
        logger.info(f"the engine at {http.url} does not say how long its blocks are; 16 is taken")
    known = told._replace(block_size=told.block_size or 16)._asdict()
    version = str(about.get("version", ""))
    return Remote(kind=kind, version=version, model=model, max_tokens=max_tokens, **known)


async def _ask(http: EngineHttp, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    """An engine's own answer: one of a proxy, or that it is busy, tells nothing of it."""
    status, answer = await http.ask(method, path, body)
    if status == 429 or status in OF_A_PROXY:
        kind = RemoteBusy if status == 429 else RemoteAway
        raise kind(f"{method} {path} gives {status}")
    return status, answer


class _Told(NamedTuple):
    """How an engine is spoken to, and its cache; 0 where it does not say."""

    protocol: Protocol
    block_size: int
    num_blocks: int


async def _said(http: EngineHttp) -> tuple[str, int, Mapping[str, Any]]:
    """What an engine is, empty for neither, with the status and the answer that tell it."""
    for path, kind, field in _SAYS:
        status, about = await _ask(http, "GET", path)
        if status == 200 and isinstance(about, dict) and field in about:
            return kind, status, about
    return "", status, {}


async def _vllm(http: EngineHttp, meant: Meant, model: str) -> _Told:
    tokens = meant.tokenizer.encode("one").tolist()
    asked = {"model": model, "prompt": tokens, "max_tokens": 1}
    whole = {"model": model, "token_ids": tokens, "sampling_params": {"max_tokens": 1}}
    status, answer = await _ask(http, "POST", Generate.path, whole)
    kind = Generate if status == 200 else Completions  # 403: off; 404: older
    if kind is Completions:
        status, answer = await _ask(http, "POST", kind.path, {**asked, "return_token_ids": True})
    if status >= 500:
        raise RemoteAway(f"POST {kind.path} gives {status}")
    if status != 200 or not answer["choices"][0].get("token_ids"):
        raise ModelError(
            f"the engine at {http.url} gives no token ids ({status}); vLLM does from 0.10.2 on"
        )
    if not answer["usage"].get("prompt_tokens_details") and not meant.tagged:
        logger.warning(
            f"the engine at {http.url} does not say what it had cached, so every prompt is billed "
            "as computed: start it with --enable-prompt-tokens-details"
        )
    priorities, _ = await _ask(http, "POST", Completions.path, {**asked, "priority": 1})
    grammars, _ = await _ask(http, "POST", Completions.path, {**asked, "structured_outputs": _LARK})
    _, metrics = await _ask(http, "GET", "/metrics")
    cache = labels_in(str(metrics), "vllm:cache_config_info")
    protocol = kind(priorities=priorities == 200, grammars=grammars == 200, tagged=meant.tagged)
    said = (cache.get(name, "") for name in ("block_size", "num_gpu_blocks"))
    return _Told(protocol, *(int(each) if each.isdigit() else 0 for each in said))


def _sglang(about: Mapping[str, Any]) -> _Told:
    protocol = SGLang(deterministic=bool(about.get("enable_deterministic_inference")))
    page = int(about.get("page_size") or 1)
    return _Told(protocol, page, int(about.get("max_total_num_tokens") or 0) // page)


async def _served(http: EngineHttp, meant: Meant) -> tuple[str, int]:
    """The engine's name of the model, and its context length."""
    status, answer = await _ask(http, "GET", "/v1/models")
    _check_key(http, status)
    if status != 200:
        raise ModelError(
            f"the engine at {http.url} does not say what it serves: GET /v1/models gives {status}"
        )
    served = answer["data"]
    bases = [each for each in served if not each.get("parent")]
    wanted = {PurePath(name).name for name in meant.names}
    model = next((each for each in bases if _names(each) & wanted), None)
    if model is None:
        said = ", ".join(f"{each['id']} ({each.get('root')})" for each in bases)
        raise ModelError(
            f"the engine at {http.url} does not serve {' or '.join(sorted(wanted))}: it has "
            f"{said}. Start it with --served-model-name, or name its model with --model"
        )
    if missing := set(meant.adapters) - {each["id"] for each in served if each.get("parent")}:
        raise AdapterError(
            f"the engine at {http.url} has no adapter {', '.join(sorted(missing))}; load it there "
            "under that name"
        )
    max_tokens = int(model["max_model_len"])
    if meant.max_tokens not in (None, max_tokens):
        raise ModelError(
            f"the engine at {http.url} has a context of {max_tokens} tokens, not "
            f"{meant.max_tokens} as asked for or as another engine of this model has"
        )
    return str(model["id"]), max_tokens


def _check_key(http: EngineHttp, status: int) -> None:
    if status in (401, 403):
        raise ModelError(f"the engine at {http.url} wants another engine.key")


def _names(model: Mapping[str, Any]) -> set[str]:
    return {PurePath(str(model[name])).name for name in ("id", "root") if model.get(name)}


async def _same_tokenizer(http: EngineHttp, meant: Meant, model: str) -> None:
    status, answer = await _ask(http, "POST", "/tokenize", {"model": model, "prompt": PROBE})
    if status != 200 or not isinstance(answer, dict) or "tokens" not in answer:
        raise ModelError(
            f"the engine at {http.url} does not say how it tokenizes: POST /tokenize gives {status}"
        )
    ours, theirs = meant.tokenizer.encode(PROBE).tolist(), answer["tokens"]
    if ours != theirs:
        alike = (one == other for one, other in zip(ours, theirs, strict=False))
        place = sum(takewhile(bool, alike))
        raise ModelError(
            f"the engine at {http.url} has another tokenizer than the model here: token {place} of "
            f"a probe is {theirs[place : place + 3]} there and {ours[place : place + 3]} here"
        )
