"""Usage events and heads reach receivers that fail, lose answers, refuse, send elsewhere, trickle,
never end or speak no HTTP: each is an error in time, and nothing is skipped or follows a redirect.
"""

import random
import socket
import time
import urllib.request
from contextlib import contextmanager, suppress

import pytest

from billing import push
from billing.errors import ExportError, ReceiverError
from billing.gate.entries import Kind
from billing.money import UNITS, parse_amount
from billing.outgoing import send
from billing.reports.heads import send_heads
from billing.usage import Usage
from tests.support.billing import entries_of
from tests.support.stand_in import Handler, StandIn, served
from tests.support.threads import beside

USAGE = Usage(hit_device=100, hit_disk=900, miss=100, output=7)


class Meter(StandIn):
    """Takes batches of events; fails or loses its answer as its dice say. Knows events by id."""

    def __init__(self, seed):
        super().__init__(_Receiver)
        self.dice, self.is_wild = random.Random(seed), True
        self.events = {}
        self.num_asked, self.refusal = 0, (0, b"")
        self.heads = []


class _Receiver(Handler):
    server: Meter

    def do_POST(self):
        body, meter = self.read_json(), self.server
        meter.num_asked += 1
        meter.heads.append((self.headers["authorization"], self.headers["content-type"]))
        status, said = meter.refusal
        fate = meter.dice.choice(["take", "refuse", "lose"]) if meter.is_wild else "take"
        if fate == "refuse":
            status = meter.dice.choice(push.PASSING)
        if not status:
            meter.events |= {event["id"]: event for event in body}
        if fate == "lose":
            self.close_connection = True
        else:
            self.say(status or 204, said)


@pytest.fixture
def meter(monkeypatch):
    monkeypatch.setattr(push, "FIRST_WAIT_S", 0.001)
    monkeypatch.setattr(push, "BATCH", 3)
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    with served(Meter(seed)) as meter:
        yield meter


def pushed(house, url, token="secret", source="s"):
    return push.push(house.ledger.store, house.ledger.book, "push", url, token, source)


def sent(house, meter, token=""):
    return pushed(house, f"{meter.url}/api/v1/events", token, "ledger-1")


def test_all_arrive_whatever_the_service_does_and_add_up_to_the_ledger(house, meter):
    house.fund(UNITS)
    for number in range(20):
        house.charge(f"r{number}", Usage(hit_disk=number, miss=number, output=1))
    house.correct("r3", "c", 5)
    for _ in range(2000):  # as often as it takes: a cron job runs it again
        with suppress(ExportError):
            sent(house, meter, "secret")
            break
    amounts = [parse_amount(event["data"]["amount"]) for event in meter.events.values()]
    booked = [entry for entry in entries_of(house.ledger.store) if entry.kind is not Kind.TOPUP]
    assert -sum(entry.amount for entry in booked) == sum(amounts)
    assert {("Bearer secret", "application/cloudevents-batch+json")} == set(meter.heads)
    assert 0 == sent(house, meter)


def test_an_event_is_one_token_class_of_a_charge_as_cloudevents_1_0_asks(house, meter):
    meter.is_wild = False
    house.fund(UNITS)
    house.deposit(Kind.GRANT, 5, "g")
    house.charge("r1", USAGE, project="web")
    assert 3 == sent(house, meter)
    tokens = {name: event["data"]["tokens"] for name, event in meter.events.items()}
    assert {f"acme/3/{name}": n for name, n in USAGE.record().items()} == tokens  # no deposit
    event = meter.events["acme/3/hit_disk"]
    told = {"class": "hit_disk", "tokens": 900, "amount": "0.00009", "currency": "CNY"}
    told |= {"per_million": "0.10", "request_id": "r1", "project": "web"}
    assert told.items() <= event["data"].items()
    attributes = {name: value for name, value in event.items() if name not in ("data", "time")}
    named = {"id": "acme/3/hit_disk", "source": "ledger-1", "subject": "acme"}
    kind = {"type": "cachesvc.usage.v1", "datacontenttype": "application/json"}
    assert attributes == {"specversion": "1.0", **named, **kind}


@pytest.mark.parametrize("refusal", [(400, b"no such meter"), (401, b"no such key")])
def test_a_refusal_stops_the_export_at_once_and_nothing_is_skipped(house, meter, refusal):
    """The service's words are told, and all is sent again once it takes them."""
    house.charge("r1", USAGE)
    house.charge("r2", USAGE)
    meter.is_wild, meter.refusal = False, refusal
    with pytest.raises(ExportError, match=rf"{refusal[0]}.*{refusal[1].decode()}; the next export"):
        sent(house, meter)
    assert 1 == meter.num_asked  # asking again would not help
    meter.refusal = (0, b"")
    assert 2 == sent(house, meter)
    assert 8 == len(meter.events)


LONG_S = 60.0


@contextmanager
def speaking(speak):
    """A server that reads the head of each request and then says what it likes."""
    heads = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve():
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    heads.append(connection.recv(65536))
                    try:
                        speak(connection)
                    except OSError:
                        continue

        with beside(serve):
            try:
                yield f"http://127.0.0.1:{listener.getsockname()[1]}/hook", heads
            finally:
                listener.shutdown(socket.SHUT_RDWR)


def says(*lines):
    text = "\r\n".join((*lines, "", "")).encode()
    return lambda connection: connection.sendall(text)


def trickle_head(connection):
    connection.sendall(b"HTTP/1.1 200 ")
    while True:
        connection.sendall(b"O")
        time.sleep(0.02)


def trickle_body(connection):
    connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n")
    while True:
        connection.sendall(b"x")
        time.sleep(0.02)


def endless(connection):
    connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
    while True:
        connection.sendall(b"x" * 65536)


def posted(url, timeout_s=LONG_S):
    request = urllib.request.Request(url, b"{}", method="POST")
    return send(request, timeout_s=timeout_s, most_bytes=1024)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_is_not_followed_and_is_no_success(house, status):
    """A metering service cannot send the key elsewhere."""
    house.charge("r1", Usage(miss=1))
    with speaking(says("HTTP/1.1 204 No Content")) as (elsewhere, came):
        moved = says(f"HTTP/1.1 {status} Moved", f"location: {elsewhere}", "content-length: 0")
        with speaking(moved) as (url, heads):
            with pytest.raises(ReceiverError, match="redirects are"):
                posted(url)
            with pytest.raises(ExportError, match="redirects are"):
                pushed(house, url)
    assert (2, []) == (len(heads), came)


@pytest.mark.parametrize("slow", [trickle_head, trickle_body])
def test_an_answer_that_trickles_ends_in_time(slow):
    """Each byte comes well within the timeout, and there are bytes for a day."""
    with (
        speaking(slow) as (url, _),
        pytest.raises(ReceiverError, match=r"no complete answer in 0\.5 s|timed out"),
    ):
        posted(url, timeout_s=0.5)


def test_of_an_endless_answer_the_beginning_is_read():
    with speaking(endless) as (url, _):
        assert b"x" * 1024 == posted(url)


@pytest.mark.parametrize("line", ["", "nonsense", "HTTP/1.1 999999 x", "SSH-2.0-OpenSSH"])
def test_an_answer_that_is_not_http_is_an_error(line):
    """Also to what sends heads: another error would end the task that watches the money."""
    with speaking(says(line)) as (url, heads):
        with pytest.raises(ReceiverError):
            posted(url)
        with pytest.raises(ExportError, match="the heads could not be written"):
            send_heads({"at_ns": 1}, url)
    assert 2 == len(heads)
