"""`cachesvc conform`: checks from outside that a server's cache never changes an answer."""

from typing import Annotated, Any

import typer

from cachesvc.cli.render import AsJson, fail, print_json, print_table, progress
from cachesvc.conform.question import rounds
from cachesvc.conform.report import faults, summary
from cachesvc.conform.suite import Suite
from cachesvc.conform.target import TargetError, find_target


def conform(
    url: Annotated[str, typer.Argument(help="The server, such as http://HOST:PORT")],
    model: Annotated[str | None, typer.Option(help="The model to ask  [its first]")] = None,
    key: Annotated[str | None, typer.Option(envvar="CACHESVC_KEY", help="API key")] = None,
    cases: Annotated[int, typer.Option(min=1, help="Least number of comparisons")] = 1000,
    block: Annotated[int, typer.Option(min=2, help="Tokens in a block of the server")] = 64,
    longest: Annotated[int, typer.Option(min=8, help="Tokens of the longest shared prompt")] = 520,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer")] = 8,
    clients: Annotated[int, typer.Option(min=1, help="Requests at once, under load")] = 8,
    seed: Annotated[int, typer.Option(help="Seed of the prompts")] = 1,
    text: Annotated[bool, typer.Option("--text", help="Ask by text, not by token ids")] = False,
    bits: Annotated[bool, typer.Option("--bits", help="Compare log-probabilities too")] = False,
    json: AsJson = False,
) -> None:
    """Ask a server the same questions cold and in every way that a cache may serve, and compare.

    Asks cachesvc, vLLM, SGLang or llama-server. Exit code 1 if an answer differs.
    """
    asked = rounds(block=block, max_tokens=max_tokens, seed=seed, longest=longest, as_text=text)
    checks = []
    try:
        target = find_target(url, model=model, key=key)
        with progress("comparing answers", cases) as step:
            for check in Suite(target, asked, clients=clients).run(cases):
                checks.append(check)
                step(1)
    except TargetError as error:
        fail(str(error))
    told = summary(checks)
    wrong = faults(told, bits=bits)
    if json:
        print_json({"server": target.owner, "serves": target.serves, **told, "faults": wrong})
    else:
        _print(told, wrong)
    if wrong:
        raise typer.Exit(1)


def _print(told: dict[str, Any], wrong: list[str]) -> None:
    names = ("kind", "cases", "flips", "moves")
    kinds = {**told["kinds"], "all": told}
    rows = [(kind, *(found[name] for name in names[1:])) for kind, found in kinds.items()]
    print_table(names, rows, right=names[1:])
    for tier, num in told["tiers"].items():
        typer.echo(f"{num:,} prompt tokens from {tier}")
    typer.echo("; ".join(wrong) or "conforms: no answer differs from the cold one")
