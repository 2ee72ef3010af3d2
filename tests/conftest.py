"""Every test sees the repository root on the path, and config as config.py wrote it."""

import contextlib
import gzip
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "demo")]

import settings  # noqa: E402  the demo's
import torch  # noqa: E402

import config  # noqa: E402

torch.set_num_threads(1)  # small tensors: a second thread costs more than it gives


@pytest.fixture(autouse=True)
def restored_config():
    """Constants a test assigns last as long as the test."""
    saved = dict(vars(config))
    yield
    vars(config).clear()
    vars(config).update(saved)


def golden(family):
    """Rows of one golden family: inputs, and what the reference implementation returned for them."""
    with gzip.open(ROOT / "tests" / "golden" / f"{family}.jsonl.gz", "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


@contextlib.contextmanager
def use_demo():
    """The demo policy and its context sizes as the present constants."""
    saved = dict(vars(config))
    settings.apply()
    config.MODEL = str(ROOT / "demo" / "policy")
    config.SYSTEM_PROMPT_FILE = str(ROOT / "demo" / "prompt.txt")
    config.SAMPLER, config.GRADIENT_CHECKPOINTING, config.TRACKER = "in_process", False, "none"
    yield
    vars(config).clear()
    vars(config).update(saved)
