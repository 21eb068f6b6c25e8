"""vLLM behind the engine's interface: `cachesvc serve --engine vllm`.

Token ids in, token ids out, hits by tier. vLLM computes, a `cachesvc node` holds the tiers below
it, the rest of the server is the same. The connector that vLLM loads is in `cachesvc.vllm`.
"""
