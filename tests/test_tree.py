"""The rollout tree of MT-GRPO's exact form: shared histories, the bound, credit among siblings, resuming."""

import asyncio
import dataclasses
import math
import statistics

import pytest
import torch
from conftest import use_demo
from fakes import QUESTION, FakeTools, ScriptedJudge
from hypothesis import given
from hypothesis import strategies as st
from tqdm import tqdm

import checkpoint
import collect as collecting
import config
import preflight
import train
from collect import collect
from credit import mt_grpo_advantages, pad_turn_rewards, tree_advantages
from policy import Policy, load_tokenizer
from records import Question, ScoredGroup, read_journal, seed_from, trajectory_from_json
from rollout import Rollout, most_trajectories
from sampler import Completion, InProcessSampler, SamplerError
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
    assert len(grown) == leaves == most_trajectories() and [t.k for t in grown] == list(range(leaves))
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


def test_a_branch_over_its_token_budget_is_one_leaf():
    whole = grow(Babbling())
    first = max(sum(1 for i in t.turn_index if i == 0) for t in whole)
    cut = grow(Babbling(), RESPONSE_TOKENS=first - 1)  # no room for the first observation of the longer branch
    assert any(t.finish == "max_tokens" and len(t.path) == 1 and len(t.turns) == 1 for t in cut)
    assert all(len(t.token_ids) <= first - 1 for t in cut)


class Failing(Babbling):
    """Breaks, or takes `seconds` longer, on the requests that `fails(slot, history length)` picks."""

    def __init__(self, fails, seconds=None):
        super().__init__()
        self.fails, self.seconds = fails, seconds

    async def sample(self, prompt_ids, **request):
        completion = await super().sample(prompt_ids, **request)
        if self.fails(request["slot"], len(prompt_ids)):
            if self.seconds is None:
                raise SamplerError("server", "scripted")
            await asyncio.sleep(self.seconds)
        return completion


@pytest.mark.parametrize(("seconds", "deadline", "kind"), [(None, 60, "server"), (30, 2, "deadline")])
def test_a_broken_branch_is_one_leaf_and_the_others_go_on(seconds, deadline, kind):
    prompt = len(Rollout(None, None, load_tokenizer()).prompt(QUESTION.query)[0])
    grown = grow(Failing(lambda slot, length: (slot, length) == (2, prompt), seconds), TRAJECTORY_DEADLINE=deadline)
    assert [(t.k, t.path, t.finish) for t in grown] == [
        (0, (0, 0), "max_turns"), (1, (0, 1), "max_turns"), (2, (1,), f"error:{kind}")]  # fmt: skip


def test_a_tree_beyond_the_bound_is_refused_before_anything_is_sampled():
    config.SAMPLER = "in_process"
    config.K, config.MAX_TURNS = 8, 6
    (problem,) = preflight.config_problems()
    assert "8 ** 4 = 4,096 leaves" in problem and "TREE_LEAVES = 64" in problem and "raise TREE_LEAVES" in problem
    config.MAX_TURNS = 1
    assert "2 turns or more" in preflight.config_problems()[0]
    config.MAX_TURNS = 3
    assert preflight.config_problems() == []
    config.CREDIT, config.REWARD_SCHEME, config.TURN_COUNT_BASELINE = "merged", "anchor", "corrected"
    for name, problem in zip(("CREDIT", "REWARD_SCHEME", "TURN_COUNT"), preflight.config_problems(), strict=True):
        assert name in problem


def test_training_with_a_tree_beyond_the_bound_ends_before_a_sampler_is_made(monkeypatch):
    def fail(*_, **__):
        raise AssertionError("a sampler was made")

    monkeypatch.setattr(train, "InProcessSampler", fail)
    config.TREE_LEAVES = 3
    with pytest.raises(SystemExit, match=r"2 \*\* 2 = 4 leaves a question.*TREE_LEAVES = 3"):
        train.main([])


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


