"""Request traces in Mooncake's format: one JSON object per line, plain or `.gz`.

    {"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1, 2]}

`timestamp` is in milliseconds. A hash id names a block and all before it, so an id always has the
same predecessor. One thread.
"""

import gzip
import json
import math
import zlib
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiers.errors import TierError

MOONCAKE_BLOCK_TOKENS = 512  # tokens per hash id in the FAST'25 traces


class TraceError(TierError):
    """A trace that cannot be read. The message names the file and the line."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One prompt: `blocks[i]` names tokens `[i * block_tokens, (i + 1) * block_tokens)` of it."""

    time_s: float
    input_tokens: int
    blocks: tuple[Hashable, ...]
    output_tokens: int = 0
    tenant: str | None = None
    session: str | None = None  # its conversation, if the trace names it


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order they arrived."""

    name: str
    requests: Sequence[TraceRequest]
    block_tokens: int = MOONCAKE_BLOCK_TOKENS

    @property
    def input_tokens(self) -> int:
        return sum(request.input_tokens for request in self.requests)

    def working_set_blocks(self) -> int:
        """The number of distinct blocks, which a cache that never evicts would hold."""
        return len({block for request in self.requests for block in request.blocks})


def read_trace(path: Path, block_tokens: int = MOONCAKE_BLOCK_TOKENS) -> Trace:
    """Read a whole trace. Raises TraceError."""
    try:
        data = path.read_bytes()
        lines = (gzip.decompress(data) if path.suffix == ".gz" else data).decode().splitlines()
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise TraceError(f"cannot read the trace {path}: {error}") from error
    requests = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                requests.append(_parse(line))
            except ValueError as error:
                raise TraceError(f"{path}, line {number}: {error}") from error
    if not requests:
        raise TraceError(f"the trace {path} holds no request")
    _check_block_tokens(path, requests, block_tokens)
    return Trace(path.name, requests, block_tokens)


def _check_block_tokens(path: Path, requests: Sequence[TraceRequest], block_tokens: int) -> None:
    """A few requests may name more blocks than their tokens fill, but not most."""
    too_many = [
        request
        for request in requests
        if len(request.blocks) > -(-request.input_tokens // block_tokens)
    ]
    if 2 * len(too_many) > len(requests):
        example = too_many[0]
        raise TraceError(
            f"{path}: {len(too_many)} of {len(requests)} requests name more blocks than their "
            f"tokens fill (one {len(example.blocks)} blocks for {example.input_tokens} tokens), so "
            f"a hash id does not stand for {block_tokens} tokens; give the trace's own block size"
        )


def _parse(line: str) -> TraceRequest:
    """Parse one line. Raises ValueError that says what is wrong with it."""
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error}") from error
    if not isinstance(record, dict):
        raise ValueError("each line must be a JSON object: timestamp, input_length and hash_ids")
    blocks = record.get("hash_ids")
    if not isinstance(blocks, list) or not all(isinstance(block, int | str) for block in blocks):
        raise ValueError("hash_ids must be a list of integers or strings, one for each block")
    tenant, session = record.get("tenant"), record.get("session")
    return TraceRequest(
        time_s=_amount(record, "timestamp") / 1000,
        input_tokens=_amount(record, "input_length"),
        blocks=tuple(blocks),
        output_tokens=_amount(record, "output_length", 0),
        tenant=None if tenant is None else str(tenant),
        session=None if session is None else str(session),
    )


def _amount(record: dict[str, Any], name: str, default: int | None = None) -> int:
    value = record.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(f"{name} must be a number that is not negative, not {value!r}")
    return int(value)
