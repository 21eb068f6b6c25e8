"""The routes that metrics know, and series of the history."""

from tiers.tier import TierName

# Series of the history: prompt tokens, those that hit in any tier, and the hit rate.
PROMPT_TOKENS = "traffic.prompt_tokens.*"
HIT_TOKENS = "+".join(f"traffic.prompt_tokens.{tier}" for tier in TierName)
HIT_RATE = f"ratio:{HIT_TOKENS}/{PROMPT_TOKENS}"

ROUTES = frozenset(
    {
        *("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"),
        *("/v1/models", "/tokenize", "/user/balance", "/health", "/health/ready", "/metrics"),
    }
)
