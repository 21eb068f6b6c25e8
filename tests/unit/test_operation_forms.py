"""Forms are made from the signatures of operations."""

import inspect
from typing import get_type_hints

import pytest
from starlette.datastructures import FormData

from api.admin.pages.operation_forms import FORMS, field_of
from api.admin.routes.operation_table import TABLE
from api.errors import InvalidRequest
from billing.budgets import BudgetSpan, Of
from billing.operations.balance import Booking

ROWS = {row.form.name: row for row in TABLE if row.form is not None}
BY_PAGES = {"books", "by", "why", "tenant", "key_id"}
BY_PAGES_OF_THE_CACHE = {"request", "by", "why", "name", "keys"}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_form_asks_for_arguments_of_an_operation_with_a_route(form):
    row = ROWS[form.name]
    assert ("POST", form.function) == (row.method, row.function())
    arguments = inspect.signature(form.function).parameters
    must = {name for name, each in arguments.items() if each.default is inspect.Parameter.empty}
    assert {"by", "why"} <= must
    given = BY_PAGES_OF_THE_CACHE if row.module == "cache" else BY_PAGES
    assert given >= must - form.fields.keys(), "nothing that must be given is missing"


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_the_values_that_a_form_offers_are_those_of_the_argument(form):
    hints = get_type_hints(form.function, include_extras=True)
    assert set() == form.fields.keys() - hints.keys()
    for name, asked in form.fields.items():
        if values := field_of(hints[name]).choices:
            assert asked.choices and set() == asked.choices.keys() - values.keys()


def test_what_is_typed_becomes_what_the_operation_takes():
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


def test_a_grant_has_the_page_s_own_reference():
    sent = FormData({"kind": "grant", "amount": "1", "once": "abc"})
    typed = FORMS["deposit"].typed(sent)
    assert Booking.GRANT is typed["kind"]
    assert "grant_abc" == typed["reference"]
    assert {} == FORMS["suspend"].typed(FormData({"once": "abc"}))


@pytest.mark.parametrize(("text", "limit"), [("unlimited", None), ("Unlimited", None), ("5", "5")])
def test_a_limit_may_be_none(text, limit):
    assert {"credit_limit": limit} == FORMS["limit"].typed(FormData({"credit_limit": text}))
    sent = FormData({"tenant": "acme", "credit_limit": text})
    assert {"tenant": "acme", "credit_limit": limit} == FORMS["tenant"].typed(sent)


@pytest.mark.parametrize(
    ("name", "sent", "words"),
    [
        ("limit", {"credit_limit": " "}, "nothing was given"),
        ("adjust", {"deposit": "x" * 201, "amount": "1"}, "at most 200 characters"),
    ],
)
def test_what_does_not_fit_is_refused(name, sent, words):
    with pytest.raises(InvalidRequest, match=words):
        FORMS[name].typed(FormData(sent))


def test_a_field_says_what_the_argument_says_on_the_wire():
    hints = get_type_hints(FORMS["adjust"].function, include_extras=True)
    assert hints["deposit"].__metadata__[0].description == FORMS["adjust"].fields["deposit"].hint
