"""The connector's reports to the server that runs vLLM: a request's hits by tier, and its progress.

vLLM's outputs say how many tokens were cached but not in which tier, and nothing about a request
aborted within its prompt. Reports are datagrams on a Unix socket, sent before the output that they
belong to. The sender never waits. If a report does not fit, it is lost, and the request is counted
from vLLM's output. `vllm serve` has nobody to report to.
"""

import contextlib
import json
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cachesvc.vllm.groups import KvGroup, describe_group, described_group
from cachesvc.vllm.identity import EngineIdentity
from tiers.blocks.keys import CacheScope
from tiers.errors import MissReason

PARAMETER = "cachesvc"  # our key in vLLM's kv_transfer_params
_MAX_BYTES = 1 << 16
_RECEIVE_BYTES = 4 << 20  # about ten thousand reports


@dataclass(frozen=True, slots=True)
class Ready:
    """The groups of an engine's KV and its scope, reported once."""

    groups: tuple[KvGroup, ...]  # the first is that in whose blocks prefixes are counted
    scope: CacheScope  # without adapter and salt
    num_ranks: int


@dataclass(frozen=True, slots=True)
class RequestReport:
    """A report on a request. `local` and `hits` are prompt tokens at its first admission."""

    local: int = 0  # from vLLM's own prefix cache, in whole blocks
    hits: Mapping[str, int] = field(default_factory=dict)  # from the node, by tier
    stop: MissReason = MissReason.ABSENT  # why there are no more
    admitted_ns: int = 0  # 0: not admitted yet
    computed: int | None = None  # completed prompt tokens, once the request is over


def tag_of(request: Any) -> Mapping[str, Any]:
    """Our server's data in a vLLM request; empty for a foreign request."""
    params = getattr(request, "kv_transfer_params", None) or {}
    tag = params.get(PARAMETER)
    return tag if isinstance(tag, dict) else {}


class Reporter:
    """The connector's end, in vLLM's engine core. Never blocks and never raises."""

    def __init__(self, path: Path) -> None:
        self._path = str(path)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._socket.setblocking(False)
        self._local: dict[str, int] = {}  # looked up, not admitted yet
        self._reported: set[str] = set()
        # In their first admission: id and local tokens.
        self._first: dict[str, tuple[str, int]] = {}
        self._again: set[str] = set()  # of these, back in the queue: nothing of a load stands
        self.lost = 0

    def ready(self, identity: EngineIdentity) -> None:
        scope = identity.scope
        self._send(
            {
                "groups": [describe_group(group) for group in identity.groups],
                "num_ranks": identity.num_ranks,
                "scope": {
                    name: getattr(scope, name).hex() for name in ("weights", "tokenizer", "layout")
                },
            }
        )

    def looked(self, request: Any, num_local: int) -> None:
        """vLLM looks up a request's prefix and has `num_local` tokens of it itself."""
        if request.request_id in self._again:
            self._correct(self._first[request.request_id][0], num_local, {})
        if request.request_id not in self._reported and "id" in tag_of(request):
            self._local[request.request_id] = num_local

    def admitted(
        self, request: Any, hits: Mapping[str, int], stop: MissReason = MissReason.ABSENT
    ) -> None:
        """The request has its blocks. Reports only the first admission."""
        local = self._local.pop(request.request_id, None)
        self._leave(request.request_id)
        if local is not None:
            self._reported.add(request.request_id)
            self._first[request.request_id] = (tag_of(request)["id"], local)
            message = {"local": local, "hits": dict(hits), "at_ns": time.monotonic_ns()}
            self._send({"id": tag_of(request)["id"], "stop": stop, **message})

    def fell_short(
        self, short: Mapping[str, Mapping[str, int]], *, begins_anew: bool = False
    ) -> None:
        """What was loaded of these requests, by vLLM's names, is less than was reported.

        vLLM looks up a request again of which it keeps nothing, or that it `begins_anew`.
        """
        for name, hits in short.items():
            if name in self._first:
                message_id, local = self._first[name]
                self._correct(message_id, local, hits)
                if not hits and (begins_anew or not local):
                    self._again.add(name)

    def _correct(self, message_id: str, local: int, hits: Mapping[str, int]) -> None:
        self._send({"id": message_id, "local": local, "hits": dict(hits)})

    def _leave(self, name: str) -> None:
        self._first.pop(name, None)
        self._again.discard(name)

    def finished(self, request: Any) -> None:
        """The request is over, with or without a complete answer."""
        self._local.pop(request.request_id, None)
        self._leave(request.request_id)
        self._reported.discard(request.request_id)
        tag = tag_of(request)
        if "id" in tag:
            in_flight = getattr(request, "num_in_flight_tokens", 0)
            standing = max(0, request.num_computed_tokens - in_flight)
            computed = min(standing, request.num_prompt_tokens)
            self._send({"id": tag["id"], "computed": computed})

    def close(self) -> None:
        self._socket.close()

    def _send(self, message: Mapping[str, Any]) -> None:
        try:
            self._socket.sendto(json.dumps(message).encode(), self._path)
        except OSError:
            self.lost += 1


class Reports:
    """The server's end. Only one thread may call `take`."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        self.path = path
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self.socket.setblocking(False)
        with contextlib.suppress(OSError):
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BYTES)
        self.socket.bind(str(path))
        path.chmod(0o600)
        self._known: dict[str, RequestReport] = {}
        self._expected: set[str] = set()
        self.engine: Ready | None = None

    def expect(self, name: str) -> None:
        """Keeps the reports of this request until `forget`. Others are dropped."""
        self._expected.add(name)

    def take(self) -> None:
        """Reads every pending report."""
        while True:
            try:
                data = self.socket.recv(_MAX_BYTES)
            except BlockingIOError:
                return
            with contextlib.suppress(ValueError, KeyError, TypeError):
                self._note(json.loads(data))

    def of(self, name: str) -> RequestReport | None:
        return self._known.get(name)

    def forget(self, name: str) -> None:
        self._expected.discard(name)
        self._known.pop(name, None)

    def close(self) -> None:
        self.socket.close()
        with contextlib.suppress(OSError):
            self.path.unlink()

    def _note(self, message: dict[str, Any]) -> None:
        if "groups" in message:
            fields = {name: bytes.fromhex(value) for name, value in message["scope"].items()}
            groups = tuple(map(described_group, message["groups"]))
            self.engine = Ready(groups, CacheScope(**fields), int(message["num_ranks"]))
            return
        name = message["id"]
        if name not in self._expected:
            return
        known = self._known.get(name, RequestReport())
        if "hits" in message:
            hits = {str(tier): int(tokens) for tier, tokens in message["hits"].items()}
            stop = MissReason(message.get("stop", MissReason.ABSENT))
            known = replace(known, local=int(message["local"]), hits=hits, stop=stop)
            if "at_ns" in message:
                known = replace(known, admitted_ns=int(message["at_ns"]))
        else:
            known = replace(known, computed=int(message["computed"]))
        self._known[name] = known
