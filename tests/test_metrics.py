"""metrics.py: names and means of a step, and a tracker that can neither stop nor delay training."""

import json
import math
import time

import pytest
from fakes import QUESTION, trajectory

import config
import metrics
from metrics import Clock, Tracker, drop_uncommitted, group_metrics, step_line
from records import ScoredGroup, ToolCall, Turn, read_journal


def scored(rewards, finishes, answers=None):
    members = tuple(trajectory("abc", k, finish) for k, finish in enumerate(finishes))
    values = tuple(rewards)
    answers = answers or ("yes",) * len(values)
    return ScoredGroup(QUESTION, members, tuple(answers), (1.0,) * len(values), values, values, values)


def test_means_leave_broken_trajectories_out():
    values = group_metrics([scored([1.0, math.nan, 0.0], ["no_tool_call", "error:engine", "max_turns"], ("a", "", ""))])
    assert values["reward/total"] == 0.5 and values["reward/has_answer"] == 0.5
    assert values["rollout/finish_error"] == values["rollout/finish_max_turns"] == pytest.approx(1 / 3)
    assert values["reward/degenerate_group_rate"] == 0.0 and values["reward/tournament_group_var"] == 0.5
    assert values["rollout/response_tokens"] == 3


def test_degenerate_groups_are_counted():
    groups = [scored([0.5, 0.5], ["no_tool_call"] * 2), scored([0.5, 0.6], ["no_tool_call"] * 2)]
    assert group_metrics(groups)["reward/degenerate_group_rate"] == 0.5


def test_calls_are_per_trajectory_and_errors_per_call():
    search, page = ToolCall("google_search", "q"), ToolCall("browse_webpage", "u")
    turns = (
        Turn("", search, "x", "ok"),
        Turn("", page, "x", "error:timeout"),
        Turn("", search, "x", "ok"),
        Turn("", search),
    )
    one = scored([0.0, 1.0], ["no_tool_call"] * 2)
    busy = type(one.trajectories[0])(**{**vars(one.trajectories[0]), "turns": turns})
    values = group_metrics([ScoredGroup(**{**vars(one), "trajectories": (busy, one.trajectories[1])})])
    assert (values["rollout/search_calls"], values["rollout/browse_calls"]) == (1.0, 0.5)
    assert values["tools/error_rate"] == pytest.approx(1 / 3)


def test_every_metric_fits_into_json():
    """Even when every trajectory broke."""
    values = group_metrics([scored([math.nan] * 2, ["error:engine"] * 2)])
    assert json.loads(json.dumps(values, allow_nan=False)) == values


def log_two(tmp_path):
    tracker = Tracker(tmp_path, {"A": 1})
    started = time.perf_counter()
    for step in (1, 2):
        tracker.log(step, {"reward/total": step / 2})
    assert time.perf_counter() - started < 1  # nobody waits for a tracker
    tracker.close()
    return [line for _, line in read_journal(tmp_path / "metrics.jsonl")]


def test_swanlab_local_mode_writes_a_viewable_run(tmp_path, monkeypatch):
    monkeypatch.delenv("SWANLAB_API_KEY", raising=False)
    assert log_two(tmp_path) == [{"step": 1, "reward/total": 0.5}, {"step": 2, "reward/total": 1.0}]
    assert (tmp_path / "swanlab" / "runs.swanlab").exists()


def test_a_tracker_that_fails_loses_nothing(tmp_path, monkeypatch, caplog):
    import swanlab

    def refuse(**_):
        raise RuntimeError("no account")

    monkeypatch.setattr(swanlab, "init", refuse)
    assert len(log_two(tmp_path)) == 2
    assert "no account" in caplog.text and "metrics.jsonl has everything" in caplog.text


def test_a_tracker_that_hangs_delays_only_the_end_and_not_for_long(tmp_path, monkeypatch):
    import swanlab

    monkeypatch.setattr(swanlab, "init", lambda **_: time.sleep(60))
    monkeypatch.setattr(metrics, "CLOSE_SECONDS", 0.2)
    started = time.perf_counter()
    assert len(log_two(tmp_path)) == 2
    assert time.perf_counter() - started < 5


def test_lines_of_steps_that_were_never_committed_are_dropped(tmp_path):
    config.TRACKER = "none"
    log_two(tmp_path)
    drop_uncommitted(tmp_path, 1)
    assert [line["step"] for _, line in read_journal(tmp_path / "metrics.jsonl")] == [1]


def test_step_line_names_rewards_calls_and_time():
    clock = Clock()
    clock.lap("update")
    line = step_line(2, group_metrics([scored([1.0, 0.0], ["no_tool_call"] * 2)]), 56, clock)
    for words in ("step 2/20", "reward 0.500", "answers 1.000", "judge calls 56", "update 0.0s", "left"):
        assert words in line
