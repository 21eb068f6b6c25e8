"""The guards of a login: a limit on attempts, and proof that the form is ours. Event loop only."""

import hmac
import ipaddress
import secrets

from limits import RateLimitItem, RateLimitItemPerMinute
from limits.aio.storage import MemoryStorage
from limits.aio.strategies import MovingWindowRateLimiter

from api.errors import CsrfFailed, RateLimited

PER_ADDRESS = 10  # attempts a minute
PER_SERVER = 60


class LoginLimits:
    """How often one address may try."""

    def __init__(self, per_address: int = PER_ADDRESS) -> None:
        self._limiter = MovingWindowRateLimiter(MemoryStorage())
        self._address: RateLimitItem = RateLimitItemPerMinute(per_address, namespace="login")
        self._server: RateLimitItem = RateLimitItemPerMinute(PER_SERVER, namespace="logins")

    async def attempt(self, address: str) -> None:
        """Counts an attempt. Raises RateLimited."""
        for item, *whose in ((self._address, network_of(address)), (self._server,)):
            if not await self._limiter.hit(item, *whose):
                raise RateLimited(
                    f"More than {item.amount} attempts to log in within a minute; wait a minute.",
                    headers={"Retry-After": "60"},
                )


def network_of(address: str) -> str:
    """The addresses of one client: an IPv4 address, or an IPv6 network of 64 bits."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv4Address):
        return str(parsed)
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.ip_network((parsed, 64), strict=False))


class LoginForms:
    """Proof that a form is this server's: the browser keeps a nonce and the form carries its
    HMAC."""

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)

    def proof(self, nonce: str) -> str:
        return hmac.digest(self._secret, nonce.encode(), "sha256").hex()

    def check(self, nonce: str, proof: str) -> None:
        """Raises CsrfFailed if the proof does not match the nonce."""
        if not nonce or not hmac.compare_digest(self.proof(nonce).encode(), proof.encode()):
            raise CsrfFailed(
                "The login form is old or came from elsewhere, or your browser keeps no cookies: "
                "load the login page again."
            )
