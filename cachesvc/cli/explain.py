"""`cachesvc explain`: why a prompt missed or will miss, and where two prompts diverge."""

import json as jsons
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote as quoted

import typer

from cachesvc.cli.live_server import running_server
from cachesvc.cli.options import DataDir
from cachesvc.cli.render import AsJson, fail, print_json
from cachesvc.server.server_file import LiveServer

Tenant = Annotated[str, typer.Option(help="Tenant of the request")]
SHOWN = 40  # characters of each side of a difference


def explain(
    request: Annotated[
        str, typer.Argument(help="A request's id, from its answer; or a file with its body")
    ],
    other: Annotated[
        str | None,
        typer.Argument(help="Another request: show the token at which the two prompts diverge"),
    ] = None,
    tenant: Tenant = "default",
    data_dir: DataDir = None,
    json: AsJson = False,
) -> None:
    """Show why a prompt missed, what an unsent one would hit and cost, or where two diverge.

    Everything after the first token that differs misses.
    """
    bodies = [_body(each) for each in (request, other) if each is not None]
    server = running_server(data_dir)
    payload, lines = _explained(server, tenant, request, other, bodies)
    print_json(payload) if json else typer.echo("\n".join(lines()))


def _explained(
    server: LiveServer, tenant: str, request: str, other: str | None, bodies: list[Any]
) -> tuple[Any, Callable[[], list[str]]]:
    """The server's answer, and the function that renders it. A body is None for a request's id."""
    if other is not None:
        a, b = (body or name for body, name in zip(bodies, (request, other), strict=True))
        payload = server.post("/admin/api/cache/diff", {"tenant": tenant, "a": a, "b": b})
        return payload, partial(_diff_lines, payload, request, other)
    if bodies[0] is not None:
        payload = server.post("/admin/api/cache/quote", {"tenant": tenant, "request": bodies[0]})
        return payload, partial(_quote_lines, payload)
    payload = server.get(f"/admin/api/requests/{quoted(request, safe='')}")
    return payload, partial(_request_lines, payload)


def _body(name: str) -> Any:
    """The request in the file of this name, or None for an id: there is no such file."""
    file = Path(name)
    if not file.exists():
        if "/" in name or file.suffix == ".json":  # in no id
            fail(f"there is no file {name}")
        return None
    try:
        return jsons.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        fail(f"{file} cannot be read as JSON: {error}")


def _quote_lines(payload: dict[str, Any]) -> list[str]:
    tiers = payload["hit_tokens_by_tier"].items()
    where = ", ".join(f"{tokens} from {tier}" for tier, tokens in tiers if tokens)
    price = payload["price"]
    found = f"{payload['hit_tokens']} would hit" + (f" ({where})" if where else "")
    card = f"{price['card']} {price['version']}, {price['window']}"
    cost = f"{price['prompt']} {price['currency']} for the prompt, at most {price['at_most']}"
    return [
        f"{payload['prompt_tokens']} tokens: {found}, {payload['miss_tokens']} would be computed",
        f"{cost} with {payload['max_output_tokens']} tokens of output ({card})",
    ]


def _request_lines(payload: dict[str, Any]) -> list[str]:
    usage = payload["usage"] or {}
    hit = usage.get("prompt_cache_hit_tokens", 0)
    cost = f", {payload['cost']} {payload['currency']}" if payload["cost"] is not None else ""
    lines = [
        f"{payload['id']}: {payload['state']}, {payload['prompt_tokens']} tokens, {hit} hit{cost}"
    ]
    for prompt in payload["prompts"]:
        lines += [
            f"  {run['first_token']:>8} {run['tokens']:>8} tokens  {run['source']}"
            for run in prompt["runs"]
        ]
        lines.append(f"  {prompt['why']['text']}")
    if payload["exactness"] is not None:
        lines.append(f"  {payload['exactness']['text']}")
    return lines


def _diff_lines(payload: dict[str, Any], a: str, b: str) -> list[str]:
    if payload["same"]:
        return [f"the same prompt, {payload['at_token']} tokens"]
    before = _shown(payload["before"])[-SHOWN:]
    one, other = (_shown(side)[:SHOWN] for side in payload["after"])
    first, second = payload["tokens"]
    return [
        f"{payload['at_token']} tokens are the same, of {first} and {second}",
        f"  {before}{one}    {a}",
        f"  {before}{other}    {b}",
        "  " + " " * len(before) + "^",
    ]


def _shown(text: str) -> str:
    """The text on one line, with control characters made visible."""
    return "".join(c if c.isprintable() else {"\n": "⏎", "\t": "⇥"}.get(c, "·") for c in text)
