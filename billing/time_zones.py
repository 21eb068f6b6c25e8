"""Finds time zones by name, for rate cards and reports. Pure."""

from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from billing.errors import InvalidName


def find_zone(name: str) -> ZoneInfo:
    """The zone of an IANA name. Raises `InvalidName`, also for a folder of zones like `Europe`."""
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise InvalidName(
            f"{name!r} is no time zone; write UTC or a name such as Asia/Shanghai"
        ) from None
