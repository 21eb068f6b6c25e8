"""The ranges of a request's sampling parameters.

Pure. The engine checks each request. The wire refuses the same values under their JSON names. The
ranges keep arithmetic on ordinary logits finite. The sampler is safe beyond them too.
"""

from typing import Any

from engine.errors import InvalidParameter
from engine.request import SamplingParams

MAX_LOGPROBS = 20  # OpenAI, API reference, `top_logprobs`
MAX_N = 16_384  # the same as vLLM's
MAX_COUNT = (1 << 31) - 1  # for tokens and for candidates
MIN_REPETITION_PENALTY = 0.01  # dividing logits by a smaller value overflows float32
MAX_REPETITION_PENALTY = 10.0
MIN_SEED, MAX_SEED = -(1 << 63), (1 << 64) - 1

_RANGES: tuple[tuple[str, float, float], ...] = (
    ("temperature", 0.0, 100.0),
    ("top_p", 0.0, 1.0),
    ("min_p", 0.0, 1.0),
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
    ("repetition_penalty", MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY),
)
_COUNTS = (
    ("n", 1, MAX_N),
    ("top_k", 0, MAX_COUNT),
    ("min_tokens", 0, MAX_COUNT),
    ("max_tokens", 0, MAX_COUNT),
    ("seed", MIN_SEED, MAX_SEED),
    ("logprobs", 0, MAX_LOGPROBS),
    ("prompt_logprobs", 0, MAX_LOGPROBS),
)
_OPTIONAL = frozenset({"max_tokens", "seed", "logprobs", "prompt_logprobs"})


def check_params(params: SamplingParams, vocab_size: int) -> None:
    """Raise InvalidParameter for a value out of its range. It names the field as OpenAI does."""
    for field, low, high in _RANGES:
        value = getattr(params, field)
        if not (_is_number(value, int | float) and low <= value <= high):
            raise _out_of_range(field, value, f"a number from {low:g} to {high:g}")
    if params.top_p == 0:
        raise _out_of_range("top_p", 0, "above 0")
    for field, least, most in _COUNTS:
        value = getattr(params, field)
        if value is None and field in _OPTIONAL:
            continue
        if not (_is_number(value, int) and least <= value <= most):
            raise _out_of_range(field, value, f"an integer from {least} to {most}")
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise _out_of_range(
            "min_tokens", params.min_tokens, f"at most max_tokens ({params.max_tokens})"
        )
    _check_tokens(params, vocab_size)


def _check_tokens(params: SamplingParams, vocab_size: int) -> None:
    for token, bias in params.logit_bias.items():
        if not _is_token(token, vocab_size):
            raise _out_of_range("logit_bias", token, f"a token id below {vocab_size}")
        if not (_is_number(bias, int | float) and -100 <= bias <= 100):
            raise _out_of_range("logit_bias", bias, "a bias from -100 to 100")
    for token in params.stop_token_ids:
        if not _is_token(token, vocab_size):
            raise _out_of_range("stop_token_ids", token, f"a token id below {vocab_size}")


def _is_token(value: object, vocab_size: int) -> bool:
    return isinstance(value, int) and 0 <= value < vocab_size


def _is_number(value: Any, kind: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _out_of_range(field: str, value: object, expected: str) -> InvalidParameter:
    shown = value if isinstance(value, float) or _is_short(value) else type(value).__name__
    return InvalidParameter(f"{field} is {shown}; it must be {expected}", param=field)


def _is_short(value: object) -> bool:
    """Whether a value is short enough for a message, unlike the digits of a huge integer."""
    return value is None or (isinstance(value, int) and abs(value) < 1 << 128)