def test_equal_rewards_tie_exactly_however_many_leaves_stand_below():
    paths = [(0, 0), (0, 1), (0, 2), (1, 0, 0), (1, 0, 1), (1, 0, 2), (1, 1), (1, 2), (2,)]
    turns = pad_turn_rewards([[0.1]] * 3 + [[0.1, 0.2]] * 3 + [[0.1]] * 2 + [[]])
    assert not tree_advantages(paths, turns, [0.1] * 9, 1.0).any()


REWARDS = st.sampled_from([-0.3, 0.0, 0.1, 0.4, 1.0])
END = st.one_of(REWARDS, st.just(math.nan))
LAST = st.tuples(REWARDS, st.tuples(END))
INNER = st.one_of(END, st.tuples(REWARDS, st.tuples(*[st.one_of(END, LAST)] * 3)))


@given(st.tuples(INNER, INNER, INNER), st.sampled_from([0.0, 0.5, 1.0]))
def test_tree_advantages_equal_a_walk_down_the_tree(roots, alpha):
    """On nested tuples, node = outcome | (turn reward, children), three children or, below the last branching, one."""
    paths, rewards, outcomes, expected = [], [], [], []

    def ends(node):
        found = [node] if isinstance(node, float) else [end for child in node[1] for end in ends(child)]
        return [end for end in found if not math.isnan(end)]

    def among(values, mine):
        if len(values) < 2 or len(set(values)) == 1:
            return 0.0
        return (mine - statistics.mean(values)) / (statistics.stdev(values) + config.ADVANTAGE_EPS)

    def walk(siblings, path, earned, own, branches):
        means = [statistics.mean(ends(sibling)) for sibling in siblings if ends(sibling)]
        going = [sibling[0] for sibling in siblings if not isinstance(sibling, float) and ends(sibling)]
        for number, node in enumerate(siblings):
            place = (*path, number) if branches else path
            outcome = among(means, statistics.mean(ends(node))) if ends(node) else 0.0
            if isinstance(node, tuple):
                step = (among(going, node[0]) if ends(node) else 0.0, outcome)
                walk(node[1], place, [*earned, node[0]], [*own, step], len(node[1]) > 1)
                continue
            levels = [a for a, _ in own] + [outcome if branches else own[-1][1]]  # unbranched: of the turn before
            sums = [sum(alpha ** (j - i) * levels[j] for j in range(i, len(levels))) for i in range(len(levels))]
            paths.append(place), rewards.append(earned), outcomes.append(node)
            expected.append([0.0] * len(levels) if math.isnan(node) else sums)

    walk(roots, (), [], [], True)
    turns = pad_turn_rewards(rewards)
    ours = tree_advantages(paths, turns, outcomes, alpha).tolist()
    for row, wanted in zip(ours, expected, strict=True):
        assert row == pytest.approx([*wanted, *[0.0] * (len(row) - len(wanted))], rel=1e-9, abs=1e-9)


def test_a_journal_line_from_before_there_were_trees_is_a_chain():
    leaf = grow(Babbling())[1]
    line = dataclasses.asdict(leaf)
    assert leaf.path == (0, 1) and trajectory_from_json({**line, "path": [0, 1]}) == leaf
    del line["path"]
    assert trajectory_from_json(line).path == ()


@pytest.fixture
def world(tmp_path):
    question = Question("q1", QUESTION.query, QUESTION.rubrics, "test", ("Paris",))
    judge = ScriptedJudge(lambda answers, winners: list(range(winners)))
    judge.voided = set()
    return question, judge, tmp_path


def test_a_whole_tree_is_kept_and_a_cut_a_broken_and_an_older_one_grown_again(world):
    question, judge, folder = world
    sampler = Babbling()
    rollout = Rollout(sampler, FakeTools(), sampler.tokenizer)

    def once(version=0):
        before = len(sampler.asked)
        (group,), _ = asyncio.run(collect([question], rollout, judge, folder, 1, version))
        return group.trajectories, len(sampler.asked) - before

    first, asked = once()
    assert len(first) == 4 and asked == 10
    assert once() == (first, 0)
    path = folder / "rollouts" / "step-000001.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:3]))
    assert once() == (first, asked)
    kept = [trajectory_from_json(line) for _, line in read_journal(path)]
    assert [t.k for t in kept] == [0, 1, 2, 0, 1, 2, 3]
    assert once() == (first, 0)
    path.write_text(path.read_text().replace("max_turns", "error:server", 4))  # of the last tree, its first leaf
    assert once() == (first, asked) and once() == (first, 0)
    assert once(version=1)[1] == asked


