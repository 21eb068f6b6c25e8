"""`cachesvc cache pin`: prefixes that are not evicted."""

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from api.format import number_of, seconds
from cachesvc.cli.live_server import running_server
from cachesvc.cli.options import DataDir, duration, existing_data_dir
from cachesvc.cli.render import AsJson, Column, answer, fail, print_documents
from cachesvc.config.places import found_disk
from cachesvc.server.server_file import find_server
from tiers.disk.pin_file import load_pins
from tiers.policy.retention import pin_json

KEY_DIGITS = 16  # of a key in hex, as the table shows it


def pin(
    name: Annotated[
        str | None, typer.Argument(help="The pin's name  [list all pins]", show_default=False)
    ] = None,
    for_s: Annotated[
        float | None,
        typer.Option(
            "--for", parser=duration, metavar="DURATION", help="How long, such as 12h or 7d"
        ),
    ] = None,
    key: Annotated[
        str | None, typer.Option(help="The last block of the prefix, as `tree --json` names it")
    ] = None,
    file: Annotated[
        Path | None, typer.Option(help="Or a file with the text that prompts start with")
    ] = None,
    system: Annotated[
        Path | None, typer.Option(help="Or a file with the system message that chats start with")
    ] = None,
    tenant: Annotated[str | None, typer.Option(help="Tenant of the prompt")] = None,
    group: Annotated[str | None, typer.Option(help="Or its sharing group")] = None,
    model: Annotated[str | None, typer.Option(help="Model  [the default model]")] = None,
    end: Annotated[bool, typer.Option("--end", help="End the pin instead")] = False,
    why: Annotated[str, typer.Option("--reason", help="Reason for the audit trail")] = "",
    data_dir: DataDir = None,
    json: AsJson = False,
) -> None:
    """Pin a prefix so that at least one tier keeps it, even over restarts; or list or end pins."""
    if name is None:
        _list(existing_data_dir(data_dir), json)
        return
    if not why:
        fail("say why with --reason: the admin trail keeps it", 2)
    if end:
        ended = running_server(data_dir).post("/admin/api/cache/unpin", {"name": name, "why": why})
        answer(ended, json, f"{name} is pinned no more")
        return
    if for_s is None:
        fail("say for how long with --for, such as --for 12h", 2)
    if sum(given is not None for given in (key, file, system)) != 1:
        fail("say what to pin by one of --key, --file and --system", 2)
    if key is None and (tenant is None) == (group is None):
        fail("say whose prompt it is: --tenant or --group", 2)
    body: dict[str, Any] = {"name": name, "for_s": for_s, "why": why, "key": key, "model": model}
    body |= {"tenant": tenant, "group": group}
    if file is not None:
        body["prompt"] = _text(file)
    if system is not None:
        body["messages"] = [{"role": "system", "content": _text(system)}]
    made = running_server(data_dir).post("/admin/api/cache/pin", body)
    tokens = number_of(made["num_tokens"], "token")
    blocks = number_of(made["num_blocks"], "block")
    answer(made, json, f"{tokens} ({blocks}) pinned as {name} for {seconds(for_s)}")


def _list(path: Path, json: bool) -> None:
    """The pins in force; without a server, the recorded ones."""
    server = find_server(path)
    if server is not None:
        found = server.get("/admin/api/cache/pins")
    else:
        found = [pin_json(pin) for pin in load_pins(found_disk(path))]
    now_s = time.time()
    columns: dict[str, Column] = {
        "name": "name",
        "tokens": "num_tokens",
        "blocks": "num_blocks",
        "ends in": lambda each: seconds(max(0.0, round(each["until_s"] - now_s))),
        "last block": lambda each: each["key"][:KEY_DIGITS],
        "why": "why",
    }
    print_documents(found, json, columns, right=("tokens", "blocks", "ends in"))


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        fail(f"{file} cannot be read: {error}")
