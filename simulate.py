"""Topologies against judges whose errors are known: what a scheme's judge calls buy, without any model or HTTP.

python simulate.py [--groups N] [--seed S] [--figure PNG]

A group is n candidates with hidden quality, standard normal. A judge perceives the quality of an answer plus noise,
new at every look, and likes the first shown a little better. The schemes are the real ones (tournament.run_tournament,
arena.*), each with the judge it is published with:
  tournament, pairwise   one call a match, in one order: who is better
  ArenaRL's topologies   both orders a match, whole scores around 5 (0..10), summed
  pointwise              one call an answer: a whole score from 1 to 10, its useful range a narrow band
Prints Markdown tables for LOG.md and what of ArenaRL's ranking of topologies comes out. Same seed, same output.
"""

import argparse
import asyncio
import math
import random
from statistics import fmean, stdev

import matplotlib
from scipy.stats import kendalltau

import arena
import config
from credit import group_advantages
from records import seed_from
from schemes import as_scores, both_orders, rank_to_quantile
from tournament import normalize_wins, run_tournament

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

SIZES = (4, 8, 16)  # candidates per group; powers of two, so that every match has two players
COLLAPSE_SIZE = 8  # candidates per group in the second experiment
NOISE = 1.0  # std of one call's error in the difference of two answers; the unit is the std of quality
POSITION_BIAS = 0.3  # added to the first shown; the same unit
SCORE_POINTS = 2.0  # points by which a pair's scores leave 5, per unit of perceived difference
BAND = 1.0  # points of a pointwise score per unit of perceived quality
BANDS = (2.0, 1.0, 0.5, 0.25, 0.1, 0.05)  # the same, narrowing
CENTRE = 7.0  # points; what a pointwise judge gives the average answer
POINT_NOISE = 0.3  # points; std of a pointwise judge's scatter that does not shrink with the band
CLOSE = 0.05  # of tau or of the top-1 rate; means at most so far apart are called about equal
MEASURES = ("tau", "top-1", "ties", "std of advantages", "degenerate")
ARENA = ("round robin", "single elimination", "double elimination", "swiss", "anchor")  # best first, as published


class NoisyJudge:
    """Answers the calls of one scheme on one group, and counts them."""

    def __init__(self, quality, generator):
        self.quality, self.generator, self.calls = quality, generator, 0

    def margin(self, first, second):
        """One call on two answers: by how much the first shown seems better."""
        self.calls += 1
        return self.quality[first] - self.quality[second] + POSITION_BIAS + self.generator.gauss(0, NOISE)

    async def pick(self, match):
        first, second = match.players
        return (first,) if self.margin(first, second) > 0 else (second,)

    async def compare(self, match):
        margin = SCORE_POINTS * self.margin(*match.players)
        return _whole(5 + margin, 0, 10), _whole(5 - margin, 0, 10)

    def points(self, candidate, band):
        """One call on one answer: half the variance of a margin, squeezed into the band, as a whole score."""
        self.calls += 1
        perceived = self.quality[candidate] + self.generator.gauss(0, NOISE / math.sqrt(2))
        return _whole(CENTRE + band * perceived + self.generator.gauss(0, POINT_NOISE), 1, 10)


def _whole(value, low, high):
    return float(min(max(round(value), low), high))


def _tournament(repeats):
    async def play(n, judge):
        standings = await run_tournament(n, judge.pick, match_size=2, winners_per_match=1, finalists=1,
                                         repeats=repeats, seed=judge.generator.getrandbits(32))  # fmt: skip
        return normalize_wins(standings.raw_scores, config.TIE_REWARD), _depth(standings)

    return play


def _topology(topology, randomised=False, **setting):
    async def play(n, judge):
        drawn = {"generator": random.Random(judge.generator.getrandbits(32))} if randomised else {}
        standings = await topology(n, both_orders(judge.compare), **drawn, **setting)
        return rank_to_quantile(standings.ranks), _depth(standings)

    return play


async def _pairwise(n, judge):
    standings = await arena.round_robin(n, as_scores(judge.pick), order="balanced")
    return [points / (n - 1) for points in standings.raw_scores], _depth(standings)


def _pointwise(band):
    async def play(n, judge):
        return [judge.points(candidate, band) for candidate in range(n)], 1

    return play


def _depth(standings):
    """Calls that must follow one another: the rounds, since repeats and the calls of a round run at once."""
    return 1 + max(match.round for match in standings.matches)


