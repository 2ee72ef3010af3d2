"""eval_race.py through a real server: an adapter published, greedy reports, an evaluation taken up again."""

import json

import benchmark
import corpus
import real
import settings
from conftest import ROOT
from test_demo_policy import NO_CHUNKS

import checkpoint
import config
import demo
import eval_race
from policy import Policy
from records import read_journal


def test_a_checkpoint_writes_its_reports_through_the_server_and_a_second_run_asks_nothing(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    corpus.build(tmp_path)
    made = benchmark.build(tmp_path)
    files = [flag for name, file in (("queries", "query"), ("criteria", "criteria"), ("reference", "reference"))
             for flag in (f"--{name}", str(made / f"{file}.jsonl"))]  # fmt: skip
    shape = {
        **settings.SETTINGS, **demo.TRAINING, "SAMPLER": "vllm", "MODEL": str(ROOT / "demo" / "policy"),
        "SYSTEM_PROMPT_FILE": str(ROOT / "demo" / "prompt.txt"), "CORPUS_FILE": str(tmp_path / "corpus.jsonl"),
        "SERVER_CONTEXT": 1024, "SERVER_EXTRA_ARGS": NO_CHUNKS,
    }  # fmt: skip
    with real.constants(**shape):
        policy = Policy()
        for name, parameter in policy.parameters.items():
            if "lora_B" in name:
                parameter.data += 0.02
        run, _ = checkpoint.open_run("one", "train")
        checkpoint.save(run, 3, policy, checkpoint.make_optimizer(policy), {})
        first = eval_race.main(["--run", "one", "--limit", "4", *files])
        printed = capsys.readouterr().out
        again = eval_race.main(["--run", "one", "--limit", "4", *files])
    assert (first, again) == (0, 0) and "4 of 4" in printed
    folder = tmp_path / "eval" / "one-step-000003"
    reports = [line for _, line in read_journal(folder / "reports.jsonl")]
    assert len(reports) == 4 and all("article" in report for report in reports)
    results = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    assert len(results) == 4
    assert config.SAMPLER  # restored
