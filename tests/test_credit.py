"""credit.py against the reference's advantages, independent loops, worked examples and the public failure reports."""

import math
import random
import statistics

import pytest
import torch
from conftest import golden
from hypothesis import given
from hypothesis import strategies as st

import config
from credit import (
    gae,
    group_advantages,
    is_degenerate,
    merged_rewards,
    mt_grpo_advantages,
    pad_turn_rewards,
    place_turn_rewards,
    spread_turns,
    tree_leaves,
    turn_advantages,
    turn_count_bias,
)


def reference_groups(row):
    """(rewards, advantages the reference gave in float64) per group id of a golden row."""
    sums = [sum(r) for r in row["token_level_rewards"]]
    given = [next((a for a, m in zip(adv, mask, strict=True) if m), 0.0)
             for adv, mask in zip(row["advantages_f64"], row["response_mask"], strict=True)]  # fmt: skip
    for uid in sorted(set(row["uid"])):
        members = [i for i, u in enumerate(row["uid"]) if u == uid]
        yield [sums[i] for i in members], [given[i] for i in members]


def test_golden_grpo_advantage():
    equal, singletons, without_std = 0, 0, 0
    for row in golden("grpo_advantage"):
        if not row["norm_by_std"]:
            without_std += 1  # departure: we always divide by the spread, as the article does
            continue
        for rewards, expected in reference_groups(row):
            ours = group_advantages(rewards, row["epsilon"]).tolist()
            if len(rewards) == 1:
                singletons += 1  # departure: the reference lets the raw reward through, a lone reward is no signal
                assert ours == [0.0]
            else:
                trained = [i for i, e in enumerate(expected) if e or not any(expected)]
                assert [ours[i] for i in trained] == pytest.approx([expected[i] for i in trained], rel=1e-9, abs=1e-9)
                equal += 1
    assert (equal, singletons, without_std) == (63, 10, 15)


@given(st.lists(st.floats(-5, 5), min_size=2, max_size=16))
def test_equals_plain_python(rewards):
    if len(set(rewards)) == 1:
        assert group_advantages(rewards, 1e-6).tolist() == [0.0] * len(rewards)
        return
    mean, spread = statistics.fmean(rewards), statistics.stdev(rewards)
    expected = [(r - mean) / (spread + 1e-6) for r in rewards]
    assert group_advantages(rewards, 1e-6).tolist() == pytest.approx(expected, rel=1e-6, abs=1e-6)


@given(st.floats(allow_nan=False, allow_infinity=False, width=32), st.integers(2, 16))
def test_tied_group_is_exactly_zero(reward, size):
    assert group_advantages([reward] * size, 1e-6).tolist() == [0.0] * size
    assert is_degenerate([reward] * size)


def test_population_deviation():
    assert group_advantages([0.0, 1.0], 0.0, ddof=0).tolist() == [-1.0, 1.0]


def test_LOSS_01_lone_reward_has_no_advantage():
    assert group_advantages([1.0], 1e-6).tolist() == [0.0]
    assert is_degenerate([1.0])


def test_LOSS_04_missing_reward_is_left_out():
    advantages = group_advantages([1.0, 0.0, math.nan, 0.0], 1e-6)
    assert advantages[2] == 0
    assert advantages[[0, 1, 3]].tolist() == group_advantages([1.0, 0.0, 0.0], 1e-6).tolist()
    assert torch.isfinite(advantages).all()


# ---- advantages of turns -------------------------------------------------------------------------

TURN, OUTCOME = (0.7, 0.7, 0.0, 0.2), (1.0, 0.2, 1.0, 0.0)  # two turns, K = 4
NAN = math.nan


def column(values):
    return [[value] for value in values]


def test_worked_example_with_the_population_deviation():
    eps = config.ADVANTAGE_EPS
    assert group_advantages(TURN, eps, ddof=0).tolist() == pytest.approx([0.973, 0.973, -1.298, -0.649], abs=6e-4)
    assert group_advantages(OUTCOME, eps, ddof=0).tolist() == pytest.approx([0.988, -0.768, 0.988, -1.207], abs=6e-4)
    advantages = mt_grpo_advantages(column(TURN), OUTCOME, 0.5, ddof=0)
    assert advantages[:, 0].tolist() == pytest.approx([1.467, 0.589, -0.804, -1.253], abs=6e-4)
    assert advantages[:, 1].tolist() == group_advantages(OUTCOME, eps, ddof=0).tolist()
    merged = group_advantages(merged_rewards(column(TURN), OUTCOME), eps, ddof=0)
    assert merged.tolist() == pytest.approx([1.411, -0.094, 0.094, -1.411], abs=6e-4)


