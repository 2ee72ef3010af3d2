"""From transcripts to rewards: the format check, the tournament, and the rewards of a group."""

import asyncio
import math
import random
import re
from dataclasses import asdict, dataclass, replace

import config
from protocol import TOOL_ARGUMENTS, find_tags, parse_transcript
from records import Match, ScoredGroup, Standings, seed_from

_SEGMENT = re.compile(r"(?:GOT)+(?:BOT)*")  # searches, then pages: each a call, its output and a thought


@dataclass(frozen=True)
class FormatCheck:
    """The verdict on one response.

    reward: 1.0 or 0.0. answer: the report, "" when there is none; it can be there although the format fails.
    failures: names in the order of the checks, empty when reward is 1.0. counts: name -> number.
    """

    reward: float
    answer: str
    failures: tuple[str, ...]
    counts: dict[str, int]


def check_format(transcript):
    """The FormatCheck of a response: the text after the prompt, from the "<think>" that the prompt may have opened.

    The order of blocks is checked, and its cycles counted, only when nothing else is wrong.
    Source: the article's format reward; the authors' format analysis, row by row in
    tests/golden/format.jsonl.gz.
    """
    parsed = parse_transcript(transcript)
    answer = find_answer(transcript)
    calls = [block.attributes.get("name", "").strip() for block in parsed.blocks if block.tag == "call_tool"]
    known_calls = [name for name in calls if name in TOOL_ARGUMENTS]
    checks = {
        "tag:unknown_tags": parsed.unknown_tags,
        "tag:invalid_attrs": parsed.bad_attributes,
        "tag:broken_xml": parsed.broken_tags,
        "structure:stray_text_outside_tags": parsed.stray,
        "tool:unknown_tool_name": len(calls) > len(known_calls),
        "answer:invalid_or_missing_final_answer": not answer,
    }
    failures = [name for name, fault in checks.items() if fault]
    fault, cycles = (None, "") if failures else _check_order(parsed.blocks)
    failures += [fault] if fault else []
    counts = {
        "answer_tag_count": sum(block.tag == "answer" for block in parsed.blocks),
        "tool_call_count": len(known_calls),
        "tool_output_count": sum(block.tag == "tool_output" for block in parsed.blocks),
        "google_search_cycle_count": cycles.count("G"),
        "browse_webpage_cycle_count": cycles.count("B"),
        "segment_count": len(_SEGMENT.findall(cycles)),
        "stray_text_count": len(parsed.stray),
    }
    return FormatCheck(0.0 if failures else 1.0, answer, tuple(failures), counts)


def find_answer(transcript):
    """The complete, non-empty answer that ends a response and holds nothing like a tag; else "".

    Only the first `<answer>` is looked at: a second one leaves text after it, or a tag in it.
    """
    answer, closing, tail = transcript.partition("<answer>")[2].partition("</answer>")
    if not closing or tail.strip() or next(find_tags(answer), None):
        return ""
    return answer.strip()


def _check_order(blocks):
    """The fault in the order of top-level blocks (None when sound), and the sound cycles as one letter per block.

    The order is: a thought, then segments of at least one search cycle and any number of page cycles, then the
    answer. An empty thought, call or output breaks its cycle.
    """
    shape = "".join(map(_letter, blocks))
    if not shape.startswith("T"):
        return "structure:must_start_with_non_empty_think", ""
    if shape == "TA":
        return "structure:must_have_at_least_one_tool_cycle", ""
    cycles = re.match(f"(?:{_SEGMENT.pattern})*", shape[1:])[0]
    fault = None if shape == f"T{cycles}A" else "structure:each_segment_must_start_with_google_search_cycle"
    return fault, cycles


def _letter(block):
    """T thought, G search, B page, O output, A answer; "-" for anything empty."""
    if block.tag == "answer":
        return "A"
    if not block.inner.strip():
        return "-"
    name = block.attributes.get("name", "").strip()
    return {"think": "T", "tool_output": "O"}.get(block.tag) or {"google_search": "G", "browse_webpage": "B"}.get(
        name, "-"
    )


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


def rank_to_quantile(ranks):
    """Ranks (0 is best, ties share one) to rewards in [0, 1]: 1 - rank / (n - 1); a lone player gets 1.

    Source: ArenaRL, quantile reward.
    """
    return [1.0 - rank / max(1, len(ranks) - 1) for rank in ranks]


