"""Damages a file that a start keeps, as disks, crashes and people do."""

from pathlib import Path

DAMAGES = ("flip", "cut", "folder")


def damage(path: Path, how: str) -> None:
    """Replace the file: by one with another last bit, by its beginning, or by a folder that is not
    empty. A process that has mapped it keeps what it had."""
    whole = path.read_bytes()
    path.unlink()
    match how:
        case "flip":
            path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        case "cut":
            path.write_bytes(whole[:100])
        case "folder":
            path.mkdir()
            (path / "x").touch()
