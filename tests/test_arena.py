"""Topologies against the reference's code, their formulas, and how many judge calls they keep in flight."""

import asyncio
import math
import random

import pytest
from conftest import golden
from hypothesis import given
from hypothesis import strategies as st

from arena import anchor, double_elimination, round_robin, seeded_single_elimination, swiss
from credit import group_advantages
from reward import rank_to_quantile

TOPOLOGIES = {
    "anchor": lambda n, compare, seed: anchor(n, compare),
    "round_robin": lambda n, compare, seed: round_robin(n, compare, order="fixed"),
    "single_elimination": lambda n, compare, seed: seeded_single_elimination(n, compare),
    "double_elimination": lambda n, compare, seed: double_elimination(n, compare, generator=random.Random(seed)),
    "swiss": lambda n, compare, seed: swiss(n, compare, generator=random.Random(seed)),
}


def log2_up(n):
    return math.ceil(math.log2(n))


MATCHES = {
    "anchor": lambda n: n - 1,
    "round_robin": lambda n: n * (n - 1) // 2,
    "single_elimination": lambda n: 2 * n - 2,
    "double_elimination": lambda n: 2 * n - 2,
    "swiss": lambda n: n // 2 * log2_up(n),
}


def play(name, n, score, seed=0):
    """score: players as shown -> the two scores."""

    async def compare(match):
        return score(*match.players)

    return asyncio.run(TOPOLOGIES[name](n, compare, seed))


def shown(standings):
    return [[*match.players, *match.outcome] for match in standings.matches]


def reference(row):
    """What the reference returned; for swiss, paired on a copy of its list of players (a departure)."""
    return row["counterfactual_index_fix"] if row["topology"] == "swiss" else row["expected"]


def replayed(row):
    """The standings of the golden row's judge: the recorded scores, and only for recorded pairs."""
    recorded = {(a, b): (x, y) for a, b, x, y in reference(row)["matches"]}

    async def compare(match):
        return recorded[match.players]

    n, generator = row["n"], random.Random(row["random_seed"])
    if row["topology"] == "swiss":
        # departure: the reference takes 0 rounds for "not given", ours refuses it
        return asyncio.run(swiss(n, compare, generator=generator, rounds=row["max_num_rounds"] or None))
    return asyncio.run(TOPOLOGIES[row["topology"]](n, compare, row["random_seed"]))


def test_golden_topologies():
    lone, other_scale, equal = 0, 0, 0
    for row in golden("arena_topologies"):
        expected, standings = reference(row), replayed(row)
        assert shown(standings) == expected["matches"], row["id"]
        assert len(standings.matches) == expected["n_comparisons"]
        if row["n"] == 1:  # departure: NaN or a ZeroDivisionError there, nothing to learn here
            lone += 1
            assert (standings.ranks, group_advantages([1.0], 1e-6).tolist()) == ([0.0], [0.0])
            continue
        if expected["ranking"]:
            assert sorted(range(row["n"]), key=standings.ranks.__getitem__) == expected["ranking"], row["id"]
        if expected["swiss_points_buchholz"]:
            points = [expected["swiss_points_buchholz"][str(player)][0] for player in range(row["n"])]
            assert standings.raw_scores == points, row["id"]
        rewards = rank_to_quantile(standings.ranks)
        assert group_advantages(rewards, 1e-6).tolist() == pytest.approx(expected["rewards"], abs=1e-5), row["id"]
        if rewards != pytest.approx(expected["pre_normalisation_rewards"]):
            other_scale += 1  # departure: rank / (n - 1) where the last place is shared, theirs rank / (worst rank)
            assert row["topology"] in ("anchor", "round_robin") and max(standings.ranks) < row["n"] - 1
            continue
        equal += 1
    assert (lone, other_scale, equal) == (10, 39, 291)


@given(
    n=st.integers(2, 16),
    name=st.sampled_from(sorted(TOPOLOGIES)),
    seed=st.integers(0, 2**32),
    taste=st.randoms(use_true_random=False),
)
def test_the_best_is_first_and_calls_are_counted(n, name, seed, taste):
    strength = taste.sample(range(100), n)
    standings = play(name, n, lambda a, b: (strength[a], strength[b]), seed)
    best = max(range(n), key=strength.__getitem__)
    assert [k for k, rank in enumerate(standings.ranks) if rank == 0.0] == [best]
    assert len(standings.matches) == MATCHES[name](n)
    places = [(match.round, match.index) for match in standings.matches]
    assert places == sorted(set(places)) and {match.repeat for match in standings.matches} == {0}
    if name in ("anchor", "round_robin"):
        assert sorted(range(n), key=standings.ranks.__getitem__) == sorted(range(n), key=lambda k: -strength[k])


