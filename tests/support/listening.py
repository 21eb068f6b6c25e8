"""A stand-in for vLLM's server: listens on `--uds PATH`, with a worker, until it is ended."""

import signal
import socket
import subprocess
import sys


def main() -> None:
    print("vLLM says something", flush=True)
    if "--wrong" in sys.argv:
        sys.exit("api_server.py: error: unrecognized arguments: --wrong")
    subprocess.Popen(["sleep", "600"])  # a worker
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(sys.argv[sys.argv.index("--uds") + 1])
        listener.listen()
        signal.pause()


if __name__ == "__main__":
    main()
