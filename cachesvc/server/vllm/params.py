"""One sequence of a request in vLLM's terms. Pure: the engine creates vLLM's classes.

Each field of `engine.request.SamplingParams` is mapped here, or refused by name.
"""

from collections.abc import Collection
from typing import Any

from cachesvc.vllm.reports import PARAMETER
from engine.errors import InvalidParameter
from engine.request import Request
from engine.scheduling.group import seed_of

_MAX_SEED = (1 << 63) - 1  # vLLM's seeds are signed; -1 means no seed
_SAME_NAME = (
    *("temperature", "top_p", "top_k", "min_p", "min_tokens", "ignore_eos", "logprobs"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)


def check_served(request: Request) -> None:
    """Raises InvalidParameter for parameters that this engine does not support."""
    if request.contents:
        raise InvalidParameter(
            "contents, cache_salt and user_id are not served by the vLLM engine; leave them out, "
            "or use the embedded engine (engine.backend = embedded)",
            param="contents",
        )


def sampling_of(
    request: Request, index: int, *, end: Collection[int], name: str, max_tokens: int
) -> dict[str, Any]:
    """The fields of vLLM's `SamplingParams` for sequence `index`.

    `end` are the model's end-of-answer ids, `max_tokens` is what fits the context, and `name`
    identifies the sequence in reports.
    """
    params = request.params
    wanted = max_tokens if params.max_tokens is None else min(params.max_tokens, max_tokens)
    stop = {*params.stop_token_ids, *(() if params.ignore_eos else end)}
    if params.structured_outputs is not None or request.grammar is not None:
        stop |= set(end)  # a complete grammar allows the end token
    tag = {"id": name, "store": request.cache}
    return {
        **{field: getattr(params, field) for field in _SAME_NAME},
        "seed": _seed(params.seed, index),
        # vLLM cannot generate zero tokens: one is generated and not reported.
        "max_tokens": max(1, wanted),
        "min_tokens": min(params.min_tokens, wanted),
        "stop_token_ids": sorted(stop),
        "logit_bias": dict(params.logit_bias) or None,
        "prompt_logprobs": params.prompt_logprobs if index == 0 else None,
        "skip_reading_prefix_cache": None if request.cache else True,
        "extra_args": {"kv_transfer_params": {PARAMETER: tag}},
        "detokenize": False,
    }


def _seed(seed: int | None, index: int) -> int | None:
    if seed is None:
        return None
    return (seed_of(seed, index) if index else seed) & _MAX_SEED
