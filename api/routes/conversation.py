"""Turns a chat's checked body into a job and a reader of its answer, for every protocol."""

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from fastapi import Request

from api.admission import check_size, request_context, scope_for
from api.collaborators import Collaborators
from api.context import request_log_of, wire_of
from api.errors import ApiError, InvalidRequest, Unsupported
from api.headers import single_header
from api.job import Comparison, Delta, Job, Keep, Session, Turn
from api.requests.fingerprints import Fingerprint, compare, fingerprint_of
from api.requests.turns import TurnReplay, common_length, turn_of
from api.routes.models import find_model
from api.routes.prompts import ChatPrompt, encode_chat, room_for_answer
from api.served_model import ServedModel
from api.shapes.chat import message_of
from api.shapes.contents import contents_of
from api.shapes.images import check_images
from api.shapes.reply import Reply
from api.shapes.schemas import ChatBody, sampling_params
from api.shapes.structured import source_asked
from api.shapes.template_arguments import SWITCHES, template_arguments
from api.shapes.tooling import tooling_of, tools_source
from api.shapes.translation import with_answer
from api.tools.history import for_template
from api.tools.reasoning import OPEN, ThinkParser
from api.tools.steering import steered
from api.tools.style import THOUGHT_MARKERS, Style, parser_of, style_of, thinks
from billing.keys import Principal
from engine.errors import RequestError
from engine.request import FinishReason
from engine.structure import GrammarSource
from tiers.blocks.keys import CacheScope

SESSION_CHARS = 256  # limit of a client's name for its conversation
_TAIL_TOKENS = 8  # of a prompt, enough to contain the marker of reasoning


@dataclass(frozen=True, slots=True)
class Mark:
    """A point up to which a client asks to keep its prompt: the chat cut there; None: the end."""

    for_s: float
    cut: ChatBody | None = None


@dataclass(frozen=True, slots=True)
class Chat:
    """The prompt for the model, and how to read each choice of its answer."""

    job: Job
    new_reply: Callable[[], Reply]
    prompt: ChatPrompt

    def fingerprint(self) -> Fingerprint:
        prompt = self.prompt
        return fingerprint_of(self.job, prompt.messages, prompt.offered_tools, prompt.arguments)


async def chat_of(
    request: Request,
    principal: Principal,
    body: ChatBody,
    raw: bytes,
    *,
    marks: Sequence[Mark] = (),
    replays: bool = False,
    limit: str | None = None,
) -> Chat:
    """The chat of a body. Raises what is wrong with it, by field.

    `marks` are the points up to which the prompt is to be kept. `replays` continues from the last
    turn's tokens. `limit` is the protocol's own name of the body's.
    """
    wire, log = wire_of(request), request_log_of(request)
    body.refuse_unserved()
    model = find_model(wire.inference.models, body.model)
    check_size(wire, body, 1)
    prompt = chat_prompt(wire, model, body)
    _refuse_named_images(prompt, body)
    log.add(ignored_fields=body.ignored or log.facts.get("ignored_fields"))
    scope = scope_for(wire.access.salts, model, principal, body.extension.share)
    turn = _turn(body, scope, prompt)
    if turn is not None:
        await wire.records.conversations.recall(turn)
    replay = _replay(wire, prompt, turn) if replays and not _is_named(body) else None
    encoded = await encode_chat(wire, model, prompt, tenant=principal.tenant, replay=replay)
    tokens, seen = encoded.tokens, bool(encoded.pictures)
    opened = _ends_thinking(model, tokens)
    source = tools_source(prompt.tooling, prompt.style, source_asked(body), thinking=opened)
    params = sampling_params(
        body, max_tokens=_room(model, body, len(tokens), limit), logprobs=body.logprobs_asked
    )
    # A stop would cut a forced call, which is no text.
    whole = prompt.tooling.choice.forced
    job = Job(
        request_id=log.request_id,
        model=model,
        prompts=(tokens,),
        params=replace(params, stop_token_ids=()) if whole else params,
        tenant=principal.tenant,
        scope=scope,
        stop=() if whole else body.stop_strings,
        source=source,
        cache=body.uses_cache,
        stream=bool(body.stream),
        arrival_ns=log.arrival_ns,
        context=request_context(request, principal, raw, body),
        contents=(encoded.contents,)
        if seen
        else contents_of(body.extension, (tokens,), body.apart),
        pictures=encoded.pictures,
        markers=_markers(prompt, model),
        # Pins of requests find blocks by tokens alone, so chats with images get none.
        keeps=()
        if seen
        else await _keeps(wire, model, body, tokens, marks, tenant=principal.tenant),
        session=None if seen else session_of(request, body),
    )
    forced = _is_bare(prompt, source)
    new_reply = partial(_new_reply, prompt, model, opened=opened, forced=forced)
    if turn is not None:
        begun = prompt.messages[-1] if turn.goes_on else None
        job = _remembered(wire, job, turn, _num_same(replay, tokens), new_reply, begun)
    return Chat(job, new_reply, prompt)


