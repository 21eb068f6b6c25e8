"""The operators' face of the cache."""

import inspect

import pytest

from tiers.operations.face import BlockOperations, CacheOperations


def test_a_method_of_the_face_itself_answers_for_no_cache():
    """It type-checks as a function of a cache, and without a body it would return None."""
    methods = [
        each
        for face in (CacheOperations, BlockOperations)
        for name, each in vars(face).items()
        if inspect.isfunction(each) and not name.startswith("_")
    ]
    assert len(methods) > 10
    for method in methods:
        given = dict.fromkeys(inspect.signature(method).parameters)
        with pytest.raises(NotImplementedError):
            method(**given)
