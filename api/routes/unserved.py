"""What OpenAI, Anthropic and other servers have and this one has not, refused by name."""

from collections.abc import Mapping
from typing import Final

from fastapi import APIRouter, Request

from api.context import authorised, wire_of
from api.errors import NotServed

router = APIRouter(include_in_schema=False)

_BESIDE = "is served; run one beside this server"
_NO_BATCH = "send the requests one by one; X-Session-Id groups them"
_NO_STORE = "keep the conversation yourself, or use previous_response_id of /v1/responses"
_NO_TRAINING = "serve a finished adapter with `--adapter`"

# What is named after /v1, and what to do instead.
UNSERVED: Final[Mapping[str, str]] = {
    **dict.fromkeys(("assistants", "conversations", "threads"), _NO_STORE),
    "audio": "no model here hears or speaks; send text",
    **dict.fromkeys(("batches", "messages/batches"), _NO_BATCH),
    "cache/events": "routers read block events at `events.zmq`, in vLLM's format",
    "classify": "ask a chat for one of several answers, with structured_outputs.choice",
    "containers": "run the model's tool calls yourself",
    **dict.fromkeys(("embeddings", "pooling"), f"no embedding model {_BESIDE}"),
    "evals": "run them in your own harness",
    **dict.fromkeys(("files", "uploads"), "send the content itself, in the request"),
    "fine_tuning": _NO_TRAINING,
    **dict.fromkeys(("images", "videos"), "no model here draws"),
    "invoices": "the billing system that `cachesvc usage export` feeds issues invoices; "
    "/v1/usage/statement/MONTH has a month",
    "moderations": "no moderation model is served; run one in front of this server",
    "realtime": "stream a chat with `stream: true`",
    **dict.fromkeys(("rerank", "score"), f"no reranking model {_BESIDE}"),
    "responses/input_tokens": "/tokenize counts the tokens of messages",
    "skills": "put their text into the system prompt",
    "vector_stores": "search yourself, and put what was found into the prompt",
}
_METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE"]


async def refuse(request: Request) -> None:
    """Raises NotServed, with what to do instead and what is served."""
    await authorised(request)
    path = request.url.path.removeprefix("/v1").removeprefix("/")
    name = next(name for name in UNSERVED if f"{path}/".startswith(f"{name}/"))
    models = ", ".join(f"'{model}'" for model in wire_of(request).inference.models)
    raise NotServed(
        f"/v1/{name} is not served here: {UNSERVED[name]}. This server has "
        f"/v1/chat/completions, /v1/responses, /v1/messages and /v1/completions, with {models}."
    )


for _path in (f"{base}/{name}" for base in ("/v1", "") for name in UNSERVED):
    router.add_api_route(_path, refuse, methods=_METHODS)
    router.add_api_route(f"{_path}/{{rest:path}}", refuse, methods=_METHODS)
