"""The admin half, built from settings: what the routes under `/admin` are handed.

The composition root makes one per server. Event loop only.
"""

from functools import partial

from api.admin.parts import AdminParts
from api.admin.sessions import Sessions
from billing.accounts import Accounts
from cachesvc.config import Settings
from cachesvc.live import new_token
from cachesvc.snapshot import Sources, snapshot


class Dashboard:
    """The parts of a running server's admin routes."""

    def __init__(self, settings: Settings, *, accounts: Accounts, sources: Sources) -> None:
        admin = settings.admin
        self.parts = AdminParts(
            sessions=Sessions(lifetime_s=admin.session, idle_s=admin.idle),
            keys=accounts,
            operator_token=new_token(),
            record=accounts.record,
            stats=partial(snapshot, sources),
        )
