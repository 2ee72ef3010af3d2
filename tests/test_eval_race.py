"""eval_race.py from the command line: real files, a real HTTP judge on loopback, real kills."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import benchmark
import corpus
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import race_bench
import torch
from conftest import ROOT, use_demo
from peers import Peer, chat_reply, ok

import checkpoint
import config
import eval_race
import race
import race_files
from policy import Policy

PAGES = [{"url": f"https://e.example/{n}", "title": f"Bridge {n}", "text": f"Bridge {n} is long."} for n in range(4)]


@pytest.fixture
def bench(tmp_path, monkeypatch):
    """The benchmark's flags, in a working folder of its own; no pauses."""
    monkeypatch.chdir(tmp_path)
    config.JUDGE_BACKEND, config.JUDGE_PAUSE, config.EVAL_JUDGE_MODEL = "openai", 0, "m"
    return race_bench.write(tmp_path)


def articles(rows, name="mine.jsonl"):
    """Write reports made elsewhere; rows: {id: article}, or dicts as they are."""
    rows = [{"id": k, "article": v} for k, v in rows.items()] if isinstance(rows, dict) else rows
    Path(name).write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return ["--articles", name]


def whole(text="A report on {}."):
    """A report on every question."""
    return {key: text.format(key) for key in race_bench.QUESTIONS}


def asked_about(asked):
    """The id of the question that a request to the judge is about."""
    text = asked.json["messages"][0]["content"]
    return next(key for key, (_, prompt) in race_bench.QUESTIONS.items() if prompt in text)


def says(score, **more):
    """A judge of these scores: score(id, number) -> (report's, reference's)."""

    def reply(asked):
        key = asked_about(asked)
        return ok(chat_reply(json.dumps(race_bench.sheet(lambda n: score(key, n))), "m", **more))

    return reply


def results(name="mine"):
    """{id: line} of a scored evaluation."""
    return {row["id"]: row for _, row in race_files.read_lines(Path("eval", name, "results.jsonl"))}


def judged(peer, *argv):
    """Run eval_race with the peer as judge; returns the exit code."""
    config.EVAL_JUDGE_URL = peer.url
    return eval_race.main([str(a) for a in argv])


# ---- scoring reports made elsewhere ------------------------------------------------------------------


def test_equal_scores_print_50_on_all_and_a_second_run_asks_nothing(bench, capsys):
    with Peer(says(lambda key, n: (7, 7))) as peer:
        assert judged(peer, *articles(whole()), *bench) == 0
        first = capsys.readouterr().out
        assert judged(peer, *articles(whole()), *bench) == 0
    assert len(peer.asked) == 4 and capsys.readouterr().out == first
    table = {line[:32].strip(): line[32:].split() for line in first.splitlines()}
    assert table["Overall"][:2] == ["50.00", "50.00"] and table["scored / total"] == ["4/4"]
    assert table["answers completed"] == ["4/4"]
    body = peer.asked[0].json
    assert body["temperature"] == 0 and body["max_tokens"] == config.EVAL_MAX_TOKENS and body["model"] == "m"
    assert set(body["response_format"]["json_schema"]["schema"]["required"]) == set(race.DIMENSIONS)


def test_scores_equal_the_table_computed_by_hand(bench):
    def score(key, n):
        return (3 * n + int(key)) % 10, (5 * n + 2 * int(key)) % 9 + 0.5

    with Peer(says(score)) as peer:
        assert judged(peer, *articles(whole()), *bench) == 0
    for key, row in results().items():
        assert row["scores"] == pytest.approx(race_bench.by_hand(lambda n, k=key: score(k, n)), abs=1e-12)
        assert row["models"] == ["m"] and row["judge"] == "openai:m"


