"""The demo's main() with fewer questions and trajectories: what the end-to-end tests run as a process of its own."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import config  # noqa: E402
import demo  # noqa: E402

if __name__ == "__main__":
    demo.TRAINING |= {"QUESTIONS_PER_STEP": 2, "SLOTS": 8}
    config.K, config.REPEATS, config.TRACKER = 4, 2, "none"
    demo.main(sys.argv[1:])
