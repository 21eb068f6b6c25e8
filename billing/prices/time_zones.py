"""Time zones by name, and the one of this machine, for rate cards and reports. Any thread."""

import time
from datetime import UTC, datetime, timedelta, tzinfo
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from billing.errors import InvalidName


def find_zone(name: str) -> ZoneInfo:
    """The zone of an IANA name. Raises `InvalidName`, also for a folder of zones like `Europe`."""
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise InvalidName(
            f"{name!r} is not a time zone; write UTC or a name such as Asia/Shanghai"
        ) from None


def zone_name(zone: tzinfo) -> str:
    """The zone's name in reports."""
    return getattr(zone, "key", None) or str(zone)


class LocalZone(tzinfo):
    """The machine's local time with its clock changes. A fixed offset would be wrong for half the
    year."""

    def utcoffset(self, moment: datetime | None) -> timedelta:
        assert moment is not None
        stamp = time.mktime(moment.replace(tzinfo=None).timetuple())
        return timedelta(seconds=time.localtime(stamp).tm_gmtoff)

    def dst(self, moment: datetime | None) -> None:
        return None

    def tzname(self, moment: datetime | None) -> str:
        return "local"

    def fromutc(self, moment: datetime) -> datetime:
        stamp = moment.replace(tzinfo=UTC).timestamp()
        return moment + timedelta(seconds=time.localtime(stamp).tm_gmtoff)

    def __str__(self) -> str:
        return "local"