async def compared(
    wire: Collaborators, tenant: str, chat: Chat, answer_id: str | None
) -> Comparison | None:
    """Where the chat's prompt diverges from that of an earlier answer; None if none is known."""
    if answer_id is None:
        return None
    old = await wire.records.fingerprints.get(wire.access.salts.of_tenant(tenant), answer_id)
    return compare(old, chat.fingerprint(), chat.job) if old is not None else None


def _refuse_named_images(prompt: ChatPrompt, body: ChatBody) -> None:
    if prompt.images and _is_named(body):
        given = body.apart[0] if body.apart else "cachesvc.contents"
        raise InvalidRequest(
            f"The chat has images, which the server names itself; leave out {given}.", param=given
        )


def _is_named(body: ChatBody) -> bool:
    """Whether the prompt's tokens alone do not tell whose blocks it may use."""
    return bool(body.extension.contents or body.apart)


def _room(model: ServedModel, body: ChatBody, num_tokens: int, limit: str | None) -> int:
    """The maximum of answer tokens. Raises ContextLengthExceeded if the prompt leaves too few."""
    limit = limit or ("max_completion_tokens" if body.max_completion_tokens else "max_tokens")
    return room_for_answer(model, num_tokens, body.completion_limit, prompt="messages", limit=limit)


def _remembered(
    wire: Collaborators,
    job: Job,
    turn: Turn,
    num_same: int,
    new_reply: Callable[[], Reply],
    begun: Mapping[str, Any] | None,
) -> Job:
    """The job as a turn that continues from its conversation's last tokens. The answer goes on with
    the message `begun`."""
    return replace(
        job,
        turn=turn,
        message_of=partial(_answered, new_reply, begun),
        replayed_tokens=num_same,
        divergence=None
        if num_same
        else wire.records.conversations.divergence(turn, job.prompts[0], job.model.tokenizer),
    )


def chat_prompt(wire: Collaborators, model: ServedModel, body: ChatBody) -> ChatPrompt:
    """The input of the model's template. Raises like `chat_of`."""
    if not model.tokenizer.has_chat_template:
        raise Unsupported(
            f"The model '{model.name}' has no chat template; use /v1/completions.",
            param="messages",
        )
    template = model.tokenizer.chat_template
    tooling = tooling_of(body)
    last = body.messages[-1]
    continues = bool(body.continue_final_message or last.prefix or last.partial)
    if continues and (body.add_generation_prompt or body.messages[-1].role != "assistant"):
        raise InvalidRequest(
            "continue_final_message needs a last message of the assistant, and no "
            "add_generation_prompt.",
            param="continue_final_message",
        )
    messages = [message.for_template(number) for number, message in enumerate(body.messages)]
    images = [each for n, message in enumerate(body.messages) for each in message.images(n)]
    check_images(model, images)
    style, arguments = style_of(template), template_arguments(body, template)
    if continues and any(arguments.get(name) for name in SWITCHES):
        raise InvalidRequest(
            "thinking comes before an answer, and the last message has begun one; turn it off.",
            param="thinking",
        )
    return ChatPrompt(
        messages=steered(
            messages, partial(_shown, model, style), hoisted=wire.settings.system_in_place
        ),
        images=images,
        tooling=tooling,
        style=style,
        add_generation_prompt=body.add_generation_prompt is not False and not continues,
        continue_final_message=continues,
        arguments=arguments,
    )


def _shown(model: ServedModel, style: Style, messages: Sequence[Mapping[str, Any]]) -> str:
    """The messages as the model's template renders them. Raises RequestError if it does not."""
    plain, _ = for_template(messages, (), model.tokenizer.chat_template, style)
    return model.tokenizer.render(plain)