def test_general_form_equals_the_two_turn_form():
    """The two-turn form, written with the statistics module: A_1 = A^I + alpha A^O, A_2 = A^O. Difference 0."""
    generator, largest = random.Random(5), 0.0

    def standardised(values):
        tensor = torch.tensor(values, dtype=torch.float64)  # summation order as in the room, or 1 ulp would show
        return [(v - float(tensor.mean())) / (float(tensor.std()) + config.ADVANTAGE_EPS) for v in values]

    for _ in range(200):
        size, alpha = generator.randint(2, 16), generator.random()
        turn, outcome = ([generator.gauss(0, 1) for _ in range(size)] for _ in range(2))
        own, end = standardised(turn), standardised(outcome)
        assert own == pytest.approx([(v - statistics.fmean(turn)) / (statistics.stdev(turn) + 1e-6) for v in turn])
        ours = mt_grpo_advantages(column(turn), outcome, alpha).tolist()
        differences = [max(abs(row[0] - (i + alpha * o)), abs(row[1] - o))
                       for row, i, o in zip(ours, own, end, strict=True)]  # fmt: skip
        largest = max(largest, *differences)
    assert largest == 0


rewards = st.sampled_from([-1.0, -0.3, 0.0, 0.1, 0.2, 0.4, 1.0])
members = st.tuples(st.lists(rewards, max_size=4), st.one_of(rewards, st.just(NAN)))


@given(st.lists(members, min_size=1, max_size=8), st.sampled_from([0.0, 0.5, 1.0]), st.sampled_from([0, 1]),
       st.sampled_from(["survivors", "corrected"]))  # fmt: skip
def test_mt_grpo_equals_plain_python(group, alpha, ddof, baseline):
    """The sum of the formula, term by term, over lists of different lengths, broken trajectories among them."""
    usable = [i for i, (_, outcome) in enumerate(group) if not math.isnan(outcome)]

    def standardised(by_member):
        values = list(by_member.values())
        if len(values) < 2 or len(set(values)) == 1:
            return dict.fromkeys(by_member, 0.0)
        spread = (statistics.stdev if ddof else statistics.pstdev)(values) + config.ADVANTAGE_EPS
        return {i: (v - statistics.fmean(values)) / spread for i, v in by_member.items()}

    end = standardised({i: group[i][1] for i in usable})
    width = max(len(turns) for turns, _ in group)
    own = []
    for turn in range(width):
        having = {i: group[i][0][turn] for i in usable if len(group[i][0]) > turn}
        absent = {i: 0.0 for i in usable if len(group[i][0]) <= turn}
        own.append(standardised(having | (absent if baseline == "corrected" else {})))
    expected = [[0.0] * (width + 1) for _ in group]
    for i in usable:
        n = len(group[i][0]) + 1
        for k in range(1, n + 1):
            later = sum(alpha ** (turn - k) * own[turn - 1][i] for turn in range(k, n))
            expected[i][k - 1] = later + alpha ** (n - k) * end[i]
    turns = pad_turn_rewards([turns for turns, _ in group])
    ours = mt_grpo_advantages(turns, [outcome for _, outcome in group], alpha, ddof, baseline=baseline)
    assert ours.shape == (len(group), width + 1)
    for row, wanted in zip(ours.tolist(), expected, strict=True):
        assert row == pytest.approx(wanted, rel=1e-9, abs=1e-9)


def test_a_turn_of_one_trajectory_and_a_tied_turn_teach_nothing_of_their_own():
    turns = [[0.1, 0.5, 0.4], [0.1, 0.2, NAN], [0.1, NAN, NAN]]
    advantages = mt_grpo_advantages(turns, [1.0, 1.0, 1.0], 1.0)  # outcomes tie as well
    assert advantages[:, 0].tolist() == advantages[:, 1].tolist()[:2] + [0.0]  # turn 1 ties: only turn 2's shows
    assert advantages[:2, 1].tolist() == pytest.approx([0.7071, -0.7071], abs=1e-4)
    assert advantages[0, 2] == 0  # alone at its turn
    assert advantages[2].tolist() == [0.0, 0.0, 0.0, 0.0]