@given(n=st.integers(2, 16), name=st.sampled_from(sorted(TOPOLOGIES)), taste=st.randoms(use_true_random=False))
def test_a_round_is_one_wave_of_calls(n, name, taste):
    """Calls that start before any reply is in form a wave; the waves are the rounds, in order."""
    waves, open_calls = [], []

    async def compare(match):
        reply = asyncio.get_running_loop().create_future()
        open_calls.append((match, reply))
        return await reply

    async def answer_in_waves():
        task = asyncio.ensure_future(TOPOLOGIES[name](n, compare, 1))
        while not task.done():
            await asyncio.sleep(0)
            if open_calls and waves and waves[-1] == len(open_calls):  # nothing more came since the last look
                wave, open_calls[:] = list(open_calls), []
                rounds.append({match.round for match, _ in wave})
                for match, reply in taste.sample(wave, len(wave)):  # replies come in any order
                    reply.set_result((match.players[0] % 3, match.players[1] % 3))
            waves.append(len(open_calls))
        return task.result()

    rounds = []
    standings = asyncio.run(answer_in_waves())
    assert rounds == [{number} for number in range(len(rounds))]
    assert shown(standings) == shown(play(name, n, lambda a, b: (a % 3, b % 3), 1))
    depth = {"anchor": 1, "round_robin": 1, "single_elimination": 1 + log2_up(n), "swiss": log2_up(n)}
    if name in depth:
        assert len(rounds) == depth[name]


@given(n=st.integers(2, 16))
def test_balanced_order_shows_everyone_first_as_often_as_second(n):
    async def compare(match):
        return 1.0, 0.0

    standings = asyncio.run(round_robin(n, compare, order="balanced"))
    firsts = [sum(match.players[0] == k for match in standings.matches) for k in range(n)]
    assert len({tuple(sorted(match.players)) for match in standings.matches}) == n * (n - 1) // 2
    assert all(abs(first - (n - 1 - first)) <= 1 for first in firsts)


def test_both_orders_cancel_the_bias_of_position():
    """Scores are summed per pair: a judge that only sees the position makes every pair a draw."""

    async def compare(match):
        return 9.0, 2.0

    both = asyncio.run(round_robin(4, compare, order="both"))
    assert [match.players for match in both.matches[:4]] == [(0, 1), (1, 0), (0, 2), (2, 0)]
    assert [match.index for match in both.matches] == list(range(12))
    assert both.raw_scores == [1.5] * 4 and both.ranks == [0.0] * 4
    assert asyncio.run(round_robin(4, compare, order="fixed")).raw_scores == [3.0, 2.0, 1.0, 0.0]


def test_ties_share_ranks():
    scores = [5.0, 7.0, 7.0, 3.0]
    assert play("anchor", 4, lambda a, b: (scores[a], scores[b])).ranks == [2.0, 0.0, 0.0, 3.0]
    assert play("swiss", 2, lambda a, b: (1.0, 1.0)).ranks == [0.5, 0.5]


def test_seeds_one_and_two_meet_last_only_in_a_full_bracket():
    """ArenaRL's bracket, reproduced: with three players the two best meet in the first match."""
    full = play("single_elimination", 8, lambda a, b: (-a, -b))
    assert [set(match.players) for match in full.matches if match.round == 3] == [{0, 1}]
    odd = play("single_elimination", 3, lambda a, b: (-a, -b))
    assert [match.players for match in odd.matches if match.round == 1] == [(0, 1)]


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_nobody_and_a_lone_player_ask_no_judge(name):
    alone, nobody = play(name, 1, None), play(name, 0, None)
    assert (alone.raw_scores, alone.ranks, alone.matches) == ([0.0], [0.0], [])
    assert (nobody.raw_scores, nobody.ranks, nobody.matches) == ([], [], [])


def test_what_is_no_score_or_setting_is_refused():
    with pytest.raises(ValueError, match="not a pair of finite scores"):
        play("anchor", 3, lambda a, b: (math.nan, 1.0))
    with pytest.raises(ValueError, match="not a pair of finite scores"):
        play("swiss", 3, lambda a, b: (1.0,))
    with pytest.raises(ValueError, match="ORDER must be"):
        asyncio.run(round_robin(3, None, order="random"))
    with pytest.raises(ValueError, match="rounds must be at least 1"):
        asyncio.run(swiss(3, None, generator=random.Random(0), rounds=0))