def test_the_bar_counts_the_leaves_that_a_full_tree_has(world, monkeypatch):
    question, judge, folder = world
    bars = []
    monkeypatch.setattr(
        collecting, "tqdm", lambda **settings: bars.append(tqdm(**settings | {"disable": False})) or bars[-1]
    )
    prompt = len(Rollout(None, None, load_tokenizer()).prompt(QUESTION.query)[0])
    sampler = Babbling(stops=lambda length: length == prompt)  # so this tree has two leaves
    asyncio.run(collect([question], Rollout(sampler, FakeTools(), sampler.tokenizer), judge, folder, 1, 0))
    assert (bars[0].n, bars[0].total) == (4, 4)


def test_the_batch_trains_on_the_advantages_of_the_tree(world):
    question, judge, folder = world
    leaves = grow(Babbling())
    turns, outcomes = ((0.3, 0.1), (0.3, 0.2), (0.0, 0.4), (0.0, -0.1)), (1.0, 0.2, 0.2, -1.0)
    group = ScoredGroup(question, tuple(leaves), ("",) * 4, outcomes, outcomes, outcomes, outcomes, turns)
    expected = tree_advantages([t.path for t in leaves], turns, outcomes, config.TURN_ALPHA)
    assert not torch.equal(expected, mt_grpo_advantages(turns, outcomes, config.TURN_ALPHA))
    for row, leaf, wanted in zip(build_batch([group], 1).rows, leaves, expected.float(), strict=True):
        assert torch.equal(
            row.advantages, wanted[[t for t, m in zip(leaf.turn_index, leaf.loss_mask, strict=True) if m]]
        )


@pytest.mark.parametrize(
    ("paths", "whole"),
    [
        ([(0,), (1,)], True), ([(0,)], False), ([], False), ([(0, 0), (0, 1), (1,)], True), ([(0, 0), (1,)], False),
        ([(0, 0), (0, 1), (1, 0), (1, 1)], True), ([(0, 0), (0, 1), (1, 0)], False),
    ],
)  # fmt: skip
def test_which_leaves_make_a_whole_tree(paths, whole):
    assert collecting._is_whole(paths) == whole


def test_the_demo_policy_learns_from_trees_for_two_steps(world):
    question, judge, folder = world
    policy = Policy()
    optimizer, sampler = checkpoint.make_optimizer(policy), InProcessSampler(policy)
    rollout = Rollout(sampler, FakeTools("The capital is Paris."), policy.tokenizer)
    questions = [dataclasses.replace(question, id=f"q{n}") for n in range(6)]

    async def steps():
        await sampler.publish(0)
        for step in (1, 2):
            groups, _ = await collect(questions, rollout, judge, folder, step, step - 1)
            batch = build_batch(groups, step)
            yield step, groups, batch, update(policy, optimizer, batch)
            await sampler.publish(step)

    async def run():
        return [item async for item in steps()]

    for step, groups, batch, metrics in asyncio.run(run()):
        assert all(2 <= len(group.trajectories) <= 4 and all(t.path for t in group.trajectories) for group in groups)
        assert {(t.seed, t.policy_version) for t in groups[0].trajectories} == {
            (seed_from(config.SEED, step, "q0", "tree"), step - 1)}  # fmt: skip
        assert batch.tokens == sum(sum(t.loss_mask) for group in groups for t in group.trajectories)
        assert batch.rows and metrics["train/gradient_norm"] > 0 and metrics["train/sampler_difference_max"] < 0.01
