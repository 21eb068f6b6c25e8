"""Tenants, projects and API keys, and the price book; every change leaves a trail entry.

Called by api (authentication and admin routes) and the CLI, on any thread. `authenticate` works
from memory: all keys are held by digest and reloaded when another process has changed them. Admin
writes are rare single transactions and may block.
"""

import secrets
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from billing.errors import (
    AlreadyExists,
    CardConflict,
    InvalidAmount,
    InvalidLimit,
    KeyExpired,
    KeyRevoked,
    UnknownKey,
    UnknownTenant,
)
from billing.keys import (
    DEFAULT_SCOPES,
    SHOWN,
    KeyInfo,
    Principal,
    Scope,
    format_scopes,
    key_digest,
    key_of,
    new_key,
    parse_scopes,
)
from billing.money import check_currency, format_units
from billing.names import check_name, check_text
from billing.prices.book import PriceBook, RateCard
from billing.prices.cards import applied_card, card_digest, default_card
from billing.store import accounts as rows
from billing.store import reports as store_reports
from billing.store.admin_trail import AdminTrail
from billing.store.store import Connection, LedgerStore
from billing.tenants import MAX_RATE_LIMIT, RATE_LIMITS, Tenant, tenant_of

OPEN_TENANT = "default"  # the tenant of all requests while no key exists
REFRESH_S = 0.5  # delay until a change by another process is seen
MISS_REFRESH_S = 0.05  # minimum interval between reloads for unknown keys


@dataclass(frozen=True, slots=True)
class _Known:
    principal: Principal
    expires_ns: int | None
    revoked_ns: int | None

    def has_expired(self, now_ns: int) -> bool:
        return self.expires_ns is not None and self.expires_ns <= now_ns


@dataclass(frozen=True, slots=True)
class _Snapshot:
    version: int
    keys: dict[bytes, _Known]
    book: PriceBook
    rate_limits: Mapping[str, Mapping[str, int]]  # by tenant and name


