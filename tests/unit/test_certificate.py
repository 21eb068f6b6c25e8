"""A certificate is valid for what it was made for, signed by a key of the directory, and for
nothing else."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from billing.reports.published import published_keys
from billing.reports.receipts import Purpose, ReceiptSigner
from cachesvc.cli import app
from cachesvc.server.certificate import NONE_YET, certify, identity, shown
from tiers.blocks.keys import CacheScope

SCOPE = CacheScope(weights=b"w", tokenizer=b"t", layout=b"l", arithmetic=b"a", tenant=b"secret")
FACTS = {"cachesvc": "1.0", "engine": "embedded", "device": "cpu", "dtype": "float32"}
SERVED = identity("m", FACTS, SCOPE)
TOLD = {"cases": 900, "flips": 0, "moves": 3, "largest_move": 1.5e-5, "kinds": {}, "tiers": {}}


def made(data_dir: Path, **more: Any) -> Path:
    return certify(data_dir, SERVED | more, TOLD, {"seed": 1})


def told_of(data_dir: Path, served: Any = SERVED) -> dict[str, Any]:
    return shown(data_dir, published_keys(data_dir), served)


def test_it_holds_what_was_served_and_no_tenant(tmp_path: Path) -> None:
    assert told_of(tmp_path) == {
        "serves": SERVED,
        "certificate": None,
        "valid": False,
        "why": NONE_YET,
    }
    path = made(tmp_path)
    told = told_of(tmp_path)
    assert (told["valid"], told["why"]) == (True, None)
    assert told["certificate"] == json.loads(path.read_text())
    assert told["certificate"]["cases"] == 900 and told["certificate"]["serves"] == SERVED
    assert b"secret".hex() not in path.read_text()


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("dtype", "bfloat16", "it is for dtype float32, and bfloat16 serves"),
        ("cachesvc", "1.1", "it is for cachesvc 1.0, and 1.1 serves"),
        ("device", "cuda", "it is for device cpu, and cuda serves"),
        ("weights", "00", "it is for other contents of: weights"),
        ("adapter", "01", "it is for other contents of: adapter"),
        ("arithmetic", "02", "it is for other contents of: arithmetic"),
        ("vllm", "0.33", "it is for vllm unknown, and 0.33 serves"),
    ],
)
def test_for_anything_else_it_is_shown_as_not_valid_and_says_why(
    tmp_path: Path, name: str, value: str, why: str
) -> None:
    made(tmp_path)
    told = told_of(tmp_path, SERVED | {name: value})
    assert (told["valid"], told["why"]) == (False, why)
    assert told["certificate"]["serves"] == SERVED


def test_the_one_that_fits_best_is_shown_and_of_another_model_none(tmp_path: Path) -> None:
    made(tmp_path, dtype="bfloat16")
    made(tmp_path)
    assert told_of(tmp_path)["valid"]
    assert told_of(tmp_path, SERVED | {"dtype": "bfloat16"})["valid"]
    other = identity("n", FACTS, replace(SCOPE, weights=b"x"))
    assert told_of(tmp_path, other)["certificate"] is None
    assert told_of(tmp_path, SERVED | {"model": "another name for it"})["valid"]


def test_what_was_changed_or_signed_for_another_purpose_is_not_shown(tmp_path: Path) -> None:
    path = made(tmp_path, dtype="bfloat16")
    changed = json.loads(path.read_text()) | {"serves": dict(SERVED)}
    path.write_text(json.dumps(changed))
    (path.parent / "broken.json").write_text("{")
    receipt = ReceiptSigner.open(tmp_path).sign({"serves": dict(SERVED)}, Purpose.RECEIPT)
    (path.parent / "receipt.json").write_text(json.dumps(receipt))
    assert told_of(tmp_path)["why"] == NONE_YET


def check(*arguments: Any) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["conform", *map(str, arguments)])
    return done.exit_code, done.stdout + done.stderr


def test_a_customer_checks_it_with_the_public_key_alone(tmp_path: Path) -> None:
    path = made(tmp_path / "data")
    (key,) = published_keys(tmp_path / "data").values()
    code, said = check("--check", path, "--public-key", key)
    assert code == 0 and "genuine" in said and "0 flips of 900 cases" in said
    assert check("--check", path, "--data-dir", tmp_path / "data")[0] == 0
    path.write_text(path.read_text().replace('"cases": 900', '"cases": 9000'))
    code, said = check("--check", path, "--public-key", key)
    assert code == 1 and "NOT genuine" in said


def test_wrong_input_to_a_check_is_said_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "none").mkdir()
    path = made(tmp_path / "data")
    code, said = check("--check", path, "--data-dir", tmp_path / "none")
    assert code == 1 and "never signed here" in said
    assert "NOT genuine" in check("--check", path, "--public-key", "zz")[1]
    (tmp_path / "x.json").write_text("[]")
    assert "is not a certificate" in check("--check", tmp_path / "x.json")[1]
    assert "is not a certificate" in check("--check", tmp_path / "missing.json")[1]
