"""The rollout tree of MT-GRPO's exact form: shared histories, the bound, credit among siblings, resuming."""

import asyncio
import dataclasses
import math

import pytest
import torch
from conftest import use_demo
from fakes import QUESTION, FakeTools, ScriptedJudge

import checkpoint
import collect as collecting
import config
import preflight
from collect import collect
from credit import mt_grpo_advantages, tree_advantages
from policy import Policy, load_tokenizer
from records import Question, read_journal, seed_from, trajectory_from_json
from rollout import Rollout
from sampler import Completion, InProcessSampler
from update import build_batch, update

SEARCH = '</think>\n<call_tool name="google_search">capital France</call_tool>'
ANSWER = "</think>\n<answer>Paris</answer>"


@pytest.fixture(autouse=True)
def tree():
    with use_demo():
        config.ROLLOUT_TREE, config.CREDIT, config.REWARD_SCHEME = True, "mt_grpo", "exact_match"
        config.K, config.MAX_TURNS, config.MAX_TOOL_CALLS = 2, 3, 4
        yield


class Babbling:
    """Says a word that depends on the seed alone, then searches; answers where `stops(history length)` says so."""

    def __init__(self, stops=lambda length: False):
        self.tokenizer, self.stops, self.asked = load_tokenizer(), stops, []

    async def sample(self, prompt_ids, *, max_tokens, temperature, seed, slot):
        self.asked.append((len(prompt_ids), seed, slot))
        await asyncio.sleep(0.001 * (seed % 5))
        ends = self.stops(len(prompt_ids))
        text = f"{seed % 10_000}{ANSWER if ends else SEARCH}"
        ids = tuple(self.tokenizer.encode(text, add_special_tokens=False))
        return Completion(ids, (-0.5,) * len(ids), text, "stop", None if ends else "</call_tool>")


def grow(sampler, **changed):
    for name, value in changed.items():
        setattr(config, name, value)
    rollout = Rollout(sampler, FakeTools(), sampler.tokenizer)
    return asyncio.run(rollout.run_tree(QUESTION, step=1, version=0, slot=0))


@pytest.mark.parametrize(("k", "turns", "leaves"), [(8, 2, 8), (3, 3, 9), (2, 4, 8)])
def test_a_tree_has_as_many_leaves_as_announced_and_shares_histories(k, turns, leaves):
    sampler = Babbling()
    grown = grow(sampler, K=k, MAX_TURNS=turns, TREE_LEAVES=64)
    assert len(grown) == leaves and [t.k for t in grown] == list(range(leaves))
    assert [t.path for t in grown] == sorted(t.path for t in grown) and {len(t.path) for t in grown} == {turns - 1}
    assert all(t.finish == "max_turns" and len(t.turns) == turns for t in grown)
    for a in grown:
        for b in grown:
            shared = next((i for i, (x, y) in enumerate(zip(a.path, b.path, strict=True)) if x != y), turns)
            first = [i for i, turn in enumerate(a.turn_index) if turn < shared]
            assert [a.token_ids[i] for i in first] == [b.token_ids[i] for i in first]
            if a is not b:
                assert a.turns[:shared] == b.turns[:shared] and a.turns[shared] != b.turns[shared]
    assert len(sampler.asked) == sum(k**turn for turn in range(1, turns)) + leaves  # every state once, leaves once more


def test_concurrent_branches_stand_in_slots_of_their_own():
    sampler = Babbling()
    grow(sampler, K=3, MAX_TURNS=3)
    last = [slot for length, _, slot in sampler.asked if length == max(length for length, _, _ in sampler.asked)]
    assert len(set(last)) == len(last)
    first = [slot for length, _, slot in sampler.asked if length == min(length for length, _, _ in sampler.asked)]
    assert first == [0, 3, 6]


def test_a_branch_that_ends_early_is_one_leaf():
    prompt = len(Rollout(None, None, load_tokenizer()).prompt(QUESTION.query)[0])
    grown = grow(Babbling(stops=lambda length: length == prompt))
    assert [t.path for t in grown] == [(0,), (1,)] and all(t.finish == "no_tool_call" for t in grown)


def test_a_tree_beyond_the_bound_is_refused_before_anything_is_sampled():
    config.SAMPLER = "in_process"
    config.K, config.MAX_TURNS = 8, 6
    (problem,) = preflight.config_problems()
    assert "8 ** 4 = 4,096 leaves" in problem and "TREE_LEAVES = 64" in problem and "raise TREE_LEAVES" in problem
    config.MAX_TURNS = 3
    assert preflight.config_problems() == []
    config.CREDIT, config.REWARD_SCHEME = "merged", "anchor"
    assert len(preflight.config_problems()) == 2


