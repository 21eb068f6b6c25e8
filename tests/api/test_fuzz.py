"""Thousands of made-up requests over the whole OpenAPI document: none is answered with a 5xx.

Schemathesis makes them, right ones and wrong ones, for every route, with the rights of an operator
and over a real ledger. `CACHESVC_FUZZ_CASES` sets how many for each route.
"""

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.testclient import TestClient

from api.admin.router import admin_router
from api.admin.testing import OPERATOR_TOKEN, fake_parts
from api.app import create_app
from api.shapes.messages import CountBody, MessagesBody
from api.shapes.responses import InputBody, ResponsesBody
from api.shapes.schemas import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from api.testing import FakeHouse, Script, fake_house
from billing.accounts import Accounts
from billing.ledger import Ledger
from billing.operations.books import OpenBooks
from billing.prices.cards import default_card
from billing.proof.prover import Prover
from billing.reports.receipts import ReceiptSigner
from billing.store.store import database_url, open_store

schemathesis = pytest.importorskip("schemathesis")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

CASES = int(os.environ.get("CACHESVC_FUZZ_CASES", "40"))
ENDLESS = {"/v1/cache/events", "/admin/api/events"}
BODIES: dict[str, type[BaseModel]] = {  # of routes that read their bodies themselves
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/v1/messages": MessagesBody,
    "/v1/messages/count_tokens": CountBody,
    "/v1/responses": ResponsesBody,
    "/v1/responses/input_tokens": InputBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
}
REFS = "#/components/schemas/{model}"


def document_of(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI document, with the bodies that FastAPI does not know of."""
    document = app.openapi()
    schemas, defined = models_json_schema(
        [(kind, "validation") for kind in BODIES.values()], ref_template=REFS
    )
    document["components"]["schemas"] |= defined["$defs"]
    for path, kind in BODIES.items():
        content = {"application/json": {"schema": schemas[kind, "validation"]}}
        document["paths"][path]["post"]["requestBody"] = {"required": True, "content": content}
    return document


@contextmanager
def fuzzed(folder: Path) -> Iterator[tuple[FastAPI, FakeHouse]]:
    store = open_store(database_url(folder))
    accounts = Accounts(store)
    ledger = Ledger(store, accounts, first_card=default_card())
    ledger.start()
    accounts.create_tenant("acme", "CNY", by="test")
    books = OpenBooks(store, accounts, ledger, Prover(store), ReceiptSigner.open(folder))
    house = fake_house()
    house.engine.script = Script(answer="abc")
    try:
        yield create_app(house.wire, routers=(admin_router(fake_parts(books=books)),)), house
    finally:
        house.close()
        ledger.close()
        assert Prover(store).prove().proof.problems == []
        store.close()


def test_no_request_that_the_document_allows_or_forbids_is_a_5xx(tmp_path: Path) -> None:
    counts: Counter[int] = Counter()
    failed: dict[str, str] = {}
    with fuzzed(tmp_path) as (app, _), TestClient(app, "http://localhost") as client:
        client.headers["authorization"] = f"Bearer {OPERATOR_TOKEN}"
        schema = schemathesis.openapi.from_dict(document_of(app))
        for found in schema.get_all_operations():
            operation = found.ok()
            if operation.path in ENDLESS:
                continue
            for mode in schemathesis.GenerationMode:
                cases = operation.as_strategy(generation_mode=mode)
                _ask(client, operation.label, cases, counts, failed)
    print(f"{sum(counts.values())} requests: {dict(sorted(counts.items()))}")
    assert {} == failed


def _ask(
    client: TestClient,
    label: str,
    cases: st.SearchStrategy[Any],
    counts: Counter[int],
    failed: dict[str, str],
) -> None:
    @seed(5)
    @settings(
        max_examples=CASES,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(cases)
    def ask(case: Any) -> None:
        sent = case.as_transport_kwargs(base_url="http://localhost")
        sent.pop("cookies", None)
        if isinstance(sent.get("data"), bytes | str):
            sent["content"] = sent.pop("data")
        try:
            answer = client.request(**sent)
        except UnicodeError:  # the client cannot send it
            return
        counts[answer.status_code] += 1
        if answer.status_code >= 500:
            failed.setdefault(label, f"{answer.status_code} {sent} {answer.text[:200]}")

    with suppress(Unsatisfiable):  # nothing about this route can be wrong
        ask()
