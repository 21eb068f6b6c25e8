"""What can go wrong in billing. `api.errors` maps each to a status; the CLI prints its message.

BillingError
├── InvalidAmount, InvalidUsage, InvalidSpan
├── PriceError: NoPrice, UnknownCard, CardConflict
├── AccountError: InvalidName, UnknownTenant, UnknownBudget, InvalidLimit, AlreadyExists,
│       UnknownKey, KeyExpired, KeyRevoked, TenantSuspended, CurrencyMismatch
├── GateError: InsufficientBalance (402), SpendLimitReached (429), DuplicateRequest, UnknownHold,
│       UnknownDeposit, UnknownRequest
├── IdempotencyConflict (409), IdempotencyBusy (409, retry)
├── LedgerUnavailable (503, the gate fails closed): ClockJumped, Unwritable
├── LedgerClosed, StoreError, ReceiptKeyError
└── ExportError: ReceiverError
"""

from dataclasses import dataclass


class BillingError(Exception):
    """Any failure of billing that a caller can act on."""


class InvalidAmount(BillingError):
    """The amount is not a decimal number with at most twelve places."""


class InvalidUsage(BillingError):
    """Token counts that cannot be: negative, not whole, or not adding up to the prompt."""


class InvalidSpan(BillingError):
    """The day or range of days is not valid; the message says how to write one."""


class PriceError(BillingError):
    """The rate card cannot be read or used; the message names the file and the field."""


class NoPrice(PriceError):
    """No rate card covers this model at this instant in this currency."""


class UnknownCard(PriceError):
    """No rate card with this name and version was applied, and none is included."""


class CardConflict(PriceError):
    """An applied card never changes, and versions must be applied in order."""


class AccountError(BillingError):
    """A tenant, project or key is not as the operation needs it."""


class InvalidName(AccountError):
    """The name has characters that files, URLs or logs do not allow."""


class UnknownTenant(AccountError):
    """No tenant of that name."""


class UnknownBudget(AccountError):
    """No budget of that name."""


class InvalidLimit(AccountError):
    """A limit has an unknown name, or its value is not a whole number in range."""


class AlreadyExists(AccountError):
    """A tenant, project or reference with that name exists already."""


class UnknownKey(AccountError):
    """No API key has this secret or id."""


class KeyExpired(AccountError):
    """The API key has expired."""


class KeyRevoked(AccountError):
    """The API key was revoked."""


class TenantSuspended(AccountError):
    """An administrator suspended the tenant."""


class CurrencyMismatch(AccountError):
    """The price and the tenant's account have different currencies."""


class GateError(BillingError):
    """The gate did not let a request begin or go on."""


class InsufficientBalance(GateError):
    """The available money does not cover the hold."""

    def __init__(
        self, message: str, *, tenant: str, needed: int, available: int, currency: str
    ) -> None:
        super().__init__(message)
        self.tenant, self.needed, self.available = tenant, needed, available
        self.currency = currency


@dataclass(eq=False, kw_only=True)
class SpendLimitReached(GateError):
    """The hold, with what is spent and held, exceeds a hard limit. Amounts are in units."""

    message: str
    limit: str
    of: str
    value: str
    per: str
    amount: int
    spent: int
    held: int
    needed: int
    currency: str
    ends_ns: int

    def __str__(self) -> str:
        return self.message

    @property
    def passes(self) -> bool:
        """Whether the hold may fit once running requests have ended."""
        return self.spent + self.needed <= self.amount


class DuplicateRequest(GateError):
    """A hold or a charge with this request id exists already."""


class UnknownHold(GateError):
    """The hold was settled, or its lease ended."""


class UnknownDeposit(GateError):
    """The tenant has no top-up and no grant with this reference."""


class UnknownRequest(GateError):
    """The tenant was never charged for a request with this id."""


class IdempotencyConflict(BillingError):
    """The idempotency key was used with another body."""


class IdempotencyBusy(BillingError):
    """The first request of this idempotency key has not finished."""


class LedgerUnavailable(BillingError):
    """The ledger cannot be read or written now; nothing was charged or held."""


class Unwritable(LedgerUnavailable):
    """The database refuses the rows of one command; the rest of its batch is applied."""


class ClockJumped(LedgerUnavailable):
    """The host's clock jumped, so entries booked now might be dated on another day."""


class LedgerClosed(BillingError):
    """The ledger is not running."""


class ReceiptKeyError(BillingError):
    """The key file does not contain a key that can sign receipts."""


class ExportError(BillingError):
    """An export's file cannot be written, or another export is writing it."""


class ReceiverError(ExportError):
    """An external receiver did not accept what it was sent; the message says what it answered."""


class StoreError(BillingError):
    """The database cannot be opened or is of another version; the message says what to do."""
