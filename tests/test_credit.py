"""credit.py against the reference's advantages, an independent loop, and the public failure reports."""

import math
import statistics

import pytest
import torch
from conftest import golden
from hypothesis import given
from hypothesis import strategies as st

from credit import group_advantages, is_degenerate


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
