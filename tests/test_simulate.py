"""The simulation against hand-made cases: an unerring judge, a judge of positions, made-up results."""

import asyncio

import pytest
from scipy.stats import norm

import simulate
from records import Match
from schemes import as_scores, both_orders
from simulate import SCHEMES, NoisyJudge, compare_topologies, interval, play_groups

CALLS = {  # (judge calls, depth) per scheme at n = 8
    "tournament M=4": (28, 3),
    "tournament M=2": (14, 3),
    "round robin": (56, 1),
    "single elimination": (28, 4),
    "double elimination": (28, 8),
    "swiss": (24, 3),
    "anchor": (14, 1),
    "pairwise win rate": (28, 1),
    "pointwise": (8, 1),
}


def play(name, n=8, groups=20, seed=0):
    return asyncio.run(play_groups(name, SCHEMES[name], n, groups, seed))


@pytest.mark.parametrize("name", SCHEMES)
def test_calls_and_depth(name):
    result = play(name, groups=2)
    assert (result["calls"], result["depth"]) == CALLS[name]


@pytest.mark.parametrize("name", [name for name in SCHEMES if name not in ("anchor", "pointwise")])
def test_an_unerring_judge_puts_the_best_on_top(name, monkeypatch):
    monkeypatch.setattr(simulate, "NOISE", 0.0)
    monkeypatch.setattr(simulate, "POSITION_BIAS", 0.0)
    monkeypatch.setattr(simulate, "SCORE_POINTS", 1e9)  # every score is 0 or 10: no draws
    result = play(name)
    assert result["top-1"] == [1.0] * 20
    everyone_met = name in ("round robin", "pairwise win rate")
    assert (result["tau"] == pytest.approx([1.0] * 20)) == everyone_met


def test_schemes_share_groups_and_draw_their_own_noise():
    seen = {}
    for name, seed in (("a", 0), ("b", 0), ("a", 1)):

        async def play_nothing(n, judge, key=(name, seed)):
            seen.setdefault(key, []).append((tuple(judge.quality), judge.generator.random()))
            return list(range(n)), 1

        asyncio.run(play_groups(name, play_nothing, 4, 2, seed))
    qualities = {key: [quality for quality, _ in groups] for key, groups in seen.items()}
    assert qualities["a", 0] == qualities["b", 0] != qualities["a", 1]
    assert len({noise for groups in seen.values() for _, noise in groups}) == 6


def test_both_orders_cancel_the_bias_and_cost_two_calls(monkeypatch):
    monkeypatch.setattr(simulate, "NOISE", 0.0)
    judge = NoisyJudge([0.0, 0.0], None)
    judge.generator = type("Quiet", (), {"gauss": staticmethod(lambda mean, std: mean)})
    match = Match(0, 0, 0, (1, 0), 1)
    assert asyncio.run(judge.pick(match)) == (1,)  # equal answers: the first shown
    assert asyncio.run(as_scores(judge.pick)(match)) == (1.0, 0.0)
    assert judge.calls == 2
    first, second = asyncio.run(both_orders(judge.compare)(match))
    assert first == second and judge.calls == 4


def test_measures_by_hand():
    shared = simulate._measure([1.0, 1.0, 0.0], [3.0, 2.0, 1.0])
    assert shared["tau"] == pytest.approx(2 / 6**0.5)  # two pairs in order, one tied: 2 / sqrt(2 * 3)
    assert (shared["top-1"], shared["ties"], shared["degenerate"]) == (0.5, pytest.approx(1 / 3), 0.0)
    assert shared["std of advantages"] == pytest.approx(1.0, abs=1e-5)
    assert simulate._measure([0.0, 1.0], [2.0, 1.0])["top-1"] == 0.0
    tied = simulate._measure([0.5, 0.5, 0.5], [3.0, 2.0, 1.0])
    assert tied == {"tau": 0.0, "top-1": pytest.approx(1 / 3), "ties": 1.0, "std of advantages": 0.0, "degenerate": 1.0}


def test_interval_is_the_normal_one():
    mean, half = interval([0.0, 1.0, 0.0, 1.0])
    assert (mean, half) == (0.5, pytest.approx(norm.ppf(0.975) * (1 / 3) ** 0.5 / 2, rel=1e-4))


def test_a_narrowing_band_makes_ties_and_loses_the_order():
    wide, narrow = (asyncio.run(play_groups("pointwise", simulate._pointwise(band), 8, 60, 0)) for band in (2.0, 0.1))
    for measure, sign in (("tau", -1), ("ties", 1), ("degenerate", 1)):
        (before, half_before), (after, half_after) = interval(wide[measure]), interval(narrow[measure])
        assert sign * (after - before) > half_before + half_after, measure


def test_verdicts_on_made_up_results():
    taus = {"round robin": 0.8, "single elimination": 0.7, "double elimination": 0.75, "swiss": 0.6, "anchor": 0.61}
    wobble = [-0.001, 0.0, 0.001, 0.0]
    results = {name: {"tau": [tau + w for w in wobble], "top-1": [0.5] * 4, "calls": 10} for name, tau in taus.items()}
    results["round robin"]["calls"] = 40
    results["double elimination"]["tau"] = [0.75 + 100 * w for w in wobble]  # too noisy to tell
    lines = compare_topologies(results)
    verdicts = [line.split(": ")[1].split(" by tau")[0] for line in lines[:5]]
    assert verdicts == ["reproduced", "not resolved", "reproduced", "reproduced", "NOT reproduced"]
    assert "75% fewer" in lines[5]
    results["double elimination"]["tau"] = [0.75] * 4
    assert "REVERSED by tau (-0.050" in compare_topologies(results)[1]


def test_main_prints_the_same_for_a_seed_and_draws(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(simulate, "SIZES", (4, 8))
    printed = []
    for seed in ("7", "7", "8"):
        simulate.main(["--groups", "3", "--seed", seed, "--figure", str(tmp_path / "figure.png")])
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] != printed[2].replace("seed 8", "seed 7")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
    rows = [line for line in printed[0].splitlines() if line.startswith("| ")]
    assert len(rows) == 1 + 2 * len(SCHEMES) + 1 + len(simulate.BANDS) + 3
    assert {row.count("|") for row in rows} == {10, 7}


def test_one_group_has_no_interval(capsys):
    with pytest.raises(SystemExit):
        simulate.main(["--groups", "1"])
    assert "--groups 1" in capsys.readouterr().err