def test_EVAL_06_blank_scores_0_without_a_call_and_missing_reports_count_as_failures(bench, capsys):
    rows = [{"id": 1, "prompt": f" {race_bench.QUESTIONS['1'][1]} ", "article": "x"}, {"id": 3, "article": "  \n "},
            {"id": "0", "article": "y"}]  # fmt: skip
    with Peer(says(lambda key, n: (6, 4))) as peer:
        assert judged(peer, *articles(rows), *bench) == 1
    assert {asked_about(asked) for asked in peer.asked} == {"1", "0"} and len(peer.asked) == 2
    found = results()
    assert set(found["3"]["scores"].values()) == {0.0} and not found["3"]["completed"]
    assert found["2"]["failure"] == "no report"
    out = capsys.readouterr().out
    overall = next(line for line in out.splitlines() if line.startswith("Overall")).split()
    assert overall[1:3] == ["40.00", "30.00"] and "INCOMPLETE: 1 of 4" in out


def test_EVAL_07_a_long_report_reaches_the_judge_whole_and_is_never_cleaned(bench):
    article = "A" * 120 + "." + "B" * 79 + "C" * 200
    with Peer(says(lambda key, n: (7, 7))) as peer:
        assert judged(peer, *articles({"1": article}), *bench, "--ids", "1") == 0
        assert article in peer.asked[0].json["messages"][0]["content"]
        config.EVAL_PROMPT_CHARACTERS = 1000
        assert judged(peer, *articles({"1": article * 3}, "long.jsonl"), *bench, "--ids", "1") == 1
    assert len(peer.asked) == 1 and "too_long" in results("long")["1"]["failure"]


def test_EVAL_08_the_language_comes_from_the_question(bench, capsys):
    with Peer(says(lambda key, n: (7, 7))) as peer:
        assert judged(peer, *articles([{"id": 2, "article": "报告正文"}]), *bench, "--lang", "zh") == 0
    text = peer.asked[0].json["messages"][0]["content"]
    assert text.startswith(race.CHINESE[:20]) and "报告正文" in text
    assert "1 questions (0 en, 1 zh)" in capsys.readouterr().out
    assert "报告正文".encode() in peer.asked[0].body and results()["2"]["language"] == "zh"
    raw = Path("eval/mine/judge.jsonl").read_bytes()
    assert "比较".encode() not in raw or b"\\u" not in raw


def test_EVAL_10_blank_lines_and_other_locales_load_and_a_bad_line_is_named(bench):
    path = Path("mine.jsonl")
    path.write_bytes('\ufeff{"id": 1, "article": "问"}\n\n'.encode())
    code = "import race_files; print(len(race_files.read_lines('mine.jsonl')))"
    there = {**os.environ, "PYTHONUTF8": "0", "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONPATH": str(ROOT)}
    assert subprocess.run([sys.executable, "-c", code], env=there, capture_output=True, text=True).stdout == "1\n"
    path.write_text('{"id": 1, "article": "a"}\n\n{"id": 2\n')
    with pytest.raises(SystemExit, match=r"mine.jsonl:3: not JSON"):
        eval_race.main(["--articles", "mine.jsonl", *bench])


@pytest.mark.parametrize("rows, words", [
    ([{"id": 9, "article": "a"}], r":1: no question"),
    ([{"id": 1, "article": "a"}, {"id": "1", "article": "b"}], r":2: a second report on question 1"),
    ([{"id": 1, "prompt": "another", "article": "a"}], r":1: its prompt is not that of question 1"),
    ([{"id": 1, "article": None}], r":1: field article"),
    ([{"id": True, "article": "a"}], r":1: field id"),
])  # fmt: skip
def test_reports_that_fit_no_question_are_named_with_their_line(bench, rows, words):
    with pytest.raises(SystemExit, match=r"mine.jsonl" + words):
        eval_race.main([*articles(rows), *bench])


