"""train.py --check: what is in order is said, every problem has its line and its remedy, and no key is shown."""

import json
from types import SimpleNamespace

import pytest
import torch
from conftest import use_demo

import checklist
import config
import train
from checklist import Problem, triton_fault
from judges import Reply


@pytest.fixture(autouse=True)
def demo(tmp_path):
    with use_demo():
        config.CORPUS_FILE = str(tmp_path / "corpus.jsonl")
        page = {"url": "https://factbook.example/france", "title": "France", "text": "The capital of France is Paris."}
        (tmp_path / "corpus.jsonl").write_text(json.dumps(page) + "\n")
        config.RUNS_DIR = str(tmp_path / "runs")
        yield


def line(name):
    """(what the check says, None) or (None, the problem)."""
    try:
        return checklist.CHECKS[name](), None
    except Problem as problem:
        return None, str(problem)


def test_what_is_in_order_is_said():
    assert "found 1 results" in line("search")[0] and "read 31 characters" in line("search")[0]
    assert line("judge")[0].startswith("rule answers")
    assert "down_proj" in line("coverage")[0] and "takes base_model.model.model.layers.0" in line("coverage")[0]
    assert "GB (weights" in line("memory")[0]
    assert "20 steps" in line("constants")[0]


def test_every_problem_names_its_remedy(monkeypatch):
    config.K = 1
    assert "config.K = 1" in line("constants")[1]
    config.MODEL = "/nowhere/model"
    assert "give a local folder" in line("coverage")[1] and "give a local folder" in line("memory")[1]
    config.CORPUS_FILE = "nowhere.jsonl"
    assert "choose another SEARCH_BACKEND" in line("search")[1]
    monkeypatch.setattr(checklist.shutil, "disk_usage", lambda _: SimpleNamespace(free=1e9))
    assert "set RUNS_DIR to another disk" in line("disk")[1]
    monkeypatch.setattr(checklist, "HERE", checklist.Path("/nowhere"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_no_device_is_a_problem():
    assert "make demo" in line("device")[1]


def test_other_versions_are_named(monkeypatch):
    monkeypatch.setattr(checklist.importlib.metadata, "version", lambda package: "0.0.1")
    assert "peft is 0.0.1, not" in line("versions")[1] and "pip install -r requirements.txt" in line("versions")[1]


def test_missing_keys_are_named_and_present_ones_never_shown(monkeypatch, capsys):
    config.SEARCH_BACKEND = "serper"
    monkeypatch.delenv("SERPER_API_KEY", raising=False)
    assert "SERPER_API_KEY" in line("keys")[1]
    monkeypatch.setenv("SERPER_API_KEY", "secret-4711")
    assert "serper" in line("keys")[0]
    config.SEARCH_BACKEND = "local"
    checklist.run()
    assert "secret-4711" not in capsys.readouterr().out


def test_a_judge_that_prefers_the_wrong_answer_is_a_problem(monkeypatch):
    class Wrong:
        name = "wrong"

        async def reply(self, *_):
            return Reply('{"winners": [1]}', "wrong")

        async def close(self):
            pass

    monkeypatch.setitem(checklist.BACKENDS, "rule", lambda _: Wrong())
    assert "prefers Lyon" in line("judge")[1]


@pytest.mark.parametrize(
    ("triton", "capability", "delta_nets", "wrong"),
    [
        ("3.4.0", (9, 0), True, True),
        ("3.7.0", (9, 0), True, True),
        ("3.7.1", (9, 0), True, False),
        ("3.3.9", (9, 0), True, False),
        ("3.5.0", (8, 0), True, False),
        ("3.5.0", (9, 0), False, False),
        (None, (9, 0), True, False),
    ],
)
def test_triton_versions_with_wrong_gradients_on_hopper(triton, capability, delta_nets, wrong):
    assert bool(triton_fault(triton, capability, delta_nets)) == wrong


def test_check_exits_with_the_number_of_problems_and_starts_nothing(tmp_path, capsys):
    config.K = 1
    with pytest.raises(SystemExit) as caught:
        train.main(["--check"])
    assert caught.value.code >= 1
    assert "PROBLEM  constants: config.K = 1" in capsys.readouterr().out
    assert not (tmp_path / "runs").exists()
