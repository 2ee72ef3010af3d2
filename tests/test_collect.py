"""collect.py: refused groups are void once and for all, too many losses stop, paid work is kept."""

import asyncio

import pytest
from fakes import QUESTION, ScriptedJudge, trajectory

import config
from collect import collect
from judge import JudgeError, JudgeRefusal
from records import Question, read_journal

GOOD = "<think>t</think><answer>a</answer>"


class FakeRollout:
    """Finishes every trajectory at once; keeps what it was asked for."""

    def __init__(self, finish="no_tool_call"):
        self.asked, self.finish = [], finish

    async def run(self, question, k, *, step, version, slot):
        self.asked.append((question.id, k))
        return trajectory(GOOD, k, self.finish, question.id)


class Judge(ScriptedJudge):
    """Refuses, or fails on, the named questions."""

    def __init__(self, refused=(), failing=()):
        super().__init__(lambda answers, number: list(range(number)))
        self.refused, self.failing, self.voided = refused, failing, set()

    async def pick(self, *match, place):
        if place["question_id"] in self.refused:
            raise JudgeRefusal("too long")
        if place["question_id"] in self.failing:
            raise JudgeError("no verdict")
        return await super().pick(*match, place=place)


QUESTIONS = [Question(f"q{i}", "query", QUESTION.rubrics) for i in range(8)]


@pytest.fixture(autouse=True)
def small():
    config.K = 2


def run(folder, rollout, judge, version=0):
    return asyncio.run(collect(QUESTIONS, rollout, judge, folder, 1, version))


def test_a_refused_group_is_void_and_the_rest_trains(tmp_path):
    judge = Judge(refused=("q3",))
    groups, refused = run(tmp_path, FakeRollout(), judge)
    assert [group.question.id for group in groups] == ["q0", "q1", "q2", "q4", "q5", "q6", "q7"] and refused == 1
    (void,) = [line for line in judge.lines if line["kind"] == "void"]
    assert (void["question_id"], void["reason"]) == ("q3", "too long")
    again = Judge()
    again.voided = {(1, "q3")}
    assert run(tmp_path, FakeRollout(), again)[1] == 1
    assert all(place["question_id"] != "q3" for place in again.places)


def test_many_refusals_stop_the_run(tmp_path):
    with pytest.raises(SystemExit, match="refused 3 of 8 groups"):
        run(tmp_path, FakeRollout(), Judge(refused=("q1", "q2", "q3")))


def test_many_broken_trajectories_stop_the_run_with_their_kinds(tmp_path):
    with pytest.raises(SystemExit, match=r"16 of 16 trajectories broke \(error:server\)"):
        run(tmp_path, FakeRollout("error:server"), Judge())


def test_a_failing_judge_stops_the_step_after_the_others_have_finished(tmp_path):
    judge = Judge(failing=("q0",))
    with pytest.raises(JudgeError):
        run(tmp_path, FakeRollout(), judge)
    assert len([line for line in judge.lines if line["kind"] == "scored"]) == 7


def test_journaled_trajectories_are_kept_broken_and_older_ones_made_again(tmp_path):
    first = FakeRollout()
    run(tmp_path, first, Judge())
    assert len(first.asked) == 16
    second = FakeRollout()
    run(tmp_path, second, Judge())
    assert second.asked == []
    third = FakeRollout()
    run(tmp_path, third, Judge(), version=1)  # those were of version 0
    assert len(third.asked) == 16
    assert len(list(read_journal(tmp_path / "rollouts" / "step-000001.jsonl"))) == 32
