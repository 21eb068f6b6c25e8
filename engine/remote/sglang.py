"""SGLang's `POST /generate` with `input_ids`, as its documentation describes it.

Written against the published interface of 0.5 and tested with a server that answers as it does.
Events repeat all tokens so far, or bring the new ones (`--stream-output`): both are read.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from engine.errors import InvalidParameter
from engine.remote.protocol import TIERS, SequenceAsk, Told, finish_of
from engine.request import Request, SamplingParams, TokenLogprob
from tiers.tier import TierName

_SAME_NAME = (
    *("temperature", "top_p", "min_p", "ignore_eos"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)


class SGLang:
    """`deterministic`: started with `--enable-deterministic-inference`, so that seeds count."""

    path = "/generate"

    def __init__(self, *, deterministic: bool) -> None:
        self._deterministic = deterministic

    def check(self, request: Request) -> None:
        params = request.params
        refused = {
            "cache_salt": bool(request.contents),
            "structured_outputs": request.grammar is not None,
            "echo": params.prompt_logprobs is not None,
            "seed": params.seed is not None and not self._deterministic,
        }
        for name, is_asked in refused.items():
            if is_asked:
                raise InvalidParameter(f"{name} is not served by this engine, SGLang", param=name)

    def body(self, ask: SequenceAsk) -> dict[str, Any]:
        params = ask.request.params
        sampling: dict[str, Any] = {
            **{field: getattr(params, field) for field in _SAME_NAME},
            "top_k": params.top_k or -1,
            "max_new_tokens": ask.max_tokens,
            "min_new_tokens": min(params.min_tokens, ask.max_tokens),
            "stop": list(params.stop),
            "stop_token_ids": ask.stop_token_ids,
        }
        if params.logit_bias:
            sampling["logit_bias"] = {str(token): b for token, b in params.logit_bias.items()}
        if ask.seed is not None:
            sampling["sampling_seed"] = ask.seed
        body: dict[str, Any] = {
            "rid": ask.name,
            "input_ids": ask.request.tokens.tolist(),
            "sampling_params": sampling,
            "stream": True,
        }
        if params.logprobs is not None:
            body |= {"return_logprob": True, "top_logprobs_num": params.logprobs}
        if ask.salt is not None:
            body["extra_key"] = ask.salt
        if ask.request.adapter is not None:
            body["lora_path"] = ask.model
        return body

    def told(self, event: Mapping[str, Any], ask: SequenceAsk, num_tokens: int) -> Told:
        about = event["meta_info"]
        cached: dict[str, Any] = {"cached_tokens": about.get("cached_tokens")}
        if isinstance(tiers := about.get("cached_tokens_details"), Mapping):
            below = {TierName.HOST: tiers.get("host"), TierName.DISK: tiers.get("storage", 0)}
            cached |= {TIERS: {TierName.DEVICE: tiers.get("device"), **below}}
        ended = about["finish_reason"] or {}
        num_new = about["completion_tokens"] - num_tokens
        tokens = tuple(event["output_ids"][-num_new:]) if num_new else ()
        if len(tokens) != num_new:
            raise ValueError(f"{len(tokens)} of {num_new} new tokens")
        return Told(
            tokens,
            finish_of(ended.get("type")),
            isinstance(ended.get("matched"), str),
            _logprobs(about, num_new, ask.request.params),
            usage={"prompt_tokens": about["prompt_tokens"], "prompt_tokens_details": cached},
        )


def _logprobs(
    about: Mapping[str, Any], num_new: int, params: SamplingParams
) -> tuple[TokenLogprob, ...]:
    if params.logprobs is None or not num_new:
        return ()
    own = about["output_token_logprobs"][-num_new:]
    none: Sequence[Any] = [[]] * num_new
    likely = about["output_top_logprobs"][-num_new:] if params.logprobs else none
    return tuple(
        TokenLogprob(token, logprob, tuple((each[1], each[0]) for each in top or ()))
        for (logprob, token, *_), top in zip(own, likely, strict=True)
    )
