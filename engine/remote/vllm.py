"""vLLM's two ways from token ids to token ids.

Every server has `/v1/completions`. `/inference/v1/generate` answers 403 unless the server was
started with `--enable-scale-out`; it does no text, and tells the ranks of log-probabilities. Both
tell the prompt's log-probabilities only in an answer that comes whole.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from engine.errors import InvalidParameter
from engine.remote.protocol import SequenceAsk, Told, finish_of
from engine.request import Request, TokenLogprob

MAX_SALT_BYTES = 62  # in hexadecimal after its mark, within the 128 characters of a `cache_salt`
TAG = "cachesvc"  # of our connector in `kv_transfer_params`
_SAME_NAME = (
    *("temperature", "top_p", "top_k", "min_p", "ignore_eos", "logprobs"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)
_TOKEN = "token_id:"  # noqa: S105 - how vLLM names a token by its id


class Completions:
    """`POST /v1/completions`."""

    path = "/v1/completions"

    def __init__(self, *, priorities: bool, grammars: bool, tagged: bool = False) -> None:
        """`priorities`: its scheduler has them. `grammars`: it takes those of llguidance.
        `tagged`: our connector reads what each request is called."""
        self._priorities = priorities
        self._grammars = grammars
        self._tagged = tagged

    def check(self, request: Request) -> None:
        if request.contents:
            raise InvalidParameter(
                "cache_salt and user_id are not served by this engine; leave them out, "
                "or use the embedded engine (engine.backend = embedded)",
                param="cache_salt",
            )
        if len(request.scope.tenant) > MAX_SALT_BYTES:
            raise InvalidParameter(
                f"the tenant's salt has {len(request.scope.tenant)} bytes; vLLM's cache_salt takes "
                f"{MAX_SALT_BYTES} at most",
                param="cache_salt",
            )
        if request.grammar is not None and not self._grammars:
            raise InvalidParameter(
                "this vLLM takes no grammar of llguidance; its operator can start it with "
                "--structured-outputs-config.backend guidance",
                param="structured_outputs",
            )

    def body(self, ask: SequenceAsk) -> dict[str, Any]:
        return {
            **self._common(ask),
            **_sampling(ask),
            "prompt": ask.request.tokens.tolist(),
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }

    def _common(self, ask: SequenceAsk) -> dict[str, Any]:
        stream = ask.prompt_logprobs is None
        body: dict[str, Any] = {"model": ask.model, "stream": stream}
        if stream:
            body["stream_options"] = {"include_usage": True}
        if ask.salt is not None:
            body["cache_salt"] = ask.salt
        if self._priorities:
            body["priority"] = ask.priority
        if self._tagged:
            tag = {"id": ask.name, "store": ask.request.cache}
            body["kv_transfer_params"] = {TAG: tag}
        return body

    def told(self, event: Mapping[str, Any], ask: SequenceAsk, num_tokens: int) -> Told:
        choices = event["choices"]
        if not choices:
            return Told(usage=event.get("usage"))
        (choice,) = choices
        tokens = tuple(choice["token_ids"])
        return Told(
            tokens,
            finish_of(choice["finish_reason"]),
            isinstance(choice.get("stop_reason"), str),
            self._logprobs(tokens, choice, ask.request.params.logprobs),
            _prompt_logprobs(ask, self._of_prompt(event, choice)),
            event.get("usage"),
        )

    def _of_prompt(self, event: Mapping[str, Any], choice: Mapping[str, Any]) -> Any:
        return choice.get("prompt_logprobs")

    def _logprobs(
        self, tokens: Sequence[int], choice: Mapping[str, Any], most: int | None
    ) -> tuple[TokenLogprob, ...]:
        if most is None or (logprobs := choice["logprobs"]) is None:
            return ()
        likely = (
            sorted(
                ((int(name.removeprefix(_TOKEN)), value) for name, value in top.items()),
                key=lambda pair: -pair[1],
            )[:most]
            for top in logprobs["top_logprobs"]
        )
        return tuple(
            TokenLogprob(token, value, tuple(top))
            for token, value, top in zip(tokens, logprobs["token_logprobs"], likely, strict=True)
        )


class Generate(Completions):
    """`POST /inference/v1/generate`."""

    path = "/inference/v1/generate"

    def body(self, ask: SequenceAsk) -> dict[str, Any]:
        sampling = {
            **_sampling(ask),
            "skip_reading_prefix_cache": None if ask.request.cache else True,
            "detokenize": bool(ask.request.params.stop),
        }
        tokens = ask.request.tokens.tolist()
        return {**self._common(ask), "token_ids": tokens, "sampling_params": sampling}

    def _of_prompt(self, event: Mapping[str, Any], choice: Mapping[str, Any]) -> Any:
        return event.get("prompt_logprobs")

    def _logprobs(
        self, tokens: Sequence[int], choice: Mapping[str, Any], most: int | None
    ) -> tuple[TokenLogprob, ...]:
        if most is None or (logprobs := choice["logprobs"]) is None:
            return ()
        return tuple(
            _ranked(entry["token_id"], {each["token_id"]: each for each in entries}, most)
            for entry in logprobs["content"]
            for entries in [[entry, *entry["top_logprobs"]]]
        )


def _sampling(ask: SequenceAsk) -> dict[str, Any]:
    """What both take under vLLM's names."""
    params = ask.request.params
    fields: dict[str, Any] = {
        **{field: getattr(params, field) for field in _SAME_NAME},
        "max_tokens": ask.max_tokens,
        "min_tokens": min(params.min_tokens, ask.max_tokens),
        "seed": ask.seed,
        "stop": list(params.stop),
        "stop_token_ids": ask.stop_token_ids,
        "logit_bias": {str(token): bias for token, bias in params.logit_bias.items()} or None,
        "prompt_logprobs": ask.prompt_logprobs,
    }
    if ask.request.grammar is not None:
        fields["structured_outputs"] = {"grammar": ask.request.grammar.source.text}
    return fields


def _prompt_logprobs(ask: SequenceAsk, entries: Any) -> tuple[TokenLogprob, ...]:
    """Of every token of the prompt but the first, whose entry is null."""
    most = ask.prompt_logprobs
    if most is None:
        return ()
    asked = ask.request.tokens[1:]
    return tuple(
        _ranked(token, {int(name): each for name, each in entry.items()}, most)
        for token, entry in zip(asked, entries[1:], strict=True)
    )


def _ranked(token: int, entry: Mapping[int, Mapping[str, Any]], most: int) -> TokenLogprob:
    """A token's own logprob and those of the `most` likely ones."""
    likely = sorted(entry.items(), key=lambda item: item[1]["rank"])[:most]
    top = tuple((number, float(value["logprob"])) for number, value in likely)
    own = entry[token]
    return TokenLogprob(token, own["logprob"], top, own["rank"] or 0)
