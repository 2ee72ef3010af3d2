"""The article's reward model: a repeated elimination tournament, and wins to rewards."""

import asyncio
import random
from dataclasses import replace

from records import Match, Standings


async def run_tournament(n, pick, *, match_size, winners_per_match, finalists, repeats, seed):
    """Repeated elimination tournament of players 0..n-1: the article's reward model.

    pick: async callable, Match -> its winners (players), best first. Each repeat shuffles the players
    before every round, splits them by stride into len // match_size matches (an odd field makes a larger
    match, nobody gets a bye) and keeps the winners until `finalists` are left. Every win is one point.
    Returns Standings with raw_scores (n,), ranks None, matches ordered by repeat, round, index.

    All repeats run at once and so do the matches of a round. The result still equals the sequential
    algorithm's match for match: a shuffle draws by the length of its list only, and lengths do not depend
    on who wins, so one generator, seeded once, is spent beforehand in the sequential order.
    Source: article section 3; the authors' code for strides and clamps.
    """
    _check_tournament(match_size, winners_per_match, finalists, repeats, seed)
    generator = random.Random(seed)
    brackets = [_draw_bracket(n, generator, match_size, winners_per_match, finalists) for _ in range(repeats)]
    played = await asyncio.gather(*(_play_bracket(r, b, n, pick, match_size, winners_per_match)
                                    for r, b in enumerate(brackets)))  # fmt: skip
    matches = [match for bracket in played for match in bracket]
    raw_scores = [0.0] * n
    for match in matches:
        for winner in match.outcome:
            raw_scores[winner] += 1.0
    return Standings(raw_scores, None, matches)


def _check_tournament(match_size, winners_per_match, finalists, repeats, seed):
    """Refuse settings the authors' code would silently bend into others."""
    for name, value, least in (("MATCH_SIZE", match_size, 2), ("WINNERS_PER_MATCH", winners_per_match, 1),
                               ("FINALISTS", finalists, 1), ("REPEATS", repeats, 1), ("seed", seed, 0)):  # fmt: skip
        if type(value) is not int or value < least:
            raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")


def _match_sizes(alive, match_size):
    """Sizes of a round's matches: the lengths of the strides players[i::count]."""
    count = max(1, alive // match_size)
    return [len(range(i, alive, count)) for i in range(count)]


def _draw_bracket(n, generator, match_size, winners_per_match, finalists):
    """One repeat's shuffles, round by round: permutations of positions in the list of players alive."""
    orders, alive = [], n
    while alive > max(1, finalists):
        order = list(range(alive))
        generator.shuffle(order)
        orders.append(order)
        alive = sum(min(winners_per_match, size - 1) for size in _match_sizes(alive, match_size))
    return orders


async def _play_bracket(repeat, orders, n, pick, match_size, winners_per_match):
    """Play one repeat over the drawn orders; returns its matches with their outcomes."""
    alive, matches = list(range(n)), []
    for number, order in enumerate(orders):
        players = [alive[position] for position in order]
        count = len(_match_sizes(len(players), match_size))
        drawn = [
            Match(repeat, number, i, tuple(players[i::count]), min(winners_per_match, len(players[i::count]) - 1))
            for i in range(count)
        ]
        winners = await asyncio.gather(*(pick(match) for match in drawn))
        decided = [replace(match, outcome=_checked(match, won)) for match, won in zip(drawn, winners, strict=True)]
        matches += decided
        alive = [winner for match in decided for winner in match.outcome]
    return matches


def count_matches(n, match_size, winners_per_match, finalists, repeats):
    """Judge calls one tournament of n players makes."""
    calls, alive = 0, n
    while alive > finalists:
        sizes = _match_sizes(alive, match_size)
        calls += len(sizes)
        alive = sum(min(winners_per_match, size - 1) for size in sizes)
    return calls * repeats


def _checked(match, winners):
    winners = tuple(winners)
    if len(set(winners)) != match.num_winners or not set(winners) <= set(match.players):
        raise ValueError(f"{match}: {winners} is not an outcome of it")
    return winners


def normalize_wins(raw_scores, tie_reward):
    """Min-max over the group: wins to rewards in [0, 1]; all equal gives everyone `tie_reward`.

    Source: article section 3, (w_i - min w) / (max w - min w).
    """
    low, high = min(raw_scores, default=0.0), max(raw_scores, default=0.0)
    if low == high:
        return [float(tie_reward)] * len(raw_scores)
    return [(score - low) / (high - low) for score in raw_scores]
