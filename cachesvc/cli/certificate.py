"""Checks a certificate of exactness for `cachesvc conform --check`, as a customer does."""

import json as jsonlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer

from billing.reports.published import published_keys
from cachesvc.cli.options import existing_data_dir
from cachesvc.cli.render import fail, note
from cachesvc.conform.target import TargetError, find_target, receipt_keys
from cachesvc.server.certificate import differences, is_genuine

_FORGED = "NOT genuine: the certificate was changed, or another key signed it"


def check_certificate(
    path: Path, *, url: str | None, key: str | None, public_key: str | None, data_dir: Path | None
) -> None:
    """Says what a certificate certifies. Exits with 1 if it is not genuine or, with the URL of a
    server, if something else serves there."""
    certificate = _read(path)
    try:
        if not is_genuine(certificate, _keys(certificate, url, key, public_key, data_dir)):
            fail(_FORGED)
        _say(certificate)
        if url is not None:
            _compare(certificate, url, key)
    except TargetError as error:
        fail(str(error))


def _read(path: Path) -> dict[str, Any]:
    try:
        document = jsonlib.loads(path.read_text())
    except (OSError, ValueError) as error:
        fail(f"{path} is not a certificate: {error}")
    if not isinstance(document, dict) or not isinstance(document.get("serves"), dict):
        fail(f"{path} is not a certificate, which is a JSON object with `serves`")
    return document


def _keys(
    certificate: Mapping[str, Any],
    url: str | None,
    key: str | None,
    public_key: str | None,
    data_dir: Path | None,
) -> Mapping[str, str]:
    """The public keys to trust: the one given, the server's, or the data directory's."""
    name = str(certificate.get("key_id"))
    if public_key is not None:
        keys: Mapping[str, str] = {name: public_key}
    elif url is not None:
        keys = receipt_keys(url, key)
    else:
        keys = published_keys(existing_data_dir(data_dir))
    if name not in keys:
        fail(f"key {name} never signed here; give the published key as --public-key")
    return keys


def _say(certificate: Mapping[str, Any]) -> None:
    note(f"genuine: signed with key {certificate['key_id']}")
    for name, value in certificate["serves"].items():
        typer.echo(f"{name}: {value}")
    typer.echo(f"{certificate['flips']} flips of {certificate['cases']:,} cases")
    typer.echo(f"{certificate['moves']:,} moved, largest move {certificate['largest_move']}")
    typer.echo(f"made at {certificate['made_at']}")


def _compare(certificate: Mapping[str, Any], url: str, key: str | None) -> None:
    model = str(certificate["serves"].get("model"))
    serves = find_target(url, model=model, key=key, cold=None).serves
    if serves is None:
        fail(f"{url} does not say what it serves as {model}")
    parts = differences(certificate["serves"], serves)
    if parts:
        fail(f"NOT for what {url} serves: {'; '.join(parts)}")
    note(f"{url} serves what is certified")