class Accounts:
    """Reads and changes of accounts on one store. Thread-safe."""

    def __init__(self, store: LedgerStore, *, clock_ns: Callable[[], int] = time.time_ns) -> None:
        self.store = store
        self.trail = AdminTrail(store, clock_ns)
        self._clock_ns = clock_ns
        self._secret = rows.key_secret(store)
        self._lock = threading.Lock()
        self._looked_s = time.monotonic()
        self._snapshot = self._read()

    # -- who is it ---------------------------------------------------------------------------------

    def authenticate(self, key: str) -> Principal:
        """The owner of a key. Raises `UnknownKey`, `KeyExpired` or `KeyRevoked`."""
        digest = key_digest(self._secret, key)
        known = self._snapshot.keys.get(digest)
        self.refresh(MISS_REFRESH_S if known is None else REFRESH_S)
        known = self._snapshot.keys.get(digest, known)
        if known is None:
            raise UnknownKey("no such API key: copy it whole, or ask the operator for one")
        if known.revoked_ns is not None:
            raise KeyRevoked("this API key was revoked; ask the operator for another")
        if known.has_expired(self._clock_ns()):
            raise KeyExpired("this API key has expired; ask the operator for another")
        return known.principal

    @property
    def is_fresh(self) -> bool:
        """Whether the store was read recently enough to answer from memory."""
        return time.monotonic() - self._looked_s < REFRESH_S

    def recall(self, key: str) -> Principal | None:
        """The owner of a key, from memory alone; None if `authenticate` must read the store."""
        known = self._snapshot.keys.get(key_digest(self._secret, key))
        if known is None or known.revoked_ns is not None or known.has_expired(self._clock_ns()):
            return None
        return known.principal

    def is_live(self, key_id: str) -> bool:
        """Whether a session opened by a key may continue: the key is neither revoked nor
        expired."""
        self.refresh(REFRESH_S)
        known = (each for each in self._snapshot.keys.values() if not each.revoked_ns)
        found = (each for each in known if each.principal.key_id == key_id)
        return not all(each.has_expired(self._clock_ns()) for each in found)

    @property
    def requires_keys(self) -> bool:
        """Whether any key was ever created. From then on every request needs one."""
        self.refresh(REFRESH_S)
        return bool(self._snapshot.keys)

    @property
    def version(self) -> int:
        """A number that grows with every change of tenants, keys or cards seen by the last read."""
        return self._snapshot.version

    @property
    def book(self) -> PriceBook:
        """All applied cards, as of the last read."""
        return self._snapshot.book

    def refresh(self, older_than_s: float = 0) -> None:
        """Reads the store again if the last read is older than `older_than_s`."""
        now = time.monotonic()
        if now - self._looked_s < older_than_s:
            return
        with self._lock:
            self._looked_s = now
            with self.store.reading() as connection:
                changed = rows.version(connection) != self._snapshot.version
            if changed:
                self._snapshot = self._read()

    def _read(self) -> _Snapshot:
        with self.store.reading() as connection:
            version = rows.version(connection)
            found = rows.live_keys(connection)
            cards = [applied_card(row) for row in rows.card_rows(connection)]
            rate_limits = rows.rate_limits_of(connection)
        known = {
            row.digest: _Known(
                Principal(
                    row.tenant,
                    row.project,
                    row.key_id,
                    parse_scopes(row.scopes),
                    row.currency,
                    row.name,
                ),
                row.expires_ns,
                row.revoked_ns,
            )
            for row in found
        }
        return _Snapshot(version, known, PriceBook(tuple(cards)), rate_limits)

    # -- open mode ---------------------------------------------------------------------------------

    def prepare(self, card: RateCard) -> None:
        """Ensures that a rate card and the open tenant exist, before a server's first request.

        `card` is applied if none ever was.
        """
        if not self.book.cards:
            with suppress(CardConflict):  # another server was first
                self.apply_card(card, by="server", reason="first start")
        if self.find_tenant(OPEN_TENANT) is None:
            currency = self.book.cards[-1].currency
            with suppress(AlreadyExists):
                self.create_tenant(
                    OPEN_TENANT, currency, credit_limit=None, by="server", reason="open mode"
                )

    def open_principal(self) -> Principal:
        """The principal of all requests on a server without keys."""
        tenant = self.tenant(OPEN_TENANT)
        return Principal(OPEN_TENANT, scopes=frozenset(Scope), currency=tenant.currency)

    def currencies(self, tenant: str = "") -> list[str]:
        """Those of the cards that price a tenant's requests now or later, the newest first; before
        any card, that of the built-in one."""
        cards, now_ns = self.book.cards or (default_card(),), self._clock_ns()
        found = (
            card.currency
            for card in reversed(cards)
            if (not card.tenants or tenant in card.tenants)
            and (card.valid_until_ns is None or card.valid_until_ns > now_ns)
        )
        return list(dict.fromkeys(found))

    # -- tenants -----------------------------------------------------------------------------------

    def create_tenant(
        self,
        tenant: str,
        currency: str,
        *,
        credit_limit: int | None = 0,
        by: str,
        reason: str = "",
    ) -> Tenant:
        """A new tenant: prepaid (limit 0), postpaid up to a limit, or unlimited (None)."""
        check_name(tenant, "tenant")
        check_currency(currency)
        _check_limit(credit_limit)

        def write(connection: Connection) -> None:
            now_ns = self._clock_ns()
            if not rows.insert_tenant(connection, tenant, currency, credit_limit, now_ns):
                raise AlreadyExists(f"tenant {tenant!r} exists already")
            after: dict[str, Any] = {"currency": currency, "credit_limit": _text(credit_limit)}
            after["created_ns"] = now_ns
            self.trail.add(connection, by, "tenant.create", tenant, None, after, reason)

        self._change(write)
        return self.tenant(tenant)

    def set_credit_limit(
        self, tenant: str, credit_limit: int | None, *, by: str, reason: str = ""
    ) -> Tenant:
        """Makes a tenant prepaid (0), postpaid up to a limit, or unlimited (None)."""
        _check_limit(credit_limit)
        return self._alter(tenant, by, reason, "tenant.limit", credit_limit=credit_limit)

    def set_currency(self, tenant: str, currency: str, *, by: str, reason: str = "") -> Tenant:
        """Charges a tenant in another currency, while nothing is booked or held. Its credit limit
        keeps its number."""
        check_currency(currency)
        return self._alter(tenant, by, reason, "tenant.currency", currency=currency)

    def set_suspended(self, tenant: str, suspended: bool, *, by: str, reason: str = "") -> Tenant:
        """Stops or allows new requests of a tenant. Running ones finish."""
        return self._alter(tenant, by, reason, "tenant.suspend", suspended=suspended)

    def rate_limits(self, tenant: str) -> Mapping[str, int]:
        """The limits that admins set for a tenant, by name, as of the last read; 0 is no limit."""
        return self._snapshot.rate_limits.get(tenant, {})

    def set_rate_limits(
        self, tenant: str, limits: Mapping[str, int | None], *, by: str, reason: str = ""
    ) -> Mapping[str, int]:
        """Changes the named limits: 0 is no limit, None returns to the settings' limit."""
        for name, value in limits.items():
            _check_rate_limit(name, value)
        self.tenant(tenant)

        def write(connection: Connection) -> None:
            before = rows.rate_limits_of(connection, tenant).get(tenant, {})
            wanted = {**before, **limits}
            after = {name: value for name, value in wanted.items() if value is not None}
            rows.replace_rate_limits(connection, tenant, after)
            self.trail.add(connection, by, "tenant.rates", tenant, before, after, reason)

        self._change(write)
        return self.rate_limits(tenant)

    def _alter(self, tenant: str, by: str, reason: str, action: str, **values: Any) -> Tenant:
        def write(connection: Connection) -> None:
            row = rows.tenant_row(connection, tenant, lock=True)
            if row is None:
                raise _unknown(tenant)
            if "currency" in values and (row["seq"] or row["held"]):
                raise AlreadyExists(
                    f"the ledger of {tenant!r} has entries in {row['currency']}, and entries never "
                    f"change; create another tenant for {values['currency']}"
                )
            rows.change_tenant(connection, tenant, **values)
            before = {name: _text(row[name]) for name in values}
            after = {name: _text(value) for name, value in values.items()}
            self.trail.add(connection, by, action, tenant, before, after, reason)

        self._change(write)
        return self.tenant(tenant)

    def tenant(self, tenant: str) -> Tenant:
        """Raises `UnknownTenant`."""
        found = self.find_tenant(tenant)
        if found is None:
            raise _unknown(tenant)
        return found

    def find_tenant(self, tenant: str) -> Tenant | None:
        with self.store.reading() as connection:
            row = rows.tenant_row(connection, tenant)
        return None if row is None else tenant_of(row)

    def expect(self, tenant: str | None) -> None:
        """Raises `UnknownTenant` for a tenant that does not exist; None means all tenants."""
        if tenant is not None:
            self.tenant(tenant)

    def tenants(self) -> list[Tenant]:
        with self.store.reading() as connection:
            return [tenant_of(row) for row in rows.tenant_rows(connection)]

    def create_project(self, tenant: str, project: str, *, by: str, reason: str = "") -> None:
        """A new project of a tenant, to split its usage by."""
        check_name(project, "project")
        self.tenant(tenant)

        def write(connection: Connection) -> None:
            if not rows.insert_project(connection, tenant, project, self._clock_ns()):
                raise AlreadyExists(f"tenant {tenant!r} has a project {project!r} already")
            subject = f"{tenant}/{project}"
            self.trail.add(connection, by, "project.create", subject, None, {}, reason)

        self._change(write)

    def projects(self, tenant: str) -> list[str]:
        with self.store.reading() as connection:
            return rows.project_names(connection, tenant)

    # -- keys --------------------------------------------------------------------------------------

    def create_key(
        self,
        tenant: str,
        *,
        by: str,
        project: str = "",
        name: str = "",
        scopes: frozenset[Scope] = DEFAULT_SCOPES,
        expires_ns: int | None = None,
        reason: str = "",
    ) -> tuple[str, KeyInfo]:
        """A new key and its description. The key itself is not stored and cannot be shown again."""
        self.tenant(tenant)
        check_text(name, "name of the key")
        if project and project not in self.projects(tenant):
            raise UnknownTenant(f"tenant {tenant!r} has no project {project!r}; create it first")
        key = new_key()
        values: dict[str, Any] = {
            "key_id": "key_" + secrets.token_hex(6),
            "tenant": tenant,
            "project": project,
            "name": name,
            "prefix": key[:SHOWN],
            "scopes": format_scopes(scopes),
            "created_ns": self._clock_ns(),
            "expires_ns": expires_ns,
            "revoked_ns": None,
        }

        def write(connection: Connection) -> None:
            rows.insert_key(connection, values | {"digest": key_digest(self._secret, key)})
            self.trail.add(connection, by, "key.create", values["key_id"], None, values, reason)

        self._change(write)
        return key, key_of(values)

    def keys(self, tenant: str | None = None) -> list[KeyInfo]:
        with self.store.reading() as connection:
            return [key_of(row) for row in rows.key_rows(connection, tenant)]

    def revoke_key(self, key_id: str, *, by: str, reason: str = "") -> KeyInfo:
        """Revokes a key at once, by its id or its prefix. Revoking twice changes nothing."""
        matches = [key for key in self.keys() if key_id in (key.key_id, key.prefix)]
        if len(matches) != 1:
            raise UnknownKey(f"no API key has the id or prefix {key_id!r}")
        if (found := matches[0]).revoked_ns is not None:
            return found
        now_ns = self._clock_ns()

        def write(connection: Connection) -> None:
            rows.revoke_key(connection, found.key_id, now_ns)
            before, after = {"revoked_ns": None}, {"revoked_ns": now_ns}
            self.trail.add(connection, by, "key.revoke", found.key_id, before, after, reason)

        self._change(write)
        return next(key for key in self.keys(found.tenant) if key.key_id == found.key_id)

    # -- prices ------------------------------------------------------------------------------------

    def apply_card(self, card: RateCard, *, by: str, reason: str = "") -> bool:
        """Adds a card to the book permanently. Returns False if the identical card was added
        before.

        Raises `CardConflict`. Lint the card first (`billing.prices.lint`).
        """
        is_new = True

        def write(connection: Connection) -> None:
            nonlocal is_new
            book = PriceBook(tuple(map(applied_card, rows.card_rows(connection))))
            is_new = book.with_card(card) is not book
            if not is_new:
                return
            values = {
                "name": card.name,
                "version": card.version,
                "valid_from_ns": card.valid_from_ns,
                "applied_ns": max(self._clock_ns(), store_reports.newest_ns(connection)),
                "digest": card_digest(card),
            }
            rows.insert_card(connection, values | {"text": card.text})
            subject = f"{card.name} {card.version}"
            self.trail.add(connection, by, "prices.apply", subject, None, values, reason)

        self._change(write)
        return is_new

    def _change(self, write: Callable[[Connection], None]) -> None:
        def operation(connection: Connection) -> None:
            rows.bump_version(self.store, connection)
            write(connection)

        self.store.retrying(operation)
        self.refresh()


def _check_limit(credit_limit: int | None) -> None:
    if credit_limit is not None and credit_limit < 0:
        raise InvalidAmount(
            f"a credit limit of {format_units(credit_limit)} is below zero; 0 is prepaid"
        )


def _check_rate_limit(name: str, value: int | None) -> None:
    if name not in RATE_LIMITS:
        raise InvalidLimit(f"there is no limit {name!r}; there are {', '.join(RATE_LIMITS)}")
    if value is not None and not 0 <= value <= MAX_RATE_LIMIT:
        raise InvalidLimit(f"{name} is 0, for no limit, to {MAX_RATE_LIMIT:,}; it was {value:,}")


def _unknown(tenant: str) -> UnknownTenant:
    return UnknownTenant(
        f"tenant {tenant!r} does not exist; create it with `cachesvc tenants create {tenant}`"
    )


def _text(value: object) -> str | None:
    return None if value is None else str(value)