def test_benchmark_files_that_do_not_belong_together_are_named(bench):
    files = dict(zip(bench[::2], map(Path, bench[1::2]), strict=True))
    for flag, change, words in (
        ("--criteria", lambda r: r["criterions"]["insight"][0].update(weight=-1), r"criteria.jsonl:1: insight, crit"),
        ("--criteria", lambda r: r.update(prompt="other"), r"criteria.jsonl:1: prompt is not that of question 1"),
        ("--reference", lambda r: r.update(id=77), r"reference.jsonl has no line for question 1"),
        ("--queries", lambda r: r.update(language="fr"), r"queries.jsonl:1: field language"),
    ):
        before = files[flag].read_text()
        rows = [json.loads(line) for line in before.splitlines()]
        change(rows[0])
        files[flag].write_text("".join(json.dumps(row) + "\n" for row in rows))
        with pytest.raises(SystemExit, match=words):
            eval_race.main([*articles(whole()), *bench])
        files[flag].write_text(before)
    with pytest.raises(SystemExit, match="gone.jsonl cannot be read.*--reference"):
        eval_race.main([*articles(whole()), *bench, "--reference", "gone.jsonl"])


def test_a_bad_reply_is_asked_again_three_times_then_the_question_fails_and_the_next_run_asks_it_alone(bench, capsys):
    good = json.dumps(race_bench.sheet(lambda n: (7, 7)))
    bad = {"1": [chat_reply(good, "m", finish="length"), chat_reply(good.replace("7", "11", 1), "m")], "3": []}

    def reply(asked):
        key = asked_about(asked)
        left = bad.get(key, [])
        if key == "3":
            return ok(chat_reply("cut " + good[:-9], "m"))
        return ok(left.pop(0) if left else chat_reply(good, "m"))

    with Peer(reply) as peer:
        assert judged(peer, *articles(whole()), *bench) == 1
        keys = [asked_about(asked) for asked in peer.asked]
        assert {key: keys.count(key) for key in set(keys)} == {"1": 3, "2": 1, "3": 3, "0": 1}
        assert results()["1"]["scores"]["overall"] == 0.5 and results()["3"]["failure"].startswith("no_scores")
        assert "INCOMPLETE: 1 of 4" in capsys.readouterr().out
        assert judged(peer, *articles(whole()), *bench) == 1
        assert [asked_about(asked) for asked in peer.asked[8:]] == ["3"] * 3
    errors = [row["error"] for _, row in race_files.read_lines("eval/mine/judge.jsonl") if row["id"] == "1"]
    assert errors == ["length", "bad_score", None]


def test_a_refused_key_stops_with_the_remedy_and_a_content_filter_fails_one_question(bench):
    with Peer((401, {}, {"error": {"message": "bad key"}})) as peer, pytest.raises(SystemExit, match="JUDGE_API_KEY"):
        judged(peer, *articles(whole()), *bench)
    with Peer(says(lambda key, n: (7, 7), finish="content_filter")) as peer:
        assert judged(peer, *articles(whole()), *bench, "--ids", "1,3") == 1
        assert len(peer.asked) == 2


def test_repeats_ask_again_and_report_the_spread(bench, capsys):
    count = iter(range(100))
    lock = threading.Lock()

    def score(key, n):
        with lock:
            return (5 + next(count) % 3, 5)

    with Peer(says(score)) as peer:
        assert judged(peer, *articles(whole()), *bench, "--repeats", 3) == 0
    assert len(peer.asked) == 12 and "judge noise" in capsys.readouterr().out
    row = results()["1"]
    assert row["scores"]["overall"] == pytest.approx(sum(r["overall"] for r in row["repeats"]) / 3)


