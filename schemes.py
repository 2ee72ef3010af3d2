"""REWARD_SCHEME: from one group's candidates and a judge to a relative reward each, for every scheme."""

import asyncio
import math
import random
from dataclasses import replace

import arena
import config
from tournament import count_matches, normalize_wins, run_tournament

SCHEMES = ("tournament", "round_robin", "anchor", "single_elimination", "double_elimination", "swiss", "pairwise",
           "explicit", "implicit", "gdpo", "format_only", "exact_match")  # fmt: skip
GREEDY_ANCHOR = ("anchor", "single_elimination")  # schemes that lean on trajectory 0, which is then decoded greedily


async def play(n, judge, settings, seed):
    """One group's judgements under a scheme: (raw scores, relative rewards in [0, 1]), a list of n each.

    judge: async `pick(match)` -> winners, `compare(match)` -> two scores, `grade(i, by)` -> a grade; and its `rubrics`,
    and `outcomes`, the exact-match rewards; players are 0..n-1. settings: the constants that reward.SETTINGS names.
    seed: of the draws. Raw scores are wins, points, mean scores or grades. Relative rewards come from wins by min-max
    (the tournament), from ranks by quantile (ArenaRL), or are the share of matches won (pairwise), of the rubric's
    weight met (explicit, gdpo), or of the scale (implicit); those of exact_match are its three values.
    """
    scheme, generator, both = settings["REWARD_SCHEME"], random.Random(seed), both_orders(judge.compare)
    if scheme == "tournament":
        names = ("match_size", "winners_per_match", "finalists", "repeats")
        standings = await run_tournament(n, judge.pick, seed=seed, **{name: settings[name.upper()] for name in names})
        return standings.raw_scores, normalize_wins(standings.raw_scores, settings["TIE_REWARD"])
    if scheme in ("explicit", "gdpo", "implicit"):
        by = "overall" if scheme == "implicit" else "items"
        grades = await asyncio.gather(*(judge.grade(i, by) for i in range(n)))
        if scheme == "implicit":
            return list(grades), [(grade - 1) / 9 for grade in grades]
        shares = [_weighted_share(judge.rubrics, met, settings["IMPORTANCE_WEIGHTS"]) for met in grades]
        return shares, shares
    if scheme in ("format_only", "exact_match"):
        outcomes = judge.outcomes if scheme == "exact_match" else [0.0] * n
        return outcomes, outcomes
    if scheme == "pairwise":
        standings = await arena.round_robin(n, as_scores(judge.pick), order="balanced")
        return standings.raw_scores, [wins / max(1, n - 1) for wins in standings.raw_scores]
    standings = await {
        "round_robin": lambda: arena.round_robin(n, judge.compare, order=settings["ORDER"]),
        "anchor": lambda: arena.anchor(n, both),
        "single_elimination": lambda: arena.seeded_single_elimination(n, both),
        "double_elimination": lambda: arena.double_elimination(n, both, generator=generator),
        "swiss": lambda: arena.swiss(n, both, generator=generator),
    }[scheme]()
    return standings.raw_scores, rank_to_quantile(standings.ranks)


def both_orders(compare):
    """A comparison asked in both orders of presentation, the scores of a player summed."""

    async def ask(match):
        swapped = replace(match, players=match.players[::-1])
        shown_first, shown_second = await asyncio.gather(compare(match), compare(swapped))
        return shown_first[0] + shown_second[1], shown_first[1] + shown_second[0]

    return ask


def as_scores(pick):
    """A match as two scores: 1 for the winner, 0 for the other."""

    async def ask(match):
        winner = (await pick(match))[0]
        return tuple(float(player == winner) for player in match.players)

    return ask


def _weighted_share(rubrics, met, weights):
    """Share of the rubric's weight that a report's items earn, 0..1."""
    each = [weights[rubric.importance] for rubric in rubrics]
    return sum(weight * item for weight, item in zip(each, met, strict=True)) / sum(each)


def check_questions(questions):
    """SystemExit when a question lacks what the scheme, or the turn rewards, lean on; it names question and remedy."""
    verifiable = config.CREDIT != "outcome" and config.TURN_REWARD == "verifiable"
    for question in questions:
        if not question.answers and config.REWARD_SCHEME == "exact_match":
            raise SystemExit(f"question {question.id} has no reference answer, which REWARD_SCHEME = 'exact_match' "
                             "needs: prepare the data with --qa, or choose another scheme")  # fmt: skip
        if not question.answers and verifiable:
            raise SystemExit(f"question {question.id} has no reference answer, which CREDIT = {config.CREDIT!r} with "
                             "TURN_REWARD = 'verifiable' needs: prepare the data with --qa, or set TURN_REWARD = "
                             "'judge'")  # fmt: skip
        if not question.rubrics and config.REWARD_SCHEME not in ("exact_match", "format_only"):
            raise SystemExit(f"question {question.id} has no rubric for the judge; set REWARD_SCHEME = 'exact_match'")
        if config.REWARD_SCHEME not in ("explicit", "gdpo"):
            continue
        each = {rubric.importance for rubric in question.rubrics}
        if unknown := sorted(each - config.IMPORTANCE_WEIGHTS.keys()):
            raise SystemExit(f"question {question.id}: config.IMPORTANCE_WEIGHTS has no weight for "
                             f"{', '.join(map(repr, unknown))}; add one, or mend the rubric")  # fmt: skip
        if not sum(config.IMPORTANCE_WEIGHTS[importance] for importance in each):
            raise SystemExit(f"question {question.id}: no rubric item has a weight; choose another REWARD_SCHEME, or "
                             "weigh its importance in config.IMPORTANCE_WEIGHTS")  # fmt: skip


def count_calls(n):
    """Judge calls that a group of n playing trajectories costs under the present config."""
    scheme, pairs = config.REWARD_SCHEME, n * (n - 1) // 2
    if scheme == "tournament":
        return count_matches(n, config.MATCH_SIZE, config.WINNERS_PER_MATCH, config.FINALISTS, config.REPEATS)
    return {
        "round_robin": pairs * (2 if config.ORDER == "both" else 1), "anchor": 2 * (n - 1),
        "single_elimination": 4 * (n - 1), "double_elimination": 4 * (n - 1),
        "swiss": 2 * (n // 2) * math.ceil(math.log2(max(1, n))), "pairwise": pairs,
        "explicit": n, "gdpo": n, "implicit": n, "format_only": 0, "exact_match": 0,
    }[scheme]  # fmt: skip


def rank_to_quantile(ranks):
    """Ranks (0 is best, ties share one) to rewards in [0, 1]: 1 - rank / (n - 1); a lone player gets 1.

    Source: ArenaRL, quantile reward.
    """
    return [1.0 - rank / max(1, len(ranks) - 1) for rank in ranks]
