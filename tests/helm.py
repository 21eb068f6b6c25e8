"""helm and kubectl for the tests of ops/k8s: from the wheel of tests/helm.txt, or on PATH.

`python -m tests.helm FOLDER` unpacks them where pip has put the wheel.
"""

import io
import shutil
import sys
import tarfile
import zipfile
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "build" / "helm"
NAMES = ("helm", "kubectl")


def program(name: str) -> str | None:
    """The path of `helm` or `kubectl`; None where there is none."""
    return shutil.which(name, path=FOLDER / "bin") or shutil.which(name)


def unpack(folder: Path) -> None:
    [package] = folder.glob("aws_cdk/*/_jsii/*.jsii.tgz")
    with tarfile.open(package) as archive:
        layer = archive.extractfile("package/lib/layer.zip")
        assert layer is not None
        with zipfile.ZipFile(io.BytesIO(layer.read())) as files:
            for name in NAMES:
                path = folder / "bin" / name
                path.parent.mkdir(exist_ok=True)
                path.write_bytes(files.read(f"{name}/{name}"))
                path.chmod(0o755)
    package.unlink()


if __name__ == "__main__":
    unpack(Path(sys.argv[1]))
