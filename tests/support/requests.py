"""Requests to an engine, without a server before it."""

from array import array
from collections.abc import Iterable
from typing import Any

from engine.request import Request, SamplingParams
from tiers.blocks.keys import CacheScope


def request(tokens: Iterable[int], name: str = "r", **fields: Any) -> Request:
    """For these tokens. Where no `params` say otherwise, for one more, greedily."""
    usual = {"params": SamplingParams(temperature=0, max_tokens=1), "scope": CacheScope()}
    return Request(request_id=name, tokens=array("i", tokens), **{**usual, **fields})
