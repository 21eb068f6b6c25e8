"""The format for a URL: `https://` CloudEvents, `stripe+https://`, `lago+https://`."""

from collections.abc import Mapping
from urllib.parse import parse_qsl, urlsplit

from billing.errors import ExportError
from billing.invoices.parties import parse_parties
from billing.push.cloudevents import CloudEvents
from billing.push.events import Format
from billing.push.lago import LagoEvents
from billing.push.stripe import StripeMeters
from billing.store import invoices as rows
from billing.store.store import LedgerStore

SCHEMES = ("https://", "http://")
KINDS = {"stripe": {"tokens", "amount"}, "lago": {"code"}}  # with the parameters of their URLs


def is_receiver(to: str) -> bool:
    """Whether this names a service rather than a file."""
    return _split(to)[1].startswith(SCHEMES)


def kind_of(to: str) -> str:
    """`stripe`, `lago`, or empty for CloudEvents."""
    return _split(to)[0]


def find_format(to: str, token: str, source: str, store: LedgerStore) -> Format:
    """The format. Raises `ExportError` for a URL with unknown parameters."""
    kind, url = _split(to)
    if not kind:
        return CloudEvents(url, token, source)
    parts = urlsplit(url)
    said = dict(parse_qsl(parts.query, keep_blank_values=True))
    for name in said:
        if name not in KINDS[kind]:
            known = " and ".join(sorted(KINDS[kind]))
            raise ExportError(f"{to} says {name!r}; a {kind} URL says {known}")
    if any(not value for value in said.values()):
        raise ExportError(f"{to} names nothing after a =")
    if not token:
        raise ExportError(f"{kind} needs a key: write it to a file, and give --token-file FILE")
    customers, bare = _customers(store), parts._replace(query="").geturl()
    if kind == "stripe":
        return StripeMeters(bare, token, source, customers, said)
    return LagoEvents(bare, token, source, customers, said.get("code", ""))


def _split(to: str) -> tuple[str, str]:
    kind, plus, rest = to.partition("+")
    return (kind, rest) if plus and kind in KINDS and rest.startswith(SCHEMES) else ("", to)


def _customers(store: LedgerStore) -> Mapping[str, str]:
    """The services' ids of tenants: `external_id` of the invoices' buyers."""
    with store.reading() as connection:
        applied = rows.parties_rows(connection)
    buyers = parse_parties(applied[-1]["text"]).buyers if applied else {}
    return {name: buyer.external_id for name, buyer in buyers.items() if buyer.external_id}
