"""A vLLM request's blocks as the tiers name them: by group of layers and rank."""

from collections.abc import Sequence
from typing import Any

from cachesvc.vllm.identity import EngineIdentity, contents_of
from tiers.blocks.keys import TOKEN_BYTES, BlockId, token_bytes
from tiers.node.messages import TokenRun

RankIds = tuple[tuple[BlockId, ...], ...]  # [rank][block]


class RequestChains:
    """The ids of a request's blocks, made when they are needed and extended with its tokens.

    One thread at a time.
    """

    def __init__(self, identity: EngineIdentity, request: Any) -> None:
        self._sizes = [group.block_size for group in identity.groups]
        self._roots = identity.roots_of(request)
        self._chains: list[list[list[BlockId]]] = [[[] for _ in roots] for roots in self._roots]
        self._features: Sequence[Any] = request.mm_features
        self._tokens = bytearray()
        self.grow(request, request.num_tokens)

    def grow(self, request: Any, num_tokens: int) -> None:
        """Learn the request's tokens up to `num_tokens`."""
        known = len(self._tokens) // TOKEN_BYTES
        if num_tokens > known:
            self._tokens += token_bytes(request.all_token_ids[known:num_tokens])

    def ids(self, group: int, start: int, end: int) -> RankIds:
        """Each rank's ids of blocks `start` to `end` of a group. Their tokens must be known."""
        size = self._sizes[group]
        step = size * TOKEN_BYTES
        contents = contents_of(self._features, end, size)
        for root, chain in zip(self._roots[group], self._chains[group], strict=True):
            known = len(chain)
            tokens = bytes(self._tokens[known * step : end * step])
            parent = chain[-1].key if chain else root
            chain += TokenRun(root, parent, tokens, size, contents[known:]).ids()
        return tuple(tuple(chain[start:end]) for chain in self._chains[group])