async def score_group(question, trajectories, judge, *, step=0, seed=None):
    """Play the tournament of one question's trajectories; reward = tournament reward + format reward.

    judge: has `async pick(question, rubrics, answers, num_winners, place=...)` and `record(line)`. Broken
    trajectories do not play and get NaN. A trajectory without an answer plays as empty text, counts in
    minimum and maximum, and only then gets 0. Writes the `group` and `scored` lines of judge.jsonl.
    seed: of the draws; None derives it from SEED, step and question.
    Returns a ScoredGroup; JudgeError passes through.
    """
    checks = [check_format(t.transcript) for t in trajectories]
    playing = [k for k, t in enumerate(trajectories) if not t.broken]
    where = {"step": step, "question_id": question.id}
    judge.record({"kind": "group", **where, "query": question.query, "source": question.source,
                  "rubrics": [asdict(rubric) for rubric in question.rubrics], "answers": [
                      {"k": k, "answer": check.answer, "has_answer": bool(check.answer), "format": check.reward,
                       "failures": list(check.failures), "finish": t.finish, "plays": k in playing}
                      for k, (t, check) in enumerate(zip(trajectories, checks, strict=True))]})  # fmt: skip

    async def pick(match):
        players = [playing[i] for i in match.players]
        place = {**where, "repeat": match.repeat, "round": match.round, "index": match.index, "players": players}
        answers = [checks[k].answer for k in players]
        won = await judge.pick(question.query, question.rubrics, answers, match.num_winners, place=place)
        return [match.players[position] for position in won]

    standings = await run_tournament(
        len(playing),
        pick,
        match_size=config.MATCH_SIZE,
        winners_per_match=config.WINNERS_PER_MATCH,
        finalists=config.FINALISTS,
        repeats=config.REPEATS,
        seed=seed_from(config.SEED, step, question.id, "tournament") if seed is None else seed,
    )
    normalized = normalize_wins(standings.raw_scores, config.TIE_REWARD)
    tournament = [r if checks[k].answer else 0.0 for k, r in zip(playing, normalized, strict=True)]
    rewards = [r + checks[k].reward for k, r in zip(playing, tournament, strict=True)]
    scored = ScoredGroup(
        question=question,
        trajectories=tuple(trajectories),
        answers=tuple(check.answer for check in checks),
        format_rewards=tuple(check.reward for check in checks),
        raw_scores=_spread(standings.raw_scores, playing, len(checks)),
        tournament_rewards=_spread(tournament, playing, len(checks)),
        rewards=_spread(rewards, playing, len(checks)),
    )
    judge.record({"kind": "scored", **where, "players": playing, "raw_scores": standings.raw_scores,
                  "tournament_rewards": tournament, "format_rewards": [checks[k].reward for k in playing],
                  "rewards": rewards})  # fmt: skip
    return scored


def _spread(values, playing, size):
    """Values of the playing trajectories at their k; NaN at every other."""
    spread = [math.nan] * size
    for k, value in zip(playing, values, strict=True):
        spread[k] = value
    return tuple(spread)


def rebuild_rewards(lines):
    """Every group's rewards from the lines of judge.jsonl alone: {(step, question_id): {k: reward}}.

    Answers and formats come from a group's last `group` line (a resumed step writes it again), wins from the
    `match` lines after it. The article's scheme: wins, min-max, zero without answer, plus format.
    """
    answers, wins = {}, {}
    for line in lines:
        key = line["step"], line["question_id"]
        if line["kind"] == "group":
            answers[key] = {answer["k"]: answer for answer in line["answers"]}
            wins[key] = {answer["k"]: 0.0 for answer in line["answers"] if answer["plays"]}
        elif line["kind"] == "match" and line["winners"] is not None:
            for position in line["winners"]:
                wins[key][line["players"][position]] += 1.0
    return {key: _rewards_of(answers[key], won) for key, won in wins.items()}


def _rewards_of(answers, won):
    normalized = normalize_wins(list(won.values()), config.TIE_REWARD)
    return {k: (r if answers[k]["has_answer"] else 0.0) + answers[k]["format"]
            for k, r in zip(won, normalized, strict=True)}  # fmt: skip