def test_compare_refuses_two_models_and_accepts_one(bench, capsys):
    for name, model in (("one", "m"), ("two", "m"), ("dated", "m-2026-05-01")):
        reply = chat_reply(json.dumps(race_bench.sheet(lambda n: (7, 5))), model)
        with Peer(ok(reply)) as peer:
            assert judged(peer, *articles(whole(), f"{name}.jsonl"), *bench) == 0
    assert eval_race.main(["--compare", "one", "two"]) == 0
    assert "[+0.00, +0.00]" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="different models.*m-2026-05-01"):
        eval_race.main(["--compare", "one", "dated"])
    with pytest.raises(SystemExit, match="score that evaluation first"):
        eval_race.main(["--compare", "one", "none"])


def test_selections_and_command_lines_that_make_no_sense_are_refused(bench):
    for argv, words in ((["--ids", "1,8"], "no question has the id 8"), (["--lang", "zh", "--ids", "1"], "is left")):
        with pytest.raises(SystemExit, match=words):
            eval_race.main([*articles(whole()), *bench, *argv])
    for argv in ([], ["--run", "r", "--base", "--checkpoint", "step-000001"], ["--articles", "a", "--name", "a/b"]):
        with pytest.raises(SystemExit) as caught:
            eval_race.main(argv)
        assert caught.value.code == 2
    with pytest.raises(SystemExit, match="is --run the name of a run"):
        eval_race.main(["--run", "nobody", "--base"])


# ---- generating, and kills -----------------------------------------------------------------------------


@pytest.fixture
def run_folder(bench):
    """runs/r of the demo policy over four pages, without checkpoints; one slot, so that reports come one by one."""
    Path("corpus.jsonl").write_text("".join(json.dumps(page) + "\n" for page in PAGES))
    with use_demo():
        config.CORPUS_FILE, config.SLOTS, config.RESPONSE_TOKENS = "corpus.jsonl", 1, 300
        checkpoint.open_run("r", "train")
    config.EVAL_JUDGE_MODEL = ""
    return Path("runs/r")


def command(*argv):
    """eval_race.py as a process of its own, in the present folder."""
    return subprocess.Popen([sys.executable, str(ROOT / "eval_race.py"), *argv], stdout=subprocess.PIPE, text=True,
                            stderr=subprocess.DEVNULL)  # fmt: skip


def kill_when(process, path, lines):
    """SIGKILL as soon as the file has so many lines."""
    while not (Path(path).exists() and Path(path).read_bytes().count(b"\n") >= lines):
        assert process.poll() is None, "it ended before it was killed"
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()


def test_killed_while_generating_it_goes_on_and_gives_the_same(run_folder, bench):
    argv = ["--run", "r", "--base", *bench]
    whole_run = command(*argv, "--name", "whole")
    table = whole_run.communicate()[0]
    assert whole_run.returncode == 0 and "judge: rule" in table
    kill_when(command(*argv), "eval/r-base/reports.jsonl", 2)
    before = Path("eval/r-base/reports.jsonl").read_bytes()
    again = command(*argv)
    resumed = again.communicate()[0]
    assert again.returncode == 0 and resumed.replace("r-base", "whole").split() == table.split()
    assert 2 <= before.count(b"\n") < 4 and Path("eval/r-base/reports.jsonl").read_bytes().startswith(before)
    reports = [row for _, row in race_files.read_lines("eval/r-base/reports.jsonl")]
    assert sorted(row["id"] for row in reports) == ["0", "1", "2", "3"] and "transcript" in reports[0]
    with pytest.raises(SystemExit, match="holds another evaluation.*EVAL|holds another evaluation.*SEED"):
        config.EVAL_SEED = 7
        eval_race.main([str(a) for a in argv])


