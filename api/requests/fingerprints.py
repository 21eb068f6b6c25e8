"""Fingerprints of answered prompts, to say where a later prompt diverges from an earlier one.

A fingerprint holds digests and counts, no text and no tokens. Its name is made from the answer's id
with the tenant's salt, so no tenant finds another's. The latest are in memory, and all are in
`kept`, where they survive a restart. Event loop only.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Final

import orjson
import xxhash

from api.job import COMPARED_TOKENS, Comparison, Job, PromptPart
from api.requests.kept import NOTHING, KeptAnswers, KeptBodies
from api.shapes.message import SYSTEM_ROLES
from tiers.blocks.contents import block_contents
from tiers.blocks.keys import TOKEN_BYTES, block_ids, child_key, prefix_keys, token_bytes

MAX_BYTES: Final = 4 << 20
_DIGEST_BYTES: Final = 8


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """One prompt: `blocks` digest its beginnings of 64, 128, ... tokens, and then all of it."""

    parts: Mapping[str, str]
    messages: Sequence[str]
    num_tokens: int
    blocks: Sequence[str]


def fingerprint_of(
    job: Job,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    arguments: Mapping[str, Any],
) -> Fingerprint:
    """The fingerprint of a chat's job."""
    system = list(takewhile(lambda each: each["role"] in SYSTEM_ROLES, messages))
    return Fingerprint(
        parts={
            PromptPart.MODEL.value: job.model.name,
            PromptPart.SYSTEM.value: _digest(system),
            PromptPart.TOOLS.value: _digest(tools),
            PromptPart.ARGUMENTS.value: _digest(arguments),
        },
        messages=[_digest(_said(each)) for each in messages[len(system) :]],
        num_tokens=job.prompt_tokens,
        blocks=_blocks(job),
    )


def compare(old: Fingerprint, new: Fingerprint, job: Job) -> Comparison:
    """Where `new`, the fingerprint of `job`, diverges from `old`."""
    changed = next(
        (PromptPart(name) for name in old.parts if old.parts[name] != new.parts[name]), None
    )
    if changed is None and old.messages != new.messages[: len(old.messages)]:
        changed = PromptPart.MESSAGES
    pairs = zip(old.blocks, _blocks(job, old.num_tokens), strict=False)
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    return Comparison(changed, min(same * COMPARED_TOKENS, old.num_tokens), old.num_tokens)


class Fingerprints(KeptAnswers[Fingerprint]):
    """At most `MAX_BYTES` in memory; the least recently used leave first."""

    def __init__(self, kept: KeptBodies = NOTHING) -> None:
        super().__init__("fingerprint", _made, MAX_BYTES, kept)


def _made(*fields: Any) -> Fingerprint:
    """Raises ValueError if another version compared other parts."""
    printed = Fingerprint(*fields)
    if printed.parts.keys() != {*PromptPart} - {PromptPart.MESSAGES}:
        raise ValueError(f"a fingerprint of {sorted(printed.parts)}")
    return printed


def _blocks(job: Job, num_tokens: int | None = None) -> list[str]:
    """Digests of the beginnings of a job's one prompt, cut after `num_tokens`."""
    tokens = job.prompts[0][:num_tokens]
    packed, pieces = token_bytes(tokens), block_contents(job.contents, COMPARED_TOKENS)
    root, step = job.scope.root(), COMPARED_TOKENS
    if pieces:
        keys = [each.key for each in block_ids(root, packed, step, pieces)]
    else:
        keys = prefix_keys(root, packed, step)  # the same, faster
    if len(tokens) % step:
        parent = keys[-1] if keys else root
        content = pieces[len(keys)] if len(keys) < len(pieces) else b""
        keys.append(child_key(parent, packed[len(keys) * step * TOKEN_BYTES :], content))
    return [key[:_DIGEST_BYTES].hex() for key in keys]


def _said(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message without fields that are not given."""
    return {name: value for name, value in message.items() if value is not None}


def _digest(value: object) -> str:
    return xxhash.xxh3_64_hexdigest(orjson.dumps(value, option=orjson.OPT_SORT_KEYS))
