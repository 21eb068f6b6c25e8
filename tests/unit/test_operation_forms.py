"""Forms are made from the signatures of operations."""

import inspect
from typing import Any, get_type_hints

import pytest
from starlette.datastructures import FormData

from api.admin.pages import keys
from api.admin.pages.operation_forms import OperationForm, field_of
from api.admin.pages.tenant_forms import FORMS
from api.admin.pages.tenants import CREATE
from api.admin.routes.operation_table import operation_of
from api.errors import InvalidRequest
from billing.budgets import BudgetSpan, Of
from billing.operations.balance import Booking

EVERY = {**FORMS, "create": CREATE, "key": keys.CREATE, "revoke": keys.REVOKE}


@pytest.mark.parametrize("form", EVERY.values(), ids=EVERY)
def test_a_form_asks_for_arguments_of_an_operation_with_a_route(form: OperationForm) -> None:
    assert "POST" == operation_of(form.operation).method
    arguments = inspect.signature(form.operation).parameters
    asked = form.labels.keys()
    assert set() == asked - arguments.keys()
    for words in (form.choices, form.hints):
        assert set() == words.keys() - asked
    assert set() == form.required - asked
    must = {name for name, each in arguments.items() if each.default is inspect.Parameter.empty}
    assert {"books", "by", "why"} <= must
    assert {"books", "by", "why", "tenant", "key_id"} >= must - asked, (
        "nothing that must be given is missing"
    )


@pytest.mark.parametrize("form", EVERY.values(), ids=EVERY)
def test_the_values_that_a_form_offers_are_those_of_the_argument(form: OperationForm) -> None:
    hints = get_type_hints(form.operation, include_extras=True)
    for name, offered in form.choices.items():
        if values := field_of(hints[name]).choices:
            assert set() == offered.keys() - values.keys()


def test_what_is_typed_becomes_what_the_operation_takes() -> None:
    sent = FormData(
        {
            "name": " team ",
            "amount": "12.50",
            "per": "day",
            "of": "user",
            "value": "ann",
        }
    )
    assert {
        "name": "team",
        "amount": "12.50",
        "per": BudgetSpan.DAY,
        "of": Of.USER,
        "value": "ann",
    } == FORMS["budget"].typed(sent)


def test_a_grant_has_the_page_s_own_reference() -> None:
    sent = FormData({"kind": "grant", "amount": "1", "once": "abc"})
    typed = FORMS["deposit"].typed(sent)
    assert Booking.GRANT is typed["kind"]
    assert "grant_abc" == typed["reference"]
    assert {} == FORMS["suspend"].typed(FormData({"once": "abc"}))


@pytest.mark.parametrize(("text", "limit"), [("unlimited", None), ("Unlimited", None), ("5", "5")])
def test_a_limit_may_be_none(text: str, limit: str | None) -> None:
    assert {"credit_limit": limit} == FORMS["limit"].typed(FormData({"credit_limit": text}))
    sent = FormData({"tenant": "acme", "credit_limit": text})
    assert {"tenant": "acme", "credit_limit": limit} == CREATE.typed(sent)


@pytest.mark.parametrize(
    ("name", "sent", "words"),
    [
        ("limit", {"credit_limit": " "}, "nothing was given"),
        ("deposit", {"kind": "gift", "amount": "1"}, "none of topup, grant"),
        ("adjust", {"deposit": "x" * 201, "amount": "1"}, "at most 200 characters"),
        ("rates", {"limits.requests": "many"}, "not a whole number"),
    ],
)
def test_what_does_not_fit_is_refused(name: str, sent: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        FORMS[name].typed(FormData(sent))


def test_a_field_says_what_the_argument_says_on_the_wire() -> None:
    hints = get_type_hints(FORMS["adjust"].operation, include_extras=True)
    assert hints["deposit"].__metadata__[0].description == FORMS["adjust"].fields["deposit"].hint
