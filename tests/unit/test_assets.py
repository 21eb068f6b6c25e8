"""The files that pages need, and what `cachesvc admin` says of passwords."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from api.admin.pages import assets
from cachesvc.cli import app


@pytest.mark.parametrize(
    ("command", "told"), [("password", "keys create"), ("list", "keys list"), ("link", "serve")]
)
def test_what_cannot_be_done_is_said_in_a_sentence(tmp_path, command, told):
    options = ["--data-dir", str(tmp_path)] if command == "link" else []
    refused = CliRunner().invoke(app, ["admin", command, *options])
    assert refused.exit_code and f"`cachesvc {told}" in " ".join(
        re.split(r"[\s│]+", refused.output)
    )


def test_only_the_reviewed_files_of_packages_are_served():
    wanted = assets.VENDORED["uplot.js"]
    assert assets._vendored(wanted)
    with pytest.raises(assets.AssetMissing, match="not the file that was reviewed"):
        assets._vendored(wanted._replace(digest="0" * 64))
    with pytest.raises(assets.AssetMissing, match="make setup"):
        assets._vendored(wanted._replace(package="no_such_package"))


def test_every_asset_has_a_type_and_fits_the_budget():
    files = assets.assets()
    assert [] == [name for name in files if Path(name).suffix not in assets.TYPES]
    assert sum(len(each.packed) for each in files.values()) < 80_000
