"""Batches of CloudEvents 1.0 over HTTP, as for OpenMeter: every entry, including deposits."""

from collections.abc import Sequence

import orjson

from billing.gate.entries import Entry
from billing.push.events import Format, HttpCall, PushEvent
from billing.reports.export import cloud_event, entry_id


class CloudEvents(Format):
    """A `Format`: batches of CloudEvents for one URL."""

    batch = 100

    def __init__(self, url: str, token: str, source: str) -> None:
        self.url = url
        self._token = token
        self._source = source

    def events(self, entry: Entry) -> list[PushEvent]:
        event = cloud_event(entry, self._source)
        return [PushEvent(entry_id(entry), entry.tenant, entry.seq, event)]

    def call(self, events: Sequence[PushEvent], token: str) -> HttpCall:
        headers = {"content-type": "application/cloudevents-batch+json"}
        if self._token:
            headers["authorization"] = f"Bearer {self._token}"
        return HttpCall(self.url, orjson.dumps([event.body for event in events]), headers)
