"""Block events of the node, repeated in the server's own stream.

With it the publisher for routers shows host and disk as with the embedded engine. The node is
polled only while somebody listens here. One thread.
"""

import logging
import threading
from pathlib import Path

from tiers.errors import NodeError
from tiers.node.client import NodeClient
from tiers.node.listening import publish_fields
from tiers.telemetry.events import EventKind, EventStream
from tiers.tier import TierName

logger = logging.getLogger(__name__)

REST_S = 0.2  # between two checks for listeners, or for the node
_TIMEOUT_S = 10.0  # the node answers after two idle seconds


class NodeRelay:
    """Listens to the node at `socket` until closed."""

    def __init__(self, socket: Path, stream: EventStream) -> None:
        self._client = NodeClient(socket, timeout_s=_TIMEOUT_S)
        self._stream = stream
        self._missed = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="cachesvc-node-relay", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        self._client.close()

    # The relay's thread.

    def _run(self) -> None:
        while not self._ended.is_set():
            if not self._stream.listening:
                self._client.close()
            elif self._hear():
                continue
            self._ended.wait(REST_S)

    def _hear(self) -> bool:
        """Waits for events and repeats them. Returns False if the node does not answer."""
        was_connected = self._client.is_connected
        try:
            if not was_connected:
                self._client.open()
                self._missed = 0
            heard = self._client.listen()
            if heard["missed"] > self._missed:
                self._missed = heard["missed"]
                logger.warning(f"{self._missed} events of the node's blocks were lost so far")
                self._clear(TierName.HOST, TierName.DISK)
            for event in heard["events"]:
                publish_fields(self._stream, event)
        except NodeError as error:
            logger.debug(f"the node's events are not heard: {error}")
            self._client.close()
            if was_connected:
                self._clear(TierName.HOST)  # its memory is lost; its disk stays
            return False
        return True

    def _clear(self, *tiers: TierName) -> None:
        for tier in tiers:
            self._stream.publish(EventKind.CLEARED, tier)
