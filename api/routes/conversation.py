"""Turns a chat's checked body into a job and a reader of its answer, for every protocol."""

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from api.collaborators import Collaborators
from api.context import Arrival, request_context
from api.errors import ApiError
from api.job import Delta, Job, Keep, Session, Turn
from api.requests.turns import TurnReplay, common_length, turn_of
from api.routes.prompts import encode_chat, ends_thinking
from api.served_model import ServedModel, find_model
from api.shapes.chat import message_of
from api.shapes.message import Breakpoint, CacheOptions
from api.shapes.reply import Reply
from api.shapes.schemas import ChatBody
from api.shapes.structured import chat_answer
from api.shapes.template import ChatPrompt, chat_prompt
from api.shapes.translation import with_answer
from api.tools.reasoning import ThinkParser
from api.tools.style import Style, parser_of
from engine.errors import RequestError
from engine.request import FinishReason
from engine.structure import GrammarSource

SESSION_CHARS = 256  # limit of a client's name for its conversation


async def chat_of(
    arrival: Arrival, body: ChatBody, *, replays: bool = False, limit: str | None = None
) -> tuple[Job, Callable[[], Reply]]:
    """What a body asks to generate, and how to read each choice of the answer. In stages: find the
    model, render, tokenise, limit, keep.

    Raises what is wrong with the body, by field. `replays` continues from the last turn's tokens.
    `limit` is the protocol's own name of the body's.
    """
    wire, log, tenant = arrival.wire, arrival.log, arrival.principal.tenant
    if ignored := body.check(wire.settings.max_choices):
        log.add(ignored_fields=ignored)
    extension, apart, points = body.extension, body.apart, body.breakpoints()
    options = body.prompt_cache_options or CacheOptions()
    uses_cache = extension.cache is not False and options.use_cache(points)

    model = find_model(wire.inference.models, body.model)
    scope = wire.access.salts.scoped(model.scope, tenant, extension.share)

    prompt = chat_prompt(model, body)

    turn, replay = None, None  # tokens do not identify whose they are
    if uses_cache and not apart:
        tools, goes_on = prompt.offered_tools, prompt.continue_final_message
        turn = turn_of(scope, prompt.messages, tools, prompt.arguments, goes_on=goes_on)
        await wire.records.conversations.recall(turn)
        replay = _replay(wire, prompt, turn) if replays else None
    tokens = await encode_chat(wire, model, prompt, tenant=tenant, replay=replay)
    opened = ends_thinking(model, prompt, tokens)

    params, stop, source = chat_answer(
        body, model, prompt.tooling, prompt.style, len(tokens), thinking=opened, limit=limit
    )
    new_reply = partial(_new_reply, prompt, source, opened=opened)

    # Pins of requests find blocks by tokens alone, so chats kept apart get none.
    mine = not (apart or extension.share)
    points = points if mine else []
    keeps = await _keeps(wire, model, body, points, tokens, tenant=tenant) if points else ()
    session, name = None, arrival.names.session or body.prompt_cache_key
    if name and mine and uses_cache:
        parent = arrival.names.parent_session[:SESSION_CHARS]
        session = Session(name[:SESSION_CHARS], parent, extension.pause_s)
    num_same = 0  # of the replayed tokens; the template's own may have been used after all
    if replay is not None and tokens[: len(replay.tokens)] == replay.tokens:
        num_same = len(replay.tokens)
    begun = prompt.messages[-1] if turn is not None and turn.goes_on else None
    job = Job(
        request_id=log.request_id,
        model=model,
        prompts=(tokens,),
        params=params,
        tenant=tenant,
        scope=scope,
        stop=stop,
        source=source,
        cache=uses_cache,
        stream=bool(body.stream),
        arrival_ns=log.arrival_ns,
        context=request_context(arrival, body),
        contents=apart,
        markers=prompt.markers,
        keeps=keeps,
        session=session,
        turn=turn,
        message_of=partial(_answered, new_reply, begun) if turn is not None else None,
        replayed_tokens=num_same,
        divergence=None
        if turn is None or num_same
        else wire.records.conversations.divergence(turn, tokens, model.tokenizer),
    )
    return job, new_reply


async def _keeps(
    wire: Collaborators,
    model: ServedModel,
    body: ChatBody,
    points: Sequence[Breakpoint],
    tokens: "array[int]",
    *,
    tenant: str,
) -> tuple[Keep, ...]:
    """The points in tokens: the common beginning of the chat and the chat cut at each."""
    keeps = []
    for point in points:
        same = len(tokens)
        if (begun := body.until(point)) is not None:
            try:
                cut = replace(chat_prompt(model, begun), add_generation_prompt=False)
                cut_tokens = await encode_chat(wire, model, cut, tenant=tenant)
            except (ApiError, RequestError):  # the template rejects a chat that ends there
                continue
            same = common_length(tokens, cut_tokens)
        keeps.append(Keep(same, point.for_s))
    return tuple(keeps)


def _replay(wire: Collaborators, prompt: ChatPrompt, turn: Turn) -> TurnReplay | None:
    """What the chat continues from. Never calls in harmony, which end with their own marker."""
    replay = wire.records.conversations.replay(turn)
    if replay is None:
        return None
    is_last = replay.place == len(prompt.messages) - 1
    calls = prompt.messages[replay.place].get("tool_calls")
    if (is_last and not turn.goes_on) or (calls and prompt.style is Style.HARMONY):
        return None
    return replay


def _answered(
    new_reply: Callable[[], Reply], begun: Mapping[str, Any] | None, text: str
) -> Mapping[str, Any]:
    """An answer as the message that the next turn sends. It goes on with the message `begun`."""
    reply = new_reply()
    reply.read(Delta(0, text, finish=FinishReason.STOP))
    message = message_of(reply)
    return message if begun is None else with_answer([dict(begun)], message)[0]


def _new_reply(prompt: ChatPrompt, source: GrammarSource | None, *, opened: bool) -> Reply:
    tooling, style, begun = prompt.tooling, prompt.style, prompt.continue_final_message
    # A grammar makes the model write calls as JSON without the style's markers.
    forced = source is not None and tooling.may_call and not style.has_text_marks
    names = frozenset(tool.name for tool in tooling.tools if tooling.may_call)
    parser = parser_of(style, names, forced=forced, begun=begun)
    if prompt.thinks and style is not Style.HARMONY:
        parser = ThinkParser(parser, opened=opened)
    return Reply(parser, style, only_calls=tooling.choice.forced)
