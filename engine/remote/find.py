"""Finds out what answers at a URL, and that it serves the model that is meant.

Raises ModelError, by name, for an engine that cannot be reached, is of no known kind, or has
another model, tokenizer or context length.
"""

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from itertools import takewhile
from pathlib import PurePath
from typing import Any
from typing import Protocol as TypingProtocol

from engine.errors import AdapterError, ModelError, RemoteFault
from engine.remote.client import EngineHttp
from engine.remote.metrics import labels_in
from engine.remote.protocol import Protocol
from engine.remote.sglang import SGLang
from engine.remote.upstreams import Remote
from engine.remote.vllm import Completions, Generate

logger = logging.getLogger(__name__)

# Numbers, spaces, scripts, an emoji, code: where tokenizers of one family part.
PROBE = "Grüße,  世界! 12345.67 \n\tdef f(x):\n    return {'a': x**2}  🙂 naïve <|im_start|>user"
_LARK = 'start: %json {"type": "boolean"}'  # no other backend than llguidance reads it


class Encoder(TypingProtocol):
    def encode(self, text: str) -> Any: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Meant:
    """What should be served. `names` are the model's, `adapters` those of its adapters."""

    names: Collection[str]
    tokenizer: Encoder
    end: frozenset[int]
    adapters: Collection[str] = ()
    max_tokens: int | None = None  # None: whatever it has
    tagged: bool = False  # our connector runs there


@dataclass(frozen=True, slots=True)
class FoundEngine:
    """An engine that serves what is meant. `num_blocks` is the size of its cache, if it says."""

    kind: str
    version: str
    remote: Remote
    num_blocks: int


async def find_all(urls: Sequence[str], meant: Meant, key: str = "") -> list[FoundEngine]:
    """The engines at these URLs, all with one context length."""
    found: list[FoundEngine] = []
    for url in urls:
        found.append(await find(url, meant, key))
        meant = replace(meant, max_tokens=found[0].remote.max_tokens)
    return found


async def find(url: str, meant: Meant, key: str) -> FoundEngine:
    http = EngineHttp(url, key)
    try:
        found = await _found(http, meant)
    except RemoteFault as fault:
        raise ModelError(f"the engine at {url} cannot be used: {fault}") from None
    finally:
        await http.close()
    remote = found.remote
    logger.info(
        f"the engine at {url} is {found.kind} {found.version}; it serves {remote.model} by "
        f"{remote.protocol.path}, {remote.max_tokens} tokens of context"
    )
    return found


async def is_no_token_engine(url: str, key: str = "") -> bool:
    """Whether what answers at a URL lists models and is neither vLLM nor SGLang."""
    http = EngineHttp(url, key)
    try:
        if (await _told(http))[0] != EngineKind.NEITHER:
            return False
        status, answer = await http.ask("GET", "/v1/models")
        return status == 200 and isinstance(answer, dict) and "data" in answer
    except RemoteFault:
        return False  # `find` says what is wrong
    finally:
        await http.close()


async def _found(http: EngineHttp, meant: Meant) -> FoundEngine:
    kind, status, about = await _told(http)
    if kind is EngineKind.SGLANG:
        return await _sglang(http, meant, about)
    _check_key(http, status)
    if kind is EngineKind.NEITHER:
        raise ModelError(
            f"what answers at {http.url} is neither vLLM nor SGLang: GET /version gives {status}. "
            f"To pass requests on as they are, name it as openai+{http.url}"
        )
    return await _vllm(http, meant, str(about["version"]))


class EngineKind(Enum):
    VLLM = auto()
    SGLANG = auto()
    NEITHER = auto()


async def _told(http: EngineHttp) -> tuple[EngineKind, int, Mapping[str, Any]]:
    """What an engine says that it is, with the status and the answer that tell it."""
    for path in ("/server_info", "/get_server_info"):
        status, about = await http.ask("GET", path)
        if status == 200 and isinstance(about, dict) and "tokenizer_path" in about:
            return EngineKind.SGLANG, status, about
    status, about = await http.ask("GET", "/version")
    if status == 200 and isinstance(about, dict) and "version" in about:
        return EngineKind.VLLM, status, about
    return EngineKind.NEITHER, status, {}


