"""What fires: by Prometheus, where `server.prometheus_url` is set, and by what the server knows.

For the dashboard and `/admin/api/alerts`. Event loop only.
"""

import asyncio
import json
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from api.collaborators import Readiness
from billing.errors import ReceiverError
from billing.outgoing import send

GROUPS = "cachesvc-"  # how the names of our groups of rules begin
TIMEOUT_S = 5.0
MOST_BYTES = 4 << 20

Alert = Mapping[str, str]  # alert, severity, summary, runbook


class Alerts:
    """What fires now; the most urgent first."""

    def __init__(
        self,
        prometheus_url: str,
        readiness: Callable[[], Readiness],
        violations: Callable[[], Mapping[str, int]],
    ) -> None:
        self._url = prometheus_url.rstrip("/")
        self._readiness = readiness
        self._violations = violations

    async def firing(self) -> list[Alert]:
        """What Prometheus fires, if it is asked, and what this server knows."""
        found = list(self._own())
        if self._url:
            found += await asyncio.to_thread(self._of_prometheus)
        return sorted(found, key=lambda each: each["severity"] != "page")

    def _own(self) -> Iterator[Alert]:
        readiness = self._readiness()
        if not readiness.ready:
            yield _alert("NotReady", "page", readiness.reason, "")
        for said in readiness.detail.get("degraded", ()):
            yield _alert("Degraded", "ticket", said, "ops/runbooks/tier-faults.md")
        for name, num in self._violations().items():
            if num:
                summary = f"The invariant {name} was broken {num} times since the start"
                yield _alert("InvariantBroken", "page", summary, "ops/runbooks/invariant-broken.md")

    def _of_prometheus(self) -> list[Alert]:
        request = urllib.request.Request(f"{self._url}/api/v1/rules?type=alert")  # noqa: S310
        try:
            answer = send(request, timeout_s=TIMEOUT_S, most_bytes=MOST_BYTES)
            return list(_firing(json.loads(answer)))
        except (ReceiverError, ValueError, KeyError, TypeError) as error:
            summary = f"{self._url} does not say what fires: {str(error) or type(error).__name__}"
            return [_alert("PrometheusSilent", "ticket", summary, "")]


def _firing(answer: Any) -> Iterator[Alert]:
    for group in answer["data"]["groups"]:
        for rule in group["rules"] if group["name"].startswith(GROUPS) else ():
            for each in rule["alerts"]:
                if each["state"] == "firing":
                    notes, labels = each["annotations"], each["labels"]
                    severity = labels.get("severity", "")
                    summary = notes.get("summary", "")
                    yield _alert(rule["name"], severity, summary, notes.get("runbook", ""))


def _alert(name: str, severity: str, summary: str, runbook: str) -> Alert:
    return {"alert": name, "severity": severity, "summary": summary, "runbook": runbook}