SCHEMES = {
    "tournament M=4": _tournament(4),
    "tournament M=2": _tournament(2),
    "round robin": _topology(arena.round_robin, order="fixed"),
    "single elimination": _topology(arena.seeded_single_elimination),
    "double elimination": _topology(arena.double_elimination, randomised=True),
    "swiss": _topology(arena.swiss, randomised=True),
    "anchor": _topology(arena.anchor),
    "pairwise win rate": _pairwise,
    "pointwise": _pointwise(BAND),
}


async def play_groups(name, play, n, groups, seed):
    """One scheme on `groups` groups of n: {"calls", "depth": int, every one of MEASURES: one number per group}.

    The groups depend on n and seed alone, so schemes can be compared group by group.
    """
    results = {measure: [] for measure in MEASURES}
    for group in range(groups):
        draw = random.Random(seed_from(seed, "quality", n, group))
        quality = [draw.gauss(0, 1) for _ in range(n)]
        judge = NoisyJudge(quality, random.Random(seed_from(seed, name, n, group)))
        rewards, depth = await play(n, judge)
        for measure, value in _measure(rewards, quality).items():
            results[measure].append(value)
    return {"calls": judge.calls, "depth": depth, **results}


def _measure(rewards, quality):
    """How well one group's rewards tell its candidates apart.

    tau: Kendall's tau-b with quality, 0 when all rewards tie. top-1: 1 when the best candidate has the best reward,
    shared among those that tie with it. ties: share of the pairs with equal rewards.
    """
    n, best = len(rewards), max(range(len(rewards)), key=quality.__getitem__)
    leaders = [candidate for candidate, reward in enumerate(rewards) if reward == max(rewards)]
    equal_pairs = sum(rewards[i] == rewards[j] for i in range(n) for j in range(i))
    advantages = group_advantages(rewards, config.ADVANTAGE_EPS)
    degenerate = not bool(advantages.any())
    return {
        "tau": 0.0 if degenerate else float(kendalltau(rewards, quality).statistic),
        "top-1": (best in leaders) / len(leaders),
        "ties": equal_pairs / (n * (n - 1) / 2),
        "std of advantages": float(advantages.std()),
        "degenerate": float(degenerate),
    }


def interval(values):
    """(mean, half of its 95% interval): normal approximation over groups."""
    return fmean(values), 1.96 * stdev(values) / math.sqrt(len(values))


def _cell(values):
    mean, half = interval(values)
    return f"{mean:.3f} ± {half:.3f}"


