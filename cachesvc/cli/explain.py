"""`cachesvc explain` and `cachesvc diff`: why a prompt missed, or will; where two prompts part."""

import json as jsons
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote as quoted

import typer

from cachesvc.cli.live_server import running_server
from cachesvc.cli.options import DataDir
from cachesvc.cli.render import AsJson, fail, print_json
from cachesvc.server.server_file import LiveError, LiveServer

Tenant = Annotated[str, typer.Option(help="Whose request it is")]
SHOWN = 40  # characters of each side of a difference


def explain(
    request_id: Annotated[
        str | None, typer.Argument(help="A request's id, as its answer has it")
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--file", "-f", help="Or a request's body, not sent yet")
    ] = None,
    tenant: Tenant = "default",
    data_dir: DataDir = None,
    json: AsJson = False,
) -> None:
    """What of a request's prompt hit, and why the rest missed; or what would hit, and its price."""
    if (request_id is None) == (file is None):
        fail("give the id of a request, or the body of one by --file", 2)
    server = running_server(data_dir)
    try:
        if file is not None:
            body = {"tenant": tenant, "request": _body(file)}
            told = server.post("/admin/api/cache/quote", body)
        else:
            told = server.get(f"/admin/api/requests/{quoted(request_id or '', safe='')}")
    except LiveError as error:
        fail(str(error))
    if json:
        print_json(told)
    elif file is not None:
        typer.echo("\n".join(_quote_lines(told)))
    else:
        typer.echo("\n".join(_request_lines(told)))


def diff(
    a: Annotated[str, typer.Argument(help="A request's body in a file, or a request's id")],
    b: Annotated[str, typer.Argument(help="Another")],
    tenant: Tenant = "default",
    data_dir: DataDir = None,
    json: AsJson = False,
) -> None:
    """The first token at which two prompts part: everything behind it misses."""
    server = running_server(data_dir)
    told = _compared(server, tenant, a, b)
    if json:
        print_json(told)
    else:
        typer.echo("\n".join(_diff_lines(told, a, b)))


def _compared(server: LiveServer, tenant: str, a: str, b: str) -> Any:
    sides = [_body(Path(each)) if Path(each).exists() else each for each in (a, b)]
    try:
        return server.post(
            "/admin/api/cache/diff", {"tenant": tenant, "a": sides[0], "b": sides[1]}
        )
    except LiveError as error:
        fail(str(error))


def _body(file: Path) -> Any:
    try:
        return jsons.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        fail(f"{file} cannot be read as JSON: {error}")


def _quote_lines(told: dict[str, Any]) -> list[str]:
    tiers = told["hit_tokens_by_tier"].items()
    where = ", ".join(f"{tokens} from {tier}" for tier, tokens in tiers if tokens)
    price, took = told["price"], told["ttft_ms"]
    found = f"{told['hit_tokens']} would hit" + (f" ({where})" if where else "")
    card = f"{price['card']} {price['version']}, {price['window']}"
    cost = f"{price['prompt']} {price['currency']} for the prompt, at most {price['at_most']}"
    lines = [
        f"{told['prompt_tokens']} tokens: {found}, {told['miss_tokens']} would be computed",
        f"{cost} with {told['max_output_tokens']} tokens of output ({card})",
    ]
    if took is not None:
        lines.append(f"first token in {took['low']:.0f} to {took['high']:.0f} ms")
    return lines


def _request_lines(told: dict[str, Any]) -> list[str]:
    usage = told["usage"] or {}
    hit = usage.get("prompt_cache_hit_tokens", 0)
    cost = f", {told['cost']} {told['currency']}" if told["cost"] is not None else ""
    lines = [f"{told['id']}: {told['state']}, {told['prompt_tokens']} tokens, {hit} hit{cost}"]
    for prompt in told["prompts"]:
        lines += [
            f"  {run['first_token']:>8} {run['tokens']:>8} tokens  {run['source']}"
            for run in prompt["runs"]
        ]
        lines.append(f"  {prompt['why']['text']}")
    return lines


def _diff_lines(told: dict[str, Any], a: str, b: str) -> list[str]:
    if told["same"]:
        return [f"the same prompt, {told['at_token']} tokens"]
    before = _shown(told["before"])[-SHOWN:]
    one, other = (_shown(side)[:SHOWN] for side in told["after"])
    return [
        f"{told['at_token']} tokens are the same, of {told['tokens'][0]} and {told['tokens'][1]}",
        f"  {before}{one}    {a}",
        f"  {before}{other}    {b}",
        "  " + " " * len(before) + "^",
    ]


def _shown(text: str) -> str:
    """On one line, each character as wide as it looks."""
    return "".join(c if c.isprintable() else {"\n": "⏎", "\t": "⇥"}.get(c, "·") for c in text)