def test_LOSS_04_a_broken_trajectory_changes_no_statistic_and_gets_zero():
    turns, outcomes = [[0.1, 0.3], [0.4, NAN], [-0.2, 0.1]], [1.0, 0.2, -1.0]
    for baseline in ("survivors", "corrected"):
        alone = mt_grpo_advantages(turns, outcomes, 0.5, baseline=baseline)
        joined = mt_grpo_advantages([*turns, [9.0, 9.0]], [*outcomes, NAN], 0.5, baseline=baseline)
        assert joined[:3].tolist() == alone.tolist() and joined[3].tolist() == [0.0, 0.0, 0.0]
    assert math.isnan(merged_rewards([*turns, [9.0, 9.0]], [*outcomes, NAN])[3])
    assert turn_count_bias([*turns, [9.0, 9.0]], [*outcomes, NAN]) == turn_count_bias(turns, outcomes)


def test_LOSS_01_a_lone_usable_trajectory_has_no_advantage():
    for baseline in ("survivors", "corrected"):
        advantages = mt_grpo_advantages([[0.5], [0.1]], [1.0, NAN], 1.0, baseline=baseline)
        assert advantages.tolist() == [[0.0, 0.0], [0.0, 0.0]]


def test_no_intermediate_turn_leaves_the_outcome():
    advantages = mt_grpo_advantages(pad_turn_rewards([[], []]), [1.0, 0.0], 0.5)
    assert advantages.tolist() == [[a] for a in group_advantages([1.0, 0.0], config.ADVANTAGE_EPS).tolist()]


def test_corrected_baseline_compares_going_on_with_having_stopped():
    """Two go on and earn 0.4 each: among survivors that ties, against the one that stopped it is above average."""
    turns, outcomes = [[0.1, 0.4], [0.1, 0.4], [0.1, NAN]], [1.0, 1.0, 1.0]
    assert mt_grpo_advantages(turns, outcomes, 1.0).tolist() == [[0.0] * 3] * 3
    corrected = mt_grpo_advantages(turns, outcomes, 1.0, baseline="corrected")
    expected = group_advantages([0.4, 0.4, 0.0], config.ADVANTAGE_EPS)
    assert corrected[:, 1].tolist() == [float(expected[0]), float(expected[1]), 0.0]


def test_turn_count_bias_is_the_outcome_of_those_that_go_on_above_the_groups():
    turns, outcomes = [[0.1, 0.1], [0.1, 0.1], [0.1, NAN], [NAN, NAN]], [1.0, 0.6, 0.2, -1.0]
    assert turn_count_bias(turns, outcomes) == pytest.approx(((1.8 / 3 - 0.2) + (1.6 / 2 - 0.2)) / 2)
    assert turn_count_bias(column(TURN), OUTCOME) == 0
    assert turn_count_bias(pad_turn_rewards([[], []]), [1.0, 0.0]) == 0
    assert turn_count_bias([[0.1], [0.1]], [NAN, NAN]) == 0


@pytest.mark.parametrize(
    ("turns", "outcomes", "said"),
    [
        ([[0.1, NAN], [NAN, 0.2]], [1.0, 0.0], "trajectory 1 are infinite or have a gap"),
        ([[math.inf], [0.1]], [1.0, 0.0], "trajectory 0 are infinite or have a gap"),
        ([[0.1]], [1.0, 0.0], r"not \(1, 1\) and \(2,\)"),
        ([0.1, 0.2], [1.0, 0.0], r"not \(2,\) and \(2,\)"),
    ],
)
def test_rewards_that_do_not_fit_are_named(turns, outcomes, said):
    with pytest.raises(ValueError, match=said):
        mt_grpo_advantages(turns, outcomes, 0.5)


def test_credit_constant_chooses_the_advantages():
    turns, outcomes = [[0.1, 0.3], [0.4, NAN], [-0.2, 0.1], [0.0, 0.0]], [1.0, 0.2, -1.0, NAN]
    of_outcome = group_advantages(outcomes, config.ADVANTAGE_EPS).tolist()
    of_sum = group_advantages([1.4, 0.6, -1.1, NAN], config.ADVANTAGE_EPS).tolist()
    assert config.CREDIT == "outcome"  # the article's stays the default
    for config.CREDIT, per_trajectory in (("outcome", of_outcome), ("merged", of_sum)):
        a, b, c, broken = turn_advantages(turns, outcomes).tolist()
        assert a + c + b[:2] == pytest.approx(
            [per_trajectory[0]] * 3 + [per_trajectory[2]] * 3 + [per_trajectory[1]] * 2
        )
        assert b[2] == 0 and broken == [0.0, 0.0, 0.0]
    config.CREDIT, config.TURN_ALPHA = "mt_grpo", 0.25
    assert turn_advantages(turns, outcomes).tolist() == mt_grpo_advantages(turns, outcomes, 0.25).tolist()
    config.TURN_COUNT_BASELINE = "corrected"
    corrected = mt_grpo_advantages(turns, outcomes, 0.25, baseline="corrected").tolist()
    assert turn_advantages(turns, outcomes).tolist() == corrected
    assert corrected != mt_grpo_advantages(turns, outcomes, 0.25).tolist()