def table(first_columns, rows):
    """A Markdown table. rows: (first cells, what `play_groups` returned)."""
    header = [*first_columns, *MEASURES]
    lines = ["| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
    for cells, result in rows:
        measures = [_cell(result[measure]) for measure in MEASURES]
        lines.append("| " + " | ".join([*map(str, cells), *measures]) + " |")
    return "\n".join(lines)


def compare_topologies(results):
    """ArenaRL's findings against ours for one n, as lines. results: scheme -> what `play_groups` returned."""

    lines = [
        f"{better} above {worse}: {_verdicts(results, better, worse, _above)}"
        for better, worse in zip(ARENA[:3], ARENA[1:4], strict=True)
    ]
    lines.append(f"swiss about equal to anchor: {_verdicts(results, 'swiss', 'anchor', _close)}")
    near = _verdicts(results, "round robin", "single elimination", _close)
    lines.append(f"single elimination nearly as good as round robin: {near}")
    saved = 1 - results["single elimination"]["calls"] / results["round robin"]["calls"]
    return [*lines, f"single elimination makes {saved:.0%} fewer judge calls than round robin"]


def _verdicts(results, one, other, judge):
    """`judge` on the differences one - other of tau and top-1, taken group by group."""
    verdicts = []
    for measure in ("tau", "top-1"):
        pairs = zip(results[one][measure], results[other][measure], strict=True)
        mean, half = interval([x - y for x, y in pairs])
        verdicts.append(f"{judge(mean, half)} by {measure} ({mean:+.3f} ± {half:.3f})")
    return ", ".join(verdicts)


def _above(mean, half):
    return "reproduced" if mean > half else "REVERSED" if -mean > half else "not resolved"


def _close(mean, half):
    return (
        "reproduced" if abs(mean) + half <= CLOSE else "NOT reproduced" if abs(mean) - half > CLOSE else "not resolved"
    )


def draw(path, main, collapse):
    """Left: tau over calls at every size. Right: tau and ties of pointwise over the band, relative schemes flat."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 5), layout="constrained")
    for number, name in enumerate(SCHEMES):
        means, halves = zip(*(interval(main[n][name]["tau"]) for n in SIZES), strict=True)
        calls = [main[n][name]["calls"] for n in SIZES]
        left.errorbar(calls, means, halves, label=name, marker="osD^v<>Px"[number], capsize=2, linewidth=1)
    left.set(xscale="log", xlabel=f"judge calls per group (n = {', '.join(map(str, SIZES))})",
             ylabel="Kendall's tau with the true order", title="Accuracy over cost, 95 % intervals")  # fmt: skip
    left.legend(fontsize=8)
    for measure, label in (("tau", "pointwise: tau"), ("ties", "pointwise: share of tied pairs")):
        means, halves = zip(*(interval(collapse[band][measure]) for band in BANDS), strict=True)
        right.errorbar(BANDS, means, halves, label=label, marker="o", capsize=2)
    for name, style in (("tournament M=4", "--"), ("pairwise win rate", ":"), ("round robin", "-.")):
        mean, half = interval(main[COLLAPSE_SIZE][name]["tau"])
        right.axhline(mean, linestyle=style, color="gray", label=f"{name}: tau")
        right.axhspan(mean - half, mean + half, color="gray", alpha=0.15)
    right.set(xscale="log", xlabel="band: points per std of quality (narrower to the right)", ylim=(0, 1),
              title=f"Discriminative collapse, n = {COLLAPSE_SIZE}")  # fmt: skip
    right.invert_xaxis()
    right.legend(fontsize=8)
    figure.savefig(path, dpi=120)
    plt.close(figure)


async def run(groups, seed):
    """Both experiments: ({n: {scheme: result}}, {band: result})."""
    main_results = {
        n: {name: await play_groups(name, play, n, groups, seed) for name, play in SCHEMES.items()} for n in SIZES
    }
    collapse = {band: await play_groups("pointwise", _pointwise(band), COLLAPSE_SIZE, groups, seed) for band in BANDS}
    return main_results, collapse


def report(groups, seed, main_results, collapse):
    """Everything printed, as Markdown."""
    parts = [
        f"{groups} groups per row, seed {seed}, mean ± 95% interval. Judge: noise {NOISE} and position bias "
        f"{POSITION_BIAS} in standard deviations of quality; pointwise {BAND} points per standard deviation. Depth: "
        "calls that must follow one another. The std of a group's advantages is 1, and 0 when all rewards tie."
    ]
    rows = [((n, name, r["calls"], r["depth"]), r) for n in SIZES for name, r in main_results[n].items()]
    parts.append(table(("n", "scheme", "judge calls", "depth"), rows))
    parts.append(
        "ArenaRL's published findings, tested by the order each topology recovers. Differences are taken group by "
        f"group; not resolved: the 95% interval holds 0, or for closeness one of the limits ±{CLOSE}."
    )
    for n in SIZES:
        parts.append(f"n = {n}:\n\n" + "\n".join(f"- {line}" for line in compare_topologies(main_results[n])))
    relative = ("tournament M=4", "pairwise win rate", "round robin")
    rows = [((f"pointwise, {band} points",), collapse[band]) for band in BANDS]
    rows += [((name,), main_results[COLLAPSE_SIZE][name]) for name in relative]
    parts.append(
        f"Discriminative collapse, n = {COLLAPSE_SIZE}: the pointwise judge's scores use fewer and fewer points per "
        "standard deviation of quality. That a judge who compares keeps its eye is an assumption of the model, so each "
        "relative scheme has one row; what is shown is what collapse does to the order, not that it happens.\n\n"
        + table(("scheme, band",), rows)
    )
    return "\n\n".join(parts)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--groups", type=int, default=300, help="simulated groups per scheme and size, at least 2")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--figure", metavar="PNG", help="also draw both experiments into this file")
    arguments = parser.parse_args(argv)
    if arguments.groups < 2:
        parser.error(f"--groups {arguments.groups}: at least 2 are needed for an interval")
    main_results, collapse = asyncio.run(run(arguments.groups, arguments.seed))
    print(report(arguments.groups, arguments.seed, main_results, collapse))
    if arguments.figure:
        draw(arguments.figure, main_results, collapse)


if __name__ == "__main__":
    main()
