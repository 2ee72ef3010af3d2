"""The demo's main() with fewer questions and trajectories: what the end-to-end tests run as a process of its own."""

import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import config  # noqa: E402
import demo  # noqa: E402

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what a script starts in the background
    demo.TRAINING |= {"QUESTIONS_PER_STEP": 2, "SLOTS": 8}
    config.K, config.REPEATS, config.TRACKER = 4, 2, "none"
    demo.main(sys.argv[1:])
