"""ArenaRL's topologies: who plays whom, and from scores to ranks. The judge is an async callable; no HTTP here.

compare: async callable, Match of two players (in presentation order) -> (score of the first, score of the second),
finite numbers, more is better. Every function returns Standings: raw_scores (n,) as each says; ranks (n,) floats, 0 is
best; matches with outcome = the two scores, ordered by round and index, which together name a match's place. The
matches of a round run at once. Players are 0..n-1; a lone player gets score 0 and rank 0 without a match, and n = 0
gives empty standings. Only `round_robin` knows the order of presentation; elsewhere `compare` asks both orders itself.
schemes.rank_to_quantile turns ranks into rewards.
Source: ArenaRL; its code at commit 8653a9a, row by row in tests/golden/arena_topologies.jsonl.gz.
"""

import asyncio
import itertools
import math
from dataclasses import replace
from statistics import fmean

from records import Match, Standings


async def round_robin(n, compare, *, order):
    """Everyone meets everyone once, all in one round: n (n - 1) / 2 matches, twice as many with order "both".

    order: "fixed" shows the lower player first; "balanced" shows each player first as often as second, up to
    one; "both" asks each pair in both orders, as two matches whose scores are summed.
    raw_scores: 1 point per pair won, 1/2 for a draw. Equal points share the best of their ranks.
    """
    pairs = [_presented(i, j, order) for i, j in itertools.combinations(range(n), 2)]
    matches = await _play([shown for pair in pairs for shown in pair], 0, compare)
    totals = {}
    for match in matches:
        total = totals.setdefault(tuple(sorted(match.players)), dict.fromkeys(match.players, 0.0))
        for player, score in zip(match.players, match.outcome, strict=True):
            total[player] += score
    points = _points(n, [tuple(total.items()) for total in totals.values()])
    return Standings(points, _shared_ranks(points), matches)


def _presented(i, j, order):
    """The presentations of the pair i < j. The parity of j - i balances: a player's neighbours alternate."""
    if order == "both":
        return (i, j), (j, i)
    if order == "balanced":
        return ((i, j) if (j - i) % 2 else (j, i),)
    if order == "fixed":
        return ((i, j),)
    raise ValueError(f'ORDER must be "fixed", "balanced" or "both", got {order!r}')


async def anchor(n, compare):
    """Everyone against player 0, who is shown second: n - 1 matches in one round.

    raw_scores: the score against the anchor; the anchor's is the mean of its own. Equal scores share the best of
    their ranks. ArenaRL's anchor is decoded greedily.
    """
    matches = await _play([(player, 0) for player in range(1, n)], 0, compare)
    scores = _mean_scores(n, matches)
    return Standings(scores, _shared_ranks(scores), matches)


async def seeded_single_elimination(n, compare):
    """An anchor round seeds a bracket: 2 n - 2 matches in 1 + ceil(log2 n) rounds.

    Seeds 1 and 2 can meet only in the final when n is a power of two. For other n the seats left empty close up,
    as in ArenaRL's code, and seeds 1 and 2 may meet early (n = 3: in the first match). The first shown advances
    on equal scores. raw_scores: mean score over all matches; the ranks are strict, by the round of the loss, then
    by that mean.
    """
    matches = (await anchor(n, compare)).matches
    scores = _mean_scores(n, matches)
    seeds = sorted(range(n), key=lambda player: -scores[player])
    alive, lost = [seeds[seat] for seat in _bracket(n)], []
    while len(alive) > 1:
        played, alive, losers = await _knock_out(alive, 1 + len(lost), compare)
        matches += played
        lost.append(losers)
    return _by_elimination(n, matches, alive, lost)


def _bracket(n):
    """Seeds (0 is best) in the order of the seats: the best halves meet last."""
    seats = [0]
    while len(seats) < n:
        seats = [seat for seed in seats for seat in (seed, 2 * len(seats) - 1 - seed)]
    return [seed for seed in seats if seed < n]


async def double_elimination(n, compare, *, generator):
    """Out after two losses: 2 n - 2 matches; a winners' bracket, then the losers' bracket, then one final.

    generator: a random.Random; it draws the pairs of every round. In the losers' bracket each round adds those
    who lost in the winners' round of the same number. The first shown wins on equal scores, and one final decides
    even when the unbeaten player loses it. raw_scores and ranks: as in seeded_single_elimination.
    """
    matches, fallen, lost, number = [], [], [], itertools.count()

    async def draw(players):
        generator.shuffle(players)
        played, winners, losers = await _knock_out(players[::-1], next(number), compare)
        matches.extend(played)
        return winners, losers

    unbeaten, once_beaten = list(range(n)), []
    while len(unbeaten) > 1:
        unbeaten, losers = await draw(unbeaten)
        fallen.append(losers)
    while fallen or len(once_beaten) > 1:
        once_beaten = once_beaten + (fallen.pop(0) if fallen else [])
        if len(once_beaten) > 1:
            once_beaten, losers = await draw(once_beaten)
            lost.append(losers)
    if once_beaten:
        unbeaten, losers = await draw(unbeaten + once_beaten)
        lost.append(losers)
    return _by_elimination(n, matches, unbeaten, lost)


