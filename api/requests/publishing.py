"""An answer that waits until the shared store has its prompt's blocks.

For prefill apart from decode: one server computes a prompt and answers with one token, another
finds the blocks. What cannot be sent in time is computed there. Event loop only.
"""

from typing import Final, Protocol

from api.errors import Unsupported
from api.job import Job

PUBLISHED: Final = "X-Cachesvc-Published-Tokens"


class Publisher(Protocol):
    """See `cachesvc.operator.publisher`."""

    async def publish(self, job: Job) -> int:
        """How many leading tokens of the first prompt any server may load from now on."""
        ...


def check_publishable(job: Job, publisher: Publisher | None) -> Publisher:
    """Raises Unsupported where there is no shared store, or nothing that may be sent to it."""
    if publisher is None:
        raise Unsupported(
            "publish needs a tier that servers share, and this server has none; its operator sets "
            "cache.remote_url.",
            param="cachesvc.publish",
        )
    if not job.cache or len(job.prompts) > 1:
        raise Unsupported(
            "publish sends one prompt that is cached; ask for one, and not for cache: false.",
            param="cachesvc.publish",
        )
    return publisher