async def _vllm(http: EngineHttp, meant: Meant, version: str) -> FoundEngine:
    model, max_tokens, adapters = await _served(http, meant)
    await _same_tokenizer(http, meant, model)
    tokens = meant.tokenizer.encode("one").tolist()
    asked = {"model": model, "prompt": tokens, "max_tokens": 1}
    kind: type[Completions] = Generate
    whole = {"model": model, "token_ids": tokens, "sampling_params": {"max_tokens": 1}}
    status, answer = await http.ask("POST", Generate.path, whole)
    if status != 200:  # 403: off; 404: older
        kind, whole = Completions, {**asked, "return_token_ids": True}
        status, answer = await http.ask("POST", Completions.path, whole)
    if status != 200 or not answer["choices"][0].get("token_ids"):
        raise ModelError(
            f"the engine at {http.url} gives no token ids ({status}); vLLM does from 0.10.2 on"
        )
    if not answer["usage"].get("prompt_tokens_details") and not meant.tagged:
        logger.warning(
            f"the engine at {http.url} does not say what it had cached, so every prompt is billed "
            "as computed: start it with --enable-prompt-tokens-details"
        )
    priorities, _ = await http.ask("POST", Completions.path, {**asked, "priority": 1})
    structure = {"structured_outputs": {"grammar": _LARK}}
    grammars, _ = await http.ask("POST", Completions.path, {**asked, **structure})
    _, metrics = await http.ask("GET", "/metrics")
    cache = labels_in(str(metrics), "vllm:cache_config_info")
    protocol = kind(priorities=priorities == 200, grammars=grammars == 200, tagged=meant.tagged)
    block_size, num_blocks = (cache.get(name, "") for name in ("block_size", "num_gpu_blocks"))
    remote = _remote(http, meant, protocol, model, max_tokens, block_size, adapters)
    return FoundEngine("vLLM", version, remote, int(num_blocks) if num_blocks.isdigit() else 0)


async def _sglang(http: EngineHttp, meant: Meant, about: Mapping[str, Any]) -> FoundEngine:
    model, max_tokens, adapters = await _served(http, meant)
    await _same_tokenizer(http, meant, model)
    protocol = SGLang(deterministic=bool(about.get("enable_deterministic_inference")))
    page = int(about.get("page_size") or 1)
    remote = _remote(http, meant, protocol, model, max_tokens, str(page), adapters)
    num_blocks = int(about.get("max_total_num_tokens") or 0) // page
    return FoundEngine("SGLang", str(about.get("version", "")), remote, num_blocks)


def _remote(
    http: EngineHttp,
    meant: Meant,
    protocol: Protocol,
    model: str,
    max_tokens: int,
    block_size: str,
    adapters: Collection[str],
) -> Remote:
    if not block_size.isdigit():
        logger.info(f"the engine at {http.url} does not say how long its blocks are; 16 is taken")
    return Remote(
        protocol=protocol,
        model=model,
        max_tokens=max_tokens,
        block_size=int(block_size) if block_size.isdigit() else 16,
        end=meant.end,
        adapters={name: name for name in adapters},
    )


async def _served(http: EngineHttp, meant: Meant) -> tuple[str, int, Collection[str]]:
    """The engine's name of the model, and its context length."""
    status, answer = await http.ask("GET", "/v1/models")
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
    return str(model["id"]), max_tokens, meant.adapters


def _check_key(http: EngineHttp, status: int) -> None:
    if status in (401, 403):
        raise ModelError(f"the engine at {http.url} wants another engine.key")


def _names(model: Mapping[str, Any]) -> set[str]:
    return {PurePath(str(model[name])).name for name in ("id", "root") if model.get(name)}


async def _same_tokenizer(http: EngineHttp, meant: Meant, model: str) -> None:
    status, answer = await http.ask("POST", "/tokenize", {"model": model, "prompt": PROBE})
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