def test_killed_while_scoring_it_asks_only_what_is_missing(run_folder, bench):
    described = json.loads((run_folder / "config.json").read_text())
    scores, hold = says(lambda key, n: (n % 9, int(key) + 1)), threading.Event()
    config.EVAL_JUDGE_MODEL = "m"

    def reply(asked):
        if asked_about(asked) in "03" and not hold.is_set():
            hold.wait(30)
        return scores(asked)

    with Peer(reply) as peer:
        described["constants"] |= {"JUDGE_BACKEND": "openai", "JUDGE_URL": peer.url, "JUDGE_MODEL": "m"}
        (run_folder / "config.json").write_text(json.dumps(described))
        argv = ["--run", "r", *articles(whole()), *bench]
        kill_when(command(*argv), "eval/mine/judge.jsonl", 2)
        hold.set()
        first = len(peer.asked)
        resumed = command(*argv)
        table = resumed.communicate()[0]
        assert resumed.returncode == 0 and sorted(asked_about(a) for a in peer.asked[first:]) == ["0", "3"]
        uninterrupted = command(*argv, "--name", "whole").communicate()[0]
    assert table.replace("mine", "whole").split() == uninterrupted.split()
    assert {k: r["scores"] for k, r in results().items()} == {k: r["scores"] for k, r in results("whole").items()}


def test_a_run_gives_its_model_budgets_and_back_ends_and_the_benchmark_the_rest(run_folder):
    config.SEARCH_BACKEND, config.JUDGE_CONCURRENCY = "wikipedia", 3
    eval_race.restore(run_folder)
    assert config.SEARCH_BACKEND == "local" and config.MODEL.endswith("policy") and config.RESPONSE_TOKENS == 300
    assert (config.SEED, config.SEARCH_RESULTS, config.MAX_TOOL_CALLS) == (42, 3, 3)
    assert config.JUDGE_CONCURRENCY == 3  # changes no result, so the machine's own stands
    with pytest.raises(SystemExit, match="checkpoints there: none"):
        eval_race.resolve(eval_race.parse(["--run", "r", "--checkpoint", "step-000009"]))


def test_a_checkpoints_weights_write_the_reports_and_a_damaged_one_is_refused(run_folder, bench):
    argv = ["--run", "r", *bench, "--only", "generate", "--ids", "1"]
    assert eval_race.main([*argv, "--base"]) == 0  # restores the run's constants, which the policy below needs
    policy = Policy()
    with torch.no_grad():
        for name, parameter in policy.parameters.items():
            if "lora_B" in name:
                parameter.fill_(0.05)
    checkpoint.save(run_folder, 3, policy, checkpoint.make_optimizer(policy), {})
    assert eval_race.main(argv) == 0
    base, trained = (race_files.read_reports(Path("eval", f"r-{name}"))["1"] for name in ("base", "step-000003"))
    assert trained["policy_version"] == 3 and base["policy_version"] == 0
    assert trained["transcript"] != base["transcript"]
    with open(run_folder / "checkpoints" / "step-000003" / "adapter_model.safetensors", "ab") as file:
        file.write(b"x")
    with pytest.raises(SystemExit, match="differs from its hash"):
        eval_race.main([*argv, "--checkpoint", "step-000003"])


def test_the_demos_benchmark_gives_its_own_reference_full_marks(tmp_path):
    row = corpus.question_row("Benin", {"capital": "Porto-Novo", "currency": "CFA franc"})
    (tmp_path / "demo").mkdir()
    pq.write_table(pa.Table.from_pylist([row], corpus.SCHEMA), tmp_path / "demo" / "heldout.parquet")
    made = benchmark.build(tmp_path / "demo")
    (task,) = race_files.load_tasks(*(made / name for name in race_files.BENCHMARK_FILES.values()))
    assert task.reference == "The capital is Porto-Novo. The currency is CFA franc."
    marks = [entry for entries in race.rule_sheet(task, "The capital is Porto-Novo.").values() for entry in entries]
    assert {entry["article_2_score"] for entry in marks} == {10.0}
    assert [entry["article_1_score"] for entry in marks] == [10, 0, 10, 0, 10, 0, 10]


def test_a_missing_articles_file_is_named_with_its_flag(bench):
    with pytest.raises(SystemExit, match="none.jsonl cannot be read.*check --articles"):
        eval_race.main(["--articles", "none.jsonl", *bench])