def test_two_turns_are_the_chains_form():
    generator = torch.Generator().manual_seed(2)
    turns = torch.randn(8, 1, dtype=torch.float64, generator=generator)
    outcome = torch.randn(8, dtype=torch.float64, generator=generator)
    turns[5, 0] = math.nan  # answered at once
    paths = [(k,) for k in range(8)]
    ours = tree_advantages(paths, turns, outcome, 0.7)
    assert torch.equal(ours, mt_grpo_advantages(turns, outcome, 0.7))


def test_three_turns_by_hand():
    """K = 2: two first turns (rewards 1 and 0); under each two second ones; of two numbers the deviation is ±0.7071."""
    paths = [(0, 0), (0, 1), (1, 0), (1, 1)]
    turns = torch.tensor([[1.0, 0.5], [1.0, 0.1], [0.0, 0.3], [0.0, 0.3]])
    outcome = torch.tensor([1.0, 0.2, 0.2, 1.0])
    ours = tree_advantages(paths, turns, outcome, 0.5)
    h = 0.5**0.5
    last = [h, -h, -h, h]
    second = [h + 0.5 * h, -h - 0.5 * h, 0 - 0.5 * h, 0 + 0.5 * h]
    first = [h + 0.5 * second[0], h + 0.5 * second[1], -h + 0.5 * second[2], -h + 0.5 * second[3]]
    assert ours.tolist() == [pytest.approx(row, abs=1e-4) for row in zip(first, second, last, strict=True)]


def test_a_sibling_that_went_on_counts_with_the_mean_of_its_leaves_and_a_broken_one_not_at_all():
    paths = [(0, 0), (0, 1), (1,)]  # the second branch answered at its first turn
    turns = torch.tensor([[0.4, 0.3], [0.4, 0.1], [math.nan, math.nan]])
    ours = tree_advantages(paths, turns, torch.tensor([1.0, 0.0, 0.2]), 1.0)
    h = 0.5**0.5
    assert ours[2].tolist() == pytest.approx([-h, 0, 0], abs=1e-4)  # 0.2 against the mean 0.5
    assert ours[0].tolist() == pytest.approx([2 * h, 2 * h, h], abs=1e-4)  # its first turn has no sibling with a reward
    broken = tree_advantages(paths, turns, torch.tensor([1.0, math.nan, 0.2]), 1.0)
    assert broken[1].tolist() == [0, 0, 0] and broken[0, 2] == 0


@pytest.fixture
def world(tmp_path):
    question = Question("q1", QUESTION.query, QUESTION.rubrics, "test", ("Paris",))
    judge = ScriptedJudge(lambda answers, winners: list(range(winners)))
    judge.voided = set()
    return question, judge, tmp_path


def test_a_whole_tree_is_kept_and_a_cut_one_grown_again(world):
    question, judge, folder = world
    sampler = Babbling()
    rollout = Rollout(sampler, FakeTools(), sampler.tokenizer)

    def once():
        return asyncio.run(collect([question], rollout, judge, folder, 1, 0))[0][0]

    first, asked = once(), len(sampler.asked)
    assert len(first.trajectories) == 4 and len(first.turn_rewards) == 4
    assert once().trajectories == first.trajectories and len(sampler.asked) == asked
    path = folder / "rollouts" / "step-000001.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:3]))
    assert once().trajectories == first.trajectories and len(sampler.asked) == 2 * asked
    kept = [trajectory_from_json(line) for _, line in read_journal(path)]
    assert [t.k for t in kept] == [0, 1, 2, 0, 1, 2, 3]
    assert once().trajectories == first.trajectories and len(sampler.asked) == 2 * asked


@pytest.mark.parametrize(
    ("paths", "whole"),
    [
        ([(0,), (1,)], True), ([(0,)], False), ([], False), ([(0, 0), (0, 1), (1,)], True), ([(0, 0), (1,)], False),
        ([(0, 0), (0, 1), (1, 0), (1, 1)], True), ([(0, 0), (0, 1), (1, 0)], False),
    ],
)  # fmt: skip
def test_which_leaves_make_a_whole_tree(paths, whole):
    assert collecting._is_whole(paths) == whole


def test_the_demo_policy_learns_from_a_tree(world):
    question, judge, folder = world
    policy = Policy()
    sampler = InProcessSampler(policy)
    rollout = Rollout(sampler, FakeTools("The capital is Paris."), policy.tokenizer)

    async def collected():
        await sampler.publish(0)
        questions = [dataclasses.replace(question, id=f"q{n}") for n in range(6)]
        return await collect(questions, rollout, judge, folder, 1, 0)

    groups, _ = asyncio.run(collected())
    assert all(2 <= len(group.trajectories) <= 4 and all(t.path for t in group.trajectories) for group in groups)
    batch = build_batch(groups, 1)
    assert batch.tokens == sum(sum(t.loss_mask) for group in groups for t in group.trajectories)
    assert batch.rows and update(policy, checkpoint.make_optimizer(policy), batch)["train/gradient_norm"] > 0
    assert groups[0].trajectories[0].seed == seed_from(config.SEED, 1, "q0", "tree")
