"""vLLM behind the engine's interface: `cachesvc serve --engine vllm`.

vLLM computes, and a `cachesvc node` holds the tiers below it. The rest of the server is the same.
The connector that vLLM loads is in `cachesvc.vllm`.
"""