def session_of(request: Request, body: ChatBody) -> Session | None:
    """The conversation named by X-Session-Id, or else by prompt_cache_key.

    None if the tenant cannot keep the blocks: not cached, named contents, or a sharing group's.
    """
    name = single_header(request, "X-Session-Id") or body.prompt_cache_key or ""
    extension = body.extension
    if not name or extension.share or _is_named(body) or not body.uses_cache:
        return None
    parent = single_header(request, "X-Parent-Session-Id") or ""
    return Session(name[:SESSION_CHARS], parent[:SESSION_CHARS], extension.pause_s)


async def _keeps(
    wire: Collaborators,
    model: ServedModel,
    body: ChatBody,
    tokens: "array[int]",
    marks: Sequence[Mark],
    *,
    tenant: str,
) -> tuple[Keep, ...]:
    """The marks in tokens: the common beginning of the whole chat and the chat cut at each mark."""
    if body.extension.share or _is_named(body):
        return ()
    keeps = []
    for mark in (*marks, *(Mark(each.for_s, body.until(each)) for each in body.breakpoints())):
        same = len(tokens)
        if mark.cut is not None:
            try:
                cut = replace(chat_prompt(wire, model, mark.cut), add_generation_prompt=False)
                cut_tokens = (await encode_chat(wire, model, cut, tenant=tenant)).tokens
            except (ApiError, RequestError):  # the template rejects a chat that ends there
                continue
            same = common_length(tokens, cut_tokens)
        keeps.append(Keep(same, mark.for_s))
    return tuple(keeps)


def _turn(body: ChatBody, scope: CacheScope, prompt: ChatPrompt) -> Turn | None:
    """The chat as a turn of its conversation; None if turns are not remembered."""
    unknown = prompt.images or body.apart  # tokens identify neither images nor whose they are
    if not body.uses_cache or unknown:
        return None
    turn = turn_of(scope, prompt.messages, prompt.offered_tools, prompt.arguments)
    return replace(turn, goes_on=prompt.continue_final_message)


def _replay(wire: Collaborators, prompt: ChatPrompt, turn: Turn | None) -> TurnReplay | None:
    """What the chat continues from. Never calls in harmony, which end with their own marker."""
    replay = wire.records.conversations.replay(turn) if turn is not None else None
    is_last = replay is not None and replay.place == len(prompt.messages) - 1
    if replay is None or (is_last and not prompt.continue_final_message):
        return None
    calls = prompt.messages[replay.place].get("tool_calls")
    return None if calls and prompt.style is Style.HARMONY else replay


def _num_same(replay: TurnReplay | None, tokens: "array[int]") -> int:
    """The number of replayed tokens; 0 if the template's own were used after all."""
    if replay is None or tokens[: len(replay.tokens)] != replay.tokens:
        return 0
    return len(replay.tokens)


def _is_bare(prompt: ChatPrompt, source: GrammarSource | None) -> bool:
    """Whether a grammar makes the model write calls as JSON without the style's markers."""
    return source is not None and prompt.tooling.may_call and not prompt.style.has_text_marks


def _answered(
    new_reply: Callable[[], Reply], begun: Mapping[str, Any] | None, text: str
) -> Mapping[str, Any]:
    """An answer as the message that the next turn sends."""
    reply = new_reply()
    reply.read(Delta(0, text, finish=FinishReason.STOP))
    message = message_of(reply)
    return message if begun is None else with_answer([dict(begun)], message)[0]


def _markers(prompt: ChatPrompt, model: ServedModel) -> tuple[str, ...]:
    """Special tokens that the answer's reader needs as text."""
    calls = prompt.tooling.may_call or prompt.style is Style.HARMONY
    thought = THOUGHT_MARKERS if thinks(model.tokenizer.chat_template) else ()
    return (*(prompt.style.markers if calls else ()), *thought)


def _new_reply(prompt: ChatPrompt, model: ServedModel, *, opened: bool, forced: bool) -> Reply:
    names, begun = prompt.tooling.callable_names, prompt.continue_final_message
    parser = parser_of(prompt.style, names, forced=forced, begun=begun)
    if thinks(model.tokenizer.chat_template) and prompt.style is not Style.HARMONY:
        parser = ThinkParser(parser, opened=opened)
    return Reply(parser, prompt.style, only_calls=prompt.tooling.choice.forced)


def _ends_thinking(model: ServedModel, tokens: "array[int]") -> bool:
    """Whether the prompt ends inside reasoning, so that the answer begins with it."""
    if not thinks(model.tokenizer.chat_template):
        return False
    tail = b"".join(model.tokenizer.token_bytes(token) for token in tokens[-_TAIL_TOKENS:])
    return tail.rstrip().endswith(OPEN.encode())
