"""Each cell of the matrix of clients: the real client does it against the default model."""

import pytest

from tests.clients.matrix import PROGRAMS

pytestmark = [pytest.mark.clients, pytest.mark.timeout(1800)]


@pytest.mark.parametrize(
    ("name", "cell"),
    [(name, cell) for name, program in PROGRAMS.items() for cell in program.cells()],
)
def test_a_client_does(ran, name, cell):
    told = ran(name)["cells"]
    assert set(PROGRAMS[name].cells()) == set(told)
    assert "seen" in told[cell], told[cell].get("error")
