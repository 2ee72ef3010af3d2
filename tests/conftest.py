"""Every test sees the repository root on the path, and config as config.py wrote it."""

import contextlib
import gzip
import json
import sys
from pathlib import Path

import pytest
from hypothesis import settings as hypothesis_settings

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "demo")]

import settings  # noqa: E402  the demo's
import torch  # noqa: E402

import config  # noqa: E402

# examples are the same every time, and a slow machine is not a failure
hypothesis_settings.register_profile("project", deadline=None, derandomize=True)
hypothesis_settings.load_profile("project")
torch.set_num_threads(1)  # small tensors: a second thread costs more than it gives


@pytest.fixture(autouse=True)
def restored_config():
    """Constants a test assigns last as long as the test; back ends are offline unless it says otherwise."""
    saved = dict(vars(config))
    config.SEARCH_BACKEND, config.BROWSE_BACKEND, config.JUDGE_BACKEND = "local", "local", "rule"
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
    config.SEARCH_BACKEND, config.BROWSE_BACKEND, config.JUDGE_BACKEND = "local", "local", "rule"
    yield
    vars(config).clear()
    vars(config).update(saved)
