"""rollout.py with a scripted sampler and the real tokenizer: ids, masks, budgets, finishes, failure reports."""

import asyncio
import json

import pytest
from conftest import ROOT, use_demo
from fakes import QUESTION, FakeTools, ScriptedSampler
from transformers import AutoTokenizer

import config
from protocol import BUDGET_NOTICE
from records import Journal, Question, read_journal, trajectory_from_json
from reward import check_format
from rollout import Rollout
from sampler import Completion, SamplerError, check_completion

SEARCH = 'why</think>\n<call_tool name="google_search">capital of France</call_tool>'
AGAIN = "<think>more" + SEARCH[3:]
ANSWER = "<think>known</think>\n<answer>Paris.</answer><|im_end|>"


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(ROOT / "demo" / "policy")


@pytest.fixture(autouse=True)
def demo():
    with use_demo():
        config.MAX_TURNS, config.MAX_TOOL_CALLS, config.RESPONSE_TOKENS = 6, 4, 4000
        yield


def run(tokenizer, texts, tools=None, question=QUESTION, **request):
    """The trajectory of a policy that says `texts`, one a turn; and what the sampler was asked."""
    sampler = ScriptedSampler(tokenizer, texts)
    rollout = Rollout(sampler, tools or FakeTools(), tokenizer)
    return asyncio.run(rollout.run(question, 0, **{"step": 1, "version": 0, "slot": 0, **request})), sampler


def test_two_turns(tokenizer):
    trajectory, sampler = run(tokenizer, [SEARCH, ANSWER])
    assert trajectory.finish == "no_tool_call"
    assert [turn.tool_status for turn in trajectory.turns] == ["ok", ""]
    assert trajectory.turns[0].call.argument == "capital of France"
    assert check_format(trajectory.transcript).answer == "Paris."
    assert check_format(trajectory.transcript).reward == 1.0
    assert trajectory.transcript.startswith("<think>\nwhy</think>")
    assert set(trajectory.turn_index) == {0, 1}
    assert len({request["seed"] for request in sampler.requests}) == 2


def test_TOK_01_every_prompt_extends_the_one_before_by_what_was_sampled(tokenizer):
    """And the training row is exactly that concatenation; sampled ids are kept although encoding differs."""
    trajectory, sampler = run(tokenizer, [SEARCH, AGAIN, ANSWER])
    for before, after in zip(sampler.requests, sampler.requests[1:], strict=False):
        grown = before["prompt_ids"] + list(before["reply"].token_ids)
        assert after["prompt_ids"][: len(grown)] == grown
    last = sampler.requests[-1]
    row = list(trajectory.prompt_ids) + list(trajectory.token_ids)
    assert row == last["prompt_ids"] + list(last["reply"].token_ids)
    sampled = [i for i, m in zip(trajectory.token_ids, trajectory.loss_mask, strict=True) if m]
    assert sampled == [i for request in sampler.requests for i in request["reply"].token_ids]
    # the scripted sampler spells text letter by letter, which no encoder would do
    assert sampled != tokenizer.encode("".join(turn.text for turn in trajectory.turns), add_special_tokens=False)


def test_TOK_03_a_cut_stop_tag_is_still_a_call(tokenizer):
    """ids run past the tag, the text is cut before it: the call runs, once, and nothing is appended to the ids."""
    sampler = ScriptedSampler(tokenizer, [SEARCH, ANSWER])
    sampler.cut_stop_tag = True
    tools = FakeTools()
    trajectory = asyncio.run(Rollout(sampler, tools, tokenizer).run(QUESTION, 0, step=1, version=0, slot=0))
    assert [call.argument for call in tools.calls] == ["capital of France"]
    assert trajectory.transcript.count("</call_tool>") == 1
    assert len(trajectory.token_ids) == len(trajectory.logprobs) == len(trajectory.loss_mask)


def test_TOK_04_a_call_cut_by_the_budget_does_not_run(tokenizer):
    tools = FakeTools()
    sampler = ScriptedSampler(tokenizer, [SEARCH])
    config.RESPONSE_TOKENS = 20
    trajectory = asyncio.run(Rollout(sampler, tools, tokenizer).run(QUESTION, 0, step=1, version=0, slot=0))
    assert trajectory.finish == "max_tokens" and not tools.calls
    assert len(trajectory.token_ids) == 20 and trajectory.turns[0].call is None


def test_TOK_05_no_role_header_between_tool_output_and_next_turn(tokenizer):
    trajectory, _ = run(tokenizer, [SEARCH, AGAIN, ANSWER])
    inside = tokenizer.decode(trajectory.token_ids[:-1])
    assert "<|im_end|>" not in inside and "<|im_start|>" not in inside


def test_TOK_06_earlier_thoughts_stay_byte_for_byte(tokenizer):
    trajectory, sampler = run(tokenizer, ["plan-7731 " + SEARCH, AGAIN, ANSWER])
    assert "plan-7731" in tokenizer.decode(sampler.requests[-1]["prompt_ids"])
    assert "plan-7731" in tokenizer.decode(trajectory.token_ids)


@pytest.mark.parametrize("written", ["", "<think>", "\n<think>\n"])
def test_TOK_07_thinking_opened_by_the_prompt_by_the_policy_or_by_both(tokenizer, written):
    trajectory, _ = run(tokenizer, [written + SEARCH, ANSWER])
    assert trajectory.turns[0].call.name == "google_search"
    assert check_format(trajectory.transcript).reward == 1.0
    think = tokenizer.convert_tokens_to_ids("<think>")
    assert think in trajectory.prompt_ids  # the prompt's own tag is context


