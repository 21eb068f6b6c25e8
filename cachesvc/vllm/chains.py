"""A prompt's blocks as the tiers name them: by group of layers and rank."""

from collections.abc import Sequence
from typing import Any

from cachesvc.vllm.groups import KvGroup
from cachesvc.vllm.identity import EngineIdentity, contents_of
from tiers.blocks.keys import TOKEN_BYTES, BlockId, PrefixKey, token_bytes
from tiers.node.messages import TokenRun

RankIds = tuple[tuple[BlockId, ...], ...]  # [rank][block]


class RequestChains:
    """The ids of a prompt's blocks, made when they are needed and extended with its tokens.

    One thread at a time.
    """

    def __init__(
        self,
        groups: Sequence[KvGroup],
        roots: list[list[PrefixKey]],
        tokens: bytes = b"",
        features: Sequence[Any] = (),
    ) -> None:
        """`roots`: of each group's blocks on each rank. `features`: images and the like."""
        self._sizes = [group.block_size for group in groups]
        self._roots = roots
        self._chains: list[list[list[BlockId]]] = [[[] for _ in each] for each in roots]
        self._features = features
        self._tokens = bytearray(tokens)

    @classmethod
    def of(cls, identity: EngineIdentity, request: Any) -> "RequestChains":
        """The blocks of a vLLM request."""
        roots, features = identity.roots_of(request), request.mm_features
        chains = cls(identity.groups, roots, features=features)
        chains.grow(request, request.num_tokens)
        return chains

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
