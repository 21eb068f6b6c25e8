"""What is installed without resolving is complete, and its versions go together."""

from importlib.metadata import distribution

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.pins import SERVING, SITE, TESTING, needed, pinned

SERVED, TESTED, FOR_SITE = pinned(SERVING), pinned(TESTING), pinned(SITE)
PINS = FOR_SITE | TESTED | SERVED


def test_all_that_is_needed_is_pinned_once_and_serving_installs_no_tests() -> None:
    assert needed("cachesvc[all]") <= SERVED.keys()
    assert needed("cachesvc[test]") <= SERVED.keys() | TESTED.keys()
    assert len(PINS) == len(SERVED) + len(TESTED) + len(FOR_SITE)
    assert not {"pytest", "moto", "playwright", "schemathesis", "triton"} & SERVED.keys()


def test_every_pin_is_a_version_that_the_others_accept() -> None:
    refused = []
    for name in needed("cachesvc[all,test]") | {"cachesvc"}:
        for text in distribution(name).requires or ():
            wanted = Requirement(text)
            pin = PINS.get(canonicalize_name(wanted.name))
            applies = wanted.marker is None or wanted.marker.evaluate({"extra": ""})
            if applies and pin and not wanted.specifier.contains(pin, prereleases=True):
                refused.append(f"{name} wants {wanted}, the pin is {pin}")
    assert refused == []
