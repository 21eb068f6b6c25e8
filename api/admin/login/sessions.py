"""Logins: sessions and one-time links. Both end with the server.

A session's id is 256 random bits in a cookie. The server keeps only its digest, so nothing in its
memory opens a session. Ids are made at login and never taken from a request, which
prevents session fixation. Event loop only.
"""

import hashlib
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

TOKEN_BYTES = 32
MAX_SESSIONS = 1000  # a further login ends the least recently used session
MAX_LINKS = 100


class Role(StrEnum):
    """What an admin may do: a reader looks, an admin changes."""

    ADMIN = "admin"
    READER = "reader"


@dataclass(frozen=True, slots=True)
class Admin:
    """The person or program acting; the audit log records `name`.

    `key_id` is the API key that proved it, if any. All logins that follow from it end with the key.
    """

    name: str
    role: Role = Role.ADMIN
    key_id: str = ""


@dataclass(slots=True)
class LoginSession:
    """A login. Every request but GET must carry `csrf_token`."""

    admin: Admin
    ends_s: float
    used_s: float
    csrf_token: str = field(default_factory=lambda: secrets.token_urlsafe(TOKEN_BYTES))


class Sessions:
    """Sessions by the digest of their id. Invariant: at most MAX_SESSIONS, none past its end."""

    def __init__(
        self,
        *,
        lifetime_s: float = 12 * 3600.0,
        idle_s: float = 2 * 3600.0,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.lifetime_s = lifetime_s
        self.idle_s = idle_s
        self._clock_s = clock_s
        # Least recently used first.
        self._sessions: OrderedDict[bytes, LoginSession] = OrderedDict()
        self._links: OrderedDict[bytes, tuple[Admin, float]] = OrderedDict()

    def open(self, admin: Admin) -> tuple[str, LoginSession]:
        """A new session and its id, which only the browser keeps."""
        token = secrets.token_urlsafe(TOKEN_BYTES)
        now = self._clock_s()
        session = LoginSession(admin, now + self.lifetime_s, now)
        self._sessions[_digest(token)] = session
        while len(self._sessions) > MAX_SESSIONS:
            self._sessions.popitem(last=False)
        return token, session

    def find(self, token: str) -> LoginSession | None:
        """The session of a cookie, if it has not ended; marks it as used."""
        digest, now = _digest(token), self._clock_s()
        session = self._sessions.get(digest)
        if session is None:
            return None
        if now >= session.ends_s or now >= session.used_s + self.idle_s:
            del self._sessions[digest]
            return None
        session.used_s = now
        self._sessions.move_to_end(digest)
        return session

    def close(self, token: str) -> None:
        self._sessions.pop(_digest(token), None)

    def __len__(self) -> int:
        return len(self._sessions)

    def make_link(self, admin: Admin, ttl_s: float) -> str:
        """A token that logs in once, within `ttl_s` seconds."""
        token = secrets.token_urlsafe(TOKEN_BYTES)
        self._links[_digest(token)] = admin, self._clock_s() + ttl_s
        while len(self._links) > MAX_LINKS:
            self._links.popitem(last=False)
        return token

    def use_link(self, token: str) -> Admin | None:
        """The admin the link was made for, on its first use and in time; None otherwise."""
        admin, ends_s = self._links.pop(_digest(token), (None, 0.0))
        return admin if self._clock_s() < ends_s else None


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