def test_leaves_of_a_rollout_tree():
    assert [tree_leaves(8, turns) for turns in (2, 3, 4, 5)] == [8, 64, 512, 4096]


# ---- advantages of tokens ------------------------------------------------------------------------

TURN_INDEX = [0, 0, 0, 0, 1, 1, 1, 2, 2]  # a trajectory of three turns; tool output ends the first two
LOSS_MASK = [1, 1, 0, 0, 1, 0, 0, 1, 1]


def test_rewards_stand_on_the_last_sampled_token_of_their_turn():
    placed = place_turn_rewards([0.3, -0.2], 1.0, TURN_INDEX, LOSS_MASK)
    assert placed.tolist() == [0, 0.3, 0, 0, -0.2, 0, 0, 0, 1.0]
    assert place_turn_rewards([], -1.0, [0, 0], [1, 1]).tolist() == [0, -1.0]


@pytest.mark.parametrize(
    ("turn_rewards", "mask"),
    [([0.3], LOSS_MASK), ([0.3, 0.1, 0.1], LOSS_MASK), ([0.3, 0.1], [1, 1, 0, 0, 0, 0, 0, 1, 1]), ([], [0] * 9)],
)
def test_a_turn_without_a_sampled_token_is_named(turn_rewards, mask):
    with pytest.raises(ValueError, match="sampled tokens in turns"):
        place_turn_rewards(turn_rewards, 1.0, TURN_INDEX, mask)


def test_turn_advantages_spread_over_sampled_tokens():
    assert spread_turns([0.5, -1.0, 2.0, 0.0], TURN_INDEX, LOSS_MASK).tolist() == [0.5, 0.5, -1.0, 2.0, 2.0]


def test_gae_examples():
    assert gae([0, 0.3, 0, 1], [0.5] * 4, 1.0, 1.0).tolist() == pytest.approx([0.8, 0.8, 0.5, 0.5])
    assert gae([0, 0, 0.7, 0, 0, 1], [0.6] * 6, 1.0, 1.0).tolist() == pytest.approx([1.1] * 3 + [0.4] * 3)


def test_gae_telescopes_on_100_000_random_sequences():
    """gamma = lambda = 1: the sum of all rewards from here on, minus the value here."""
    generator, largest, sequences = torch.Generator().manual_seed(3), 0.0, 0
    for length in range(1, 51):
        rewards, values = torch.randn(2, 2000, length, generator=generator, dtype=torch.float64)
        to_come = torch.stack([rewards[:, t:].sum(1) for t in range(length)], dim=1)
        largest = max(largest, float((gae(rewards, values, 1.0, 1.0) - (to_come - values)).abs().max()))
        sequences += len(rewards)
    assert sequences == 100_000 and largest < 1e-9


@given(
    st.lists(st.tuples(st.floats(-2, 2), st.floats(-2, 2)), min_size=1, max_size=12), st.floats(0, 1), st.floats(0, 1)
)
def test_gae_equals_the_weighted_sum_of_surprises(tokens, gamma, lam):
    rewards, values = zip(*tokens, strict=True)
    after = [*values[1:], 0.0]
    surprises = [r + gamma * n - v for r, v, n in zip(rewards, values, after, strict=True)]
    expected = [sum((gamma * lam) ** (j - t) * surprises[j] for j in range(t, len(tokens))) for t in range(len(tokens))]
    assert gae(rewards, values, gamma, lam).tolist() == pytest.approx(expected, abs=1e-9)


def test_gae_wants_a_value_for_every_reward():
    with pytest.raises(ValueError, match=r"rewards \(2,\) and values \(3,\)"):
        gae([0, 1], [0, 0, 0], 1.0, 1.0)


def test_placed_rewards_of_sampled_tokens_give_every_turn_what_is_still_to_come():
    placed = place_turn_rewards([0.3, -0.2], 1.0, TURN_INDEX, LOSS_MASK)[torch.tensor(LOSS_MASK, dtype=torch.bool)]
    assert gae(placed, [0.0] * 5, 1.0, 1.0).tolist() == pytest.approx([1.1, 1.1, 0.8, 1.0, 1.0])
