"""The `cachesvc.contents` of a request: the contents behind placeholder tokens, checked.

For an upstream engine that turns images or sound into placeholder tokens. It names each content by
a digest, and KV is shared only if tokens and content are equal. Event loop only.
"""

import hashlib
from collections.abc import Sequence

from api.errors import InvalidRequest
from api.shapes.schemas import ContentSpan, Extension
from tiers.blocks.contents import Content, refusal

MIN_BYTES = 16  # 128 bits: shorter digests of different contents could be equal


def contents_of(
    extension: Extension, prompts: Sequence[Sequence[int]], apart: Sequence[str] = ()
) -> tuple[tuple[Content, ...], ...]:
    """The contents of each prompt, in order. Raises InvalidRequest.

    `apart` are texts that keep blocks apart within the tenant (a salt, an end user). They become a
    content of the first token, so the blocks stay the tenant's own, for purges and quotas too.
    """
    given = list(enumerate(extension.contents or ()))
    for number, span in given:
        _check_span(f"cachesvc.contents[{number}]", span, len(prompts))
    found = tuple(_of_prompt(number, tokens, given) for number, tokens in enumerate(prompts))
    if not apart:
        return found
    if any(contents and contents[0].start == 0 for contents in found):
        raise InvalidRequest(
            f"{apart[0]} marks a prompt's first token, and cachesvc.contents covers it; leave out "
            "one of the two.",
            param=apart[0],
        )
    first = Content(0, 1, _digest(apart))
    return tuple((first, *contents) for contents in found)


def _digest(texts: Sequence[str]) -> bytes:
    """32 bytes over the texts, each with its length."""
    hasher = hashlib.blake2b(digest_size=32)
    for text in texts:
        data = text.encode()
        hasher.update(len(data).to_bytes(4, "little") + data)
    return hasher.digest()


def _of_prompt(
    prompt: int, tokens: Sequence[int], given: Sequence[tuple[int, ContentSpan]]
) -> tuple[Content, ...]:
    own = sorted(
        ((number, span) for number, span in given if span.prompt == prompt),
        key=lambda each: each[1].start,
    )
    contents = tuple(
        Content(span.start, span.length, bytes.fromhex(span.digest)) for _, span in own
    )
    if wrong := refusal(contents, len(tokens)):
        place, why = wrong
        name = f"cachesvc.contents[{own[place][0]}]"
        raise InvalidRequest(f"{name} {why}; /tokenize gives a prompt's tokens.", param=name)
    return contents


def _check_span(name: str, span: ContentSpan, num_prompts: int) -> None:
    if span.prompt >= num_prompts:
        raise InvalidRequest(
            f"{name} is of prompt {span.prompt}; the request has {num_prompts}, counted from 0.",
            param=f"{name}.prompt",
        )
    if len(span.digest) < 2 * MIN_BYTES:
        raise InvalidRequest(
            f"{name} has a digest of {len(span.digest) // 2} bytes; send {2 * MIN_BYTES} hex "
            "digits or more, as of SHA-256.",
            param=f"{name}.digest",
        )
