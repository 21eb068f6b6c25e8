"""Made-up requests over the whole OpenAPI document of the real service: none is a 5xx.

Schemathesis makes them, right ones and wrong ones, for every route, with the rights of an operator.
Behind them stand a tiny model, its engine, three tiers, a ledger and the server's own admin parts.
Every run sends one to each route; `CACHESVC_FUZZ_CASES` says how many of each kind the slow one
sends.
"""

import contextlib
import os
from collections import Counter
from contextlib import contextmanager, suppress

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import Unsatisfiable
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.testclient import TestClient

from api.routes.tokenize import DetokenizeBody, TokenizeBody
from api.shapes.messages import CountBody, MessagesBody
from api.shapes.responses import ResponsesBody
from api.shapes.schemas import ChatBody, CompletionBody
from billing.proof.prover import Prover
from billing.store.opening import database_url, open_store
from tests.api.real_service import real_service
from tests.support.models import save_tiny_model

schemathesis = pytest.importorskip("schemathesis")
pytestmark = pytest.mark.timeout(1800)

MANY = int(os.environ.get("CACHESVC_FUZZ_CASES", "40"))
MODEL, TENANT = "tiny", "acme"
NAMES = {"model": MODEL, "tenant": TENANT}  # that exist, so that a route is not left at its door
BODIES: dict[str, type[BaseModel]] = {  # of routes that read their bodies themselves
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/v1/messages": MessagesBody,
    "/v1/messages/count_tokens": CountBody,
    "/v1/responses": ResponsesBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
}
REFS = "#/components/schemas/{model}"


def document_of(app, names):
    """The OpenAPI document, with the bodies that FastAPI does not know of."""
    document = app.openapi()
    schemas, defined = models_json_schema(
        [(kind, "validation") for kind in BODIES.values()], ref_template=REFS
    )
    document["components"]["schemas"] |= defined["$defs"]
    for path, kind in BODIES.items():
        content = {"application/json": {"schema": schemas[kind, "validation"]}}
        document["paths"][path]["post"]["requestBody"] = {"required": True, "content": content}
    for schema in document["components"]["schemas"].values():
        for name in names.keys() & schema.get("properties", {}).keys():
            schema["properties"][name] = {"type": "string", "enum": [names[name]]}
    for methods in document["paths"].values():
        for operation in methods.values():
            for parameter in operation.get("parameters", ()):
                if parameter["name"] in names:
                    value = names[parameter["name"]]
                    parameter["schema"] = {"type": "string", "enum": [value, "nobody"]}
    return document


@contextmanager
def fuzzed(folder):
    """The service as `serve` builds it, without its socket; its ledger is proved at the end."""
    model = folder / MODEL
    save_tiny_model(model)
    with real_service(folder / "data", model) as (service, app, money):
        money.accounts.create_tenant(TENANT, "CNY", by="test")
        yield service, app, NAMES | {"model": str(model)}
    with contextlib.closing(open_store(database_url(folder / "data"))) as store:
        assert Prover(store).prove().proof.problems == []


@pytest.mark.parametrize(
    "cases", [pytest.param(1, id="one"), pytest.param(MANY, id="many", marks=pytest.mark.slow)]
)
def test_no_request_that_the_document_allows_or_forbids_is_a_5xx(cases, tmp_path):
    counts = Counter()
    failed = {}
    with fuzzed(tmp_path) as (service, app, names), TestClient(app, "http://localhost") as client:
        client.headers["authorization"] = f"Bearer {service.dashboard.parts.operator_token}"
        schema = schemathesis.openapi.from_dict(document_of(app, names))
        modes = list(schemathesis.GenerationMode)
        for number, found in enumerate(schema.get_all_operations()):
            operation = found.ok()
            for mode in modes if cases > 1 else modes[number % 2 :][:1]:
                made = operation.as_strategy(generation_mode=mode)
                _ask(client, operation.label, made, cases, counts, failed)
        assert 200 == client.get("/health/ready").status_code
    print(f"{sum(counts.values())} requests: {dict(sorted(counts.items()))}")
    assert {} == failed


def _ask(client, label, made, cases, counts, failed):
    @seed(5)
    @settings(
        max_examples=cases,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(made)
    def ask(case):
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