def test_PROTO_01_a_call_inside_open_thinking_is_answered_by_an_error(tokenizer):
    tools = FakeTools()
    trajectory, _ = run(tokenizer, ['<call_tool name="google_search">private</call_tool>', ANSWER], tools)
    assert tools.calls[0].fault and trajectory.turns[0].tool_status == "error:bad_call"


def test_TOK_08_end_markers_never_reach_the_text(tokenizer):
    trajectory, _ = run(tokenizer, ["t</think>\n<answer>Report body.</answer><|im_end|>"])
    assert trajectory.turns[0].text.endswith("</answer>")
    assert check_format(trajectory.transcript).answer == "Report body."
    assert trajectory.loss_mask[-1] == 1  # but the sampled end token is trained on


def test_TOK_13_nothing_in_the_prompt_is_trained_on(tokenizer):
    example = Question(
        "q", 'Example: <call_tool name="google_search">demo</call_tool> real question?', QUESTION.rubrics
    )
    trajectory, sampler = run(tokenizer, [ANSWER], question=example)
    assert sum(trajectory.loss_mask) == len(sampler.requests[0]["reply"].token_ids) == len(trajectory.token_ids)


def test_mask_and_logprobs(tokenizer):
    trajectory, _ = run(tokenizer, [SEARCH, ANSWER])
    assert [logprob != 0 for logprob in trajectory.logprobs] == [mask == 1 for mask in trajectory.loss_mask]
    observed = [i for i, m in zip(trajectory.token_ids, trajectory.loss_mask, strict=True) if not m]
    assert tokenizer.decode(observed) == trajectory.turns[0].observation


def test_PROTO_09_a_failing_tool_is_called_four_times_and_told_so(tokenizer):
    trajectory, _ = run(tokenizer, [SEARCH] + [AGAIN] * 5, FakeTools(status="error:outage"))
    assert trajectory.finish == "max_tools"
    assert [turn.tool_status for turn in trajectory.turns] == ["error:outage"] * 4 + [""]
    assert [BUDGET_NOTICE in turn.observation for turn in trajectory.turns] == [False, False, False, True, False]
    assert trajectory.turns[3].observation.rstrip().endswith("</tool_output>")


def test_the_last_turn_is_never_answered(tokenizer):
    config.MAX_TURNS = 3
    trajectory, _ = run(tokenizer, [SEARCH] + [AGAIN] * 3)
    assert trajectory.finish == "max_turns" and len(trajectory.turns) == 3
    assert [BUDGET_NOTICE in turn.observation for turn in trajectory.turns] == [False, True, False]


def test_an_observation_beyond_the_budget_is_left_out(tokenizer):
    config.RESPONSE_TOKENS = 120
    trajectory, _ = run(tokenizer, [SEARCH, ANSWER], FakeTools(text="long " * 100))
    assert trajectory.finish == "max_tokens" and len(trajectory.token_ids) < 120
    assert trajectory.turns[0].tool_status == "ok" and trajectory.turns[0].observation == ""


def test_an_end_without_call_is_no_tool_call_whatever_it_says(tokenizer):
    trajectory, _ = run(tokenizer, ["I give up<|im_end|>"])
    assert trajectory.finish == "no_tool_call" and check_format(trajectory.transcript).answer == ""


def test_a_deadline_is_an_infrastructure_failure(tokenizer):
    config.TRAJECTORY_DEADLINE = 0.02
    trajectory, _ = run(tokenizer, [SEARCH, ANSWER], FakeTools(delay=1))
    assert trajectory.finish == "error:deadline" and trajectory.broken


@pytest.mark.parametrize(
    ("logprobs", "kind"),
    [
        ((-0.1, None), "logprobs"),
        ((-0.1, -9999.0), "logprobs"),
        ((-0.1, float("nan")), "logprobs"),
        ((-0.1,), "lengths"),
    ],
)
def test_LOSS_12_odd_logprobs_are_infrastructure_failures(tokenizer, logprobs, kind, caplog):
    reply = Completion((11, 12), logprobs, "ab", "stop", None)
    with pytest.raises(SamplerError) as caught:
        check_completion(reply)
    assert caught.value.kind == kind
    sampler = ScriptedSampler(tokenizer, [])
    sampler.fixed = reply
    trajectory = asyncio.run(Rollout(sampler, FakeTools(), tokenizer).run(QUESTION, 0, step=1, version=0, slot=0))
    assert trajectory.finish == f"error:{kind}"
    assert "q1/0" in caplog.text  # what went wrong is said, not only counted


def test_TOK_09_unequal_lists_are_refused_by_name(tokenizer):
    trajectory, _ = run(tokenizer, [ANSWER])
    record = {**vars(trajectory), "loss_mask": trajectory.loss_mask[:-3]}
    with pytest.raises(ValueError, match="q1/0.*must be equal"):
        type(trajectory)(**record)


def test_a_journaled_trajectory_comes_back_equal(tokenizer, tmp_path):
    trajectory, _ = run(tokenizer, [SEARCH, ANSWER])
    journal = Journal(tmp_path / "step.jsonl")
    journal.append(trajectory)
    ((_, record),) = read_journal(tmp_path / "step.jsonl")
    assert trajectory_from_json(json.loads(json.dumps(record))) == trajectory


def test_seeds_differ_by_step_question_and_k(tokenizer):
    def first_seed(**request):
        return run(tokenizer, [ANSWER], **request)[1].requests[0]["seed"]

    other = Question("q2", QUESTION.query, QUESTION.rubrics)
    seeds = {first_seed(), first_seed(step=2), first_seed(question=other)}
    assert len(seeds) == 3 and first_seed() in seeds
