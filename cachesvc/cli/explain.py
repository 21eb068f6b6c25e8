"""`cachesvc explain`: why a prompt missed or will miss."""

import json as jsons
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote as quoted

import typer

from cachesvc.cli.live_server import running_server
from cachesvc.cli.options import DataDir
from cachesvc.cli.render import AsJson, fail, print_json


def explain(
    request: Annotated[
        str, typer.Argument(help="A request's id, from its answer; or a file with its body")
    ],
    tenant: Annotated[str, typer.Option(help="Tenant of the request")] = "default",
    data_dir: DataDir = None,
    json: AsJson = False,
) -> None:
    """Show why a prompt missed, or what an unsent one would hit and cost.

    Everything after the first token that differs misses.
    """
    body, server = _body(request), running_server(data_dir)
    if body is not None:
        payload = server.post("/admin/api/cache/quote", {"tenant": tenant, "request": body})
    else:
        payload = server.get(f"/admin/api/requests/{quoted(request, safe='')}")
    if json:
        print_json(payload)
        return
    typer.echo("\n".join((_request_lines if body is None else _quote_lines)(payload)))


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
    found = f"{payload['hit_tokens']} would hit{f' ({where})' if where else ''}, "
    if not payload["hits_known"]:
        found = "the engine tells what hits with its answer; at most "
    card = f"{price['card']} {price['version']}, {price['window']}"
    cost = f"{price['prompt']} {price['currency']} for the prompt, at most {price['at_most']}"
    return [
        f"{payload['prompt_tokens']} tokens: {found}{payload['miss_tokens']} would be computed",
        f"{cost} with {payload['max_output_tokens']} tokens of output ({card})",
    ]


def _request_lines(payload: dict[str, Any]) -> list[str]:
    usage = payload["usage"] or {}
    hit = usage.get("prompt_cache_hit_tokens", 0)
    cost = f", {payload['cost']} {payload['currency']}" if payload["cost"] is not None else ""
    tokens = "?" if payload["prompt_tokens"] is None else payload["prompt_tokens"]
    state = payload["outcome"] or payload["state"]
    lines = [f"{payload['id']}: {state}, {tokens} tokens, {hit} hit{cost}"]
    if payload["error"] is not None:
        lines.append(f"  {payload['error']['message']}")
    for prompt in payload["prompts"]:
        lines += [
            f"  {run['first_token']:>8} {run['tokens']:>8} tokens  {run['source']}"
            for run in prompt["runs"]
        ]
        lines.append(f"  {prompt['why']['text']}")
    if payload["exactness"] is not None:
        lines.append(f"  {payload['exactness']['text']}")
    return lines