async def swiss(n, compare, *, generator, rounds=None):
    """Every round pairs players of like points who have not met: n // 2 matches in each of ceil(log2 n) rounds.

    generator: a random.Random; it shuffles the players before each round's sort by points. In an odd field the last
    one sits out and gets a point. rounds: at least 1, and no more than n - 1 are played. raw_scores: points (1 a
    win, 1/2 a draw). Ranks: by points, then by the sum of the opponents' points; equal ones share the mean of theirs.
    Departs from ArenaRL's code, which shuffles the list of players in place and then indexes it by player.
    """
    if rounds is not None and rounds < 1:
        raise ValueError(f"rounds must be at least 1, got {rounds}; leave it out for ceil(log2 n)")
    points, met, matches = [0.0] * n, [set() for _ in range(n)], []
    for number in range(min(rounds or (n - 1).bit_length(), n - 1)):
        field = list(range(n))
        generator.shuffle(field)
        field.sort(key=lambda player: -points[player])
        if n % 2:
            points[field.pop()] += 1.0
        played = await _play(_like_pairs(field, met), number, compare)
        won = _points(n, [tuple(zip(match.players, match.outcome, strict=True)) for match in played])
        for player, gain in enumerate(won):
            points[player] += gain
        for match in played:
            first, second = match.players
            met[first].add(second)
            met[second].add(first)
        matches += played
    keys = [(points[player], sum(points[other] for other in met[player])) for player in range(n)]
    ranks = [best + (keys.count(key) - 1) / 2 for key, best in zip(keys, _shared_ranks(keys), strict=True)]
    return Standings(points, ranks, matches)


def _like_pairs(field, met):
    """From the top, each player with the next one it has not met, or with the next one when it has met them all."""
    waiting, pairs = list(field), []
    while waiting:
        player = waiting.pop(0)
        opponent = next((other for other in waiting if other not in met[player]), waiting[0])
        waiting.remove(opponent)
        pairs.append((player, opponent))
    return pairs


async def _play(pairs, number, compare):
    """One round: all pairs at once. Returns its matches with the scores as outcomes."""
    drawn = [Match(0, number, index, pair, 1) for index, pair in enumerate(pairs)]
    scores = await asyncio.gather(*(compare(match) for match in drawn))
    return [replace(match, outcome=_checked(match, pair)) for match, pair in zip(drawn, scores, strict=True)]


def _checked(match, scores):
    scores = tuple(scores)
    if len(scores) != 2 or not all(math.isfinite(score) for score in scores):
        raise ValueError(f"{match}: {scores} is not a pair of finite scores")
    return scores


async def _knock_out(players, number, compare):
    """Neighbours meet, the last of an odd field does not. Returns (matches, who goes on, losers).

    Who sat out comes first among those who go on. The first shown wins on equal scores.
    """
    played = await _play(list(zip(players[::2], players[1::2], strict=False)), number, compare)
    results = [match.players if match.outcome[0] >= match.outcome[1] else match.players[::-1] for match in played]
    waiting = players[2 * len(played) :]
    return played, waiting + [winner for winner, _ in results], [loser for _, loser in results]


def _by_elimination(n, matches, alive, lost):
    """Standings from who is left and each round's losers: a later loss is better, then a higher mean score."""
    scores, ranks = _mean_scores(n, matches), [0.0] * n
    order = alive + [p for losers in reversed(lost) for p in sorted(losers, key=lambda player: -scores[player])]
    for rank, player in enumerate(order):
        ranks[player] = float(rank)
    return Standings(scores, ranks, matches)


def _mean_scores(n, matches):
    """Mean score of each player over its matches; 0 for one without any."""
    scores = [[] for _ in range(n)]
    for match in matches:
        for player, score in zip(match.players, match.outcome, strict=True):
            scores[player].append(score)
    return [fmean(own) if own else 0.0 for own in scores]


def _points(n, results):
    """1 to the winner, 1/2 each for a draw. results: per pair ((player, score), (player, score))."""
    points = [0.0] * n
    for (first, score_first), (second, score_second) in results:
        points[first] += 0.5 * ((score_first > score_second) + (score_first >= score_second))
        points[second] += 0.5 * ((score_second > score_first) + (score_second >= score_first))
    return points


def _shared_ranks(keys):
    """How many are strictly better, as floats: ties share the best rank."""
    return [float(sum(other > key for other in keys)) for key in keys]
