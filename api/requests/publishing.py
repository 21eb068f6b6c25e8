"""Delays an answer until the shared store has its prompt's blocks.

For disaggregated prefill: one server computes a prompt and answers with one token, and another
server loads the blocks. It computes those that could not be sent in time. Event loop only.
"""

from collections.abc import Awaitable, Callable
from typing import Final

from api.errors import Unsupported
from api.job import Job

PUBLISHED: Final = "X-Cachesvc-Published-Tokens"


# How many leading tokens of a job's first prompt any server can load from now on.
Publish = Callable[[Job], Awaitable[int]]


def check_publishable(job: Job, publish: Publish | None) -> Publish:
    """Raises Unsupported without a shared store, or if the job may not be sent to it."""
    if publish is None:
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
    return publish
