"""A fake runtime as a program, with children of the kinds that SGLang has and worse.

It writes the process ids of itself and of all that it started to the file that FAKE_PIDS names.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import uvicorn

from tests.service.fake_runtime import FakeRuntime

SLEEP = "import time; time.sleep(1000)"
# Leaves its session and its parent, as a daemon does.
DAEMON = f"""
import os, sys
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        open(sys.argv[1], "a").write(f"{{os.getpid()}}\\n")
        {SLEEP}
    os._exit(0)
"""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--served-model-name", required=True)
    parser.add_argument("--uvicorn-access-log-exclude-prefixes", nargs="*")
    parser.add_argument("--fake-exit", type=int, help="exit with this status instead of serving")
    parser.add_argument("--fake-refusal", action="store_true", help="refuse to start, as the plugin does")
    parser.add_argument("--fake-stubborn", action="store_true", help="ignore SIGTERM")
    arguments = parser.parse_args()

    pids = Path(os.environ["FAKE_PIDS"])
    child = subprocess.Popen([sys.executable, "-c", SLEEP])
    session = subprocess.Popen([sys.executable, "-c", SLEEP], start_new_session=True)
    with pids.open("a") as file:
        file.write(f"{os.getpid()}\n{child.pid}\n{session.pid}\n")
    subprocess.run([sys.executable, "-c", DAEMON, str(pids)], check=True, timeout=60)

    print(f"serving {arguments.served_model_name} on the {os.environ.get('CUDA_VISIBLE_DEVICES', 'default')!r} devices")
    print("x" * 200_000)
    if arguments.fake_exit is not None:
        print("about to fail", file=sys.stderr)
        sys.exit(arguments.fake_exit)
    if arguments.fake_refusal:
        print("Winnow: the server does not start, because it does not serve what was asked.", file=sys.stderr)
        print("  File of a stack trace\n" * 40 + "RuntimeError: Rank 0 scheduler died", file=sys.stderr)
        sys.exit(1)
    server = uvicorn.Server(
        uvicorn.Config(FakeRuntime().app(), host=arguments.host, port=arguments.port, log_config=None)
    )
    if arguments.fake_stubborn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign,assignment]
    server.run()


if __name__ == "__main__":
    main()
