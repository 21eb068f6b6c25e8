"""SGLang's own classes, without the packages of a GPU: `python -m tests.sglang.wheel FOLDER`.

Its wheel is unpacked there, with three small packages that its `mem_cache` imports and ours lack.
Four of its packages come without their `__init__`, which gathers what wants torchvision and a GPU:
nothing here uses more of them than single modules.
"""

import subprocess
import sys
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory

VERSION = "0.5.23"
BESIDE = ("pybase64==1.5.1", "apache-tvm-ffi==0.1.11", "pillow==13.0.0")
WANTED = ("sglang/srt/", "sglang/kernels/", "sglang/version", f"sglang-{VERSION}.dist-info/")
GATHERS = ("srt/configs", "srt/layers/quantization", "srt/layers/deep_gemm_wrapper")
LEFT_OUT = {f"sglang/{package}/__init__.py" for package in GATHERS}  # and `sglang/__init__.py`


def main(folder: Path) -> None:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    with TemporaryDirectory() as kept:
        download = [*pip, "download", "-q", "--no-deps", "-d", kept, f"sglang=={VERSION}"]
        subprocess.run(download, check=True)
        [wheel] = Path(kept).glob("*.whl")
        with zipfile.ZipFile(wheel) as files:
            names = [name for name in files.namelist() if name.startswith(WANTED)]
            files.extractall(folder, [name for name in names if name not in LEFT_OUT])
    install = [*pip, "install", "-q", "--no-deps", "--no-compile", "--upgrade"]
    subprocess.run([*install, "--target", str(folder), *BESIDE], check=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
