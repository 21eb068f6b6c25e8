"""The files that pages need."""

from pathlib import Path

import pytest

from api.admin.pages import assets


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
