"""The Python files of the vLLM that has no build for CPUs yet, to check its contracts against.

`python -m tests.vllm.next FOLDER` puts them there. Its compiled parts want a GPU, and stay out.
"""

import subprocess
import sys
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory

VERSION = "0.33.0"


def main(folder: Path) -> None:
    with TemporaryDirectory() as kept:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "-q"]
        subprocess.run([*pip, "--no-deps", "-d", kept, f"vllm=={VERSION}"], check=True)
        [wheel] = Path(kept).glob("*.whl")
        with zipfile.ZipFile(wheel) as files:
            texts = [name for name in files.namelist() if name.endswith(".py") or "-info/" in name]
            files.extractall(folder, texts)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
