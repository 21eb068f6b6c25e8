"""Admin parts over fakes, for tests of the pages and routes."""

import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import httpx

from api.access.rate_limits import LimitSettings
from api.admin.login.sessions import Sessions
from api.admin.parts import AdminParts
from api.app import create_app
from api.journal.journal import Journal
from billing.errors import UnknownKey
from billing.keys import Principal, Scope
from billing.prices.book import PriceBook
from tests.support.wire import FakeHouse, fake_house

OPERATOR_TOKEN = "op-of-the-tests"

NO_BOOKS = SimpleNamespace(
    accounts=SimpleNamespace(book=PriceBook(), refresh=int, find_tenant=Principal)
)  # every tenant exists


@dataclass(slots=True)
class RecordingTrail:
    """An audit log in memory."""

    entries: list[dict[str, Any]] = field(default_factory=list)

    def __call__(
        self, action: str, subject: str, *, by: str, after: Any = None, reason: str = ""
    ) -> None:
        entry = {"action": action, "subject": subject, "by": by, "after": after}
        self.entries.append(entry | {"reason": reason})

    @property
    def actions(self) -> list[tuple[str, str]]:
        """Action and actor of each entry, oldest first."""
        return [(entry["action"], entry["by"]) for entry in self.entries]


@dataclass(frozen=True, slots=True)
class FixedKeys:
    """A key ring of given keys."""

    scopes: Mapping[str, frozenset[Scope]]
    revoked: set[str] = field(default_factory=set)

    def is_live(self, key_id: str) -> bool:
        return key_id not in self.revoked

    def authenticate(self, key: str) -> Principal:
        if key not in self.scopes:
            raise UnknownKey("no such API key")
        name = "" if key == "sk-admin" else "ada"
        return Principal("acme", key_id=f"id-of-{key}", scopes=self.scopes[key], key_name=name)


@dataclass(slots=True)
class FlatHistory:
    """Three samples, always the same."""

    asked: list[Sequence[str]] = field(default_factory=list)

    def read(
        self, series: Sequence[str], *, window_s: float, since_s: float = 0.0
    ) -> Mapping[str, Any]:
        self.asked.append(series)
        return {"step_s": 1.0, "times": [1, 2, 3], "series": {name: [0, 1, 2] for name in series}}

    def over(self, series: Sequence[str], *, window_s: float) -> Mapping[str, float | None]:
        return dict.fromkeys(series, 2.0)


async def _nothing(*_: Any) -> list[Any]:
    return []


async def _nothing_fires() -> list[dict[str, str]]:
    return []


def fake_parts(**overrides: Any) -> AdminParts:
    """Parts over fakes; pass the ones under test. Nothing is cached, on accounts or firing."""
    scopes = {"admin": Scope.ADMIN, "ada": Scope.ADMIN, "read": Scope.READ, "plain": Scope.USAGE}
    keys = {f"sk-{name}": frozenset({scope}) for name, scope in scopes.items()}
    values: dict[str, Any] = {
        "sessions": Sessions(),
        "keys": FixedKeys(keys),
        "operator_token": OPERATOR_TOKEN,
        "record": RecordingTrail(),
        "stats": lambda: {"time_s": 0.0, "engine": {"engines": ()}},
        "history": FlatHistory(),
        "journal": Journal(),
        "limits": LimitSettings(),
        "currencies": lambda: ["CNY"],
        "alerts": _nothing_fires,
        "decode": str,
        "outline": lambda tokens: [],
        "books": NO_BOOKS,
        "explorer": SimpleNamespace(forget_disk=tuple, room=_nothing),
        "cache": SimpleNamespace(pins=_nothing),
        "blocks": _nothing,
    }
    return AdminParts(**values | overrides)


@contextlib.asynccontextmanager
async def admin_client(
    parts: AdminParts, house: FakeHouse | None = None, *, path: str = "", **headers: str
) -> AsyncIterator[httpx.AsyncClient]:
    """A client of an app with these parts; over `house`, which its caller closes, or one of its
    own. A relative address is below `path`."""
    own = house or fake_house()
    app = create_app(own.wire, admin=parts)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    try:
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(
                transport=transport, base_url=f"http://test:8000{path}", headers=headers
            ) as client,
        ):
            yield client
    finally:
        if house is None:
            own.close()


def error_of(answer: httpx.Response) -> tuple[int, str]:
    """Its status, and the code of its error."""
    return answer.status_code, answer.json()["error"]["code"]


def called(function: Callable[[Any], Any], cache: Any) -> "Future[Any]":
    """What `function` returns or raises, as `Engine.call` gives it."""
    future: Future[Any] = Future()
    try:
        future.set_result(function(cache))
    except Exception as error:  # noqa: BLE001  as the engine hands it on
        future.set_exception(error)
    return future
