"""A trainer that does nothing but hold a server (tests/fake_vllm.py), for the tests that kill it.

    python tests/trainer_drill.py FOLDER BEHAVIOUR END

END: ends (normally), raises, waits (to be killed). FOLDER/up appears when the server is ready.
"""

import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import config  # noqa: E402
import server  # noqa: E402

FAKE = str(Path(__file__).parent / "fake_vllm.py")


def fake_command(behaviour, folder):
    """In place of server.command_line: the same names and port, and the folder to be found by."""

    def command(port, mark, served):
        names = ["--served-model-name", config.MODEL, mark]
        return [sys.executable, FAKE, behaviour, "--port", str(port), *names, "--folder", f"{folder}/served"]

    return command


def main(folder, behaviour, end):
    config.SERVER_PORT = 0
    server.command_line = fake_command(behaviour, folder)
    with server.VllmServer(folder, None):
        Path(folder, "up").touch()
        if end == "raises":
            raise RuntimeError("a fault in the training loop")
        while end == "waits":
            time.sleep(1)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what a script starts in the background
    main(*sys.argv[1:])
