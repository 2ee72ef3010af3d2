"""From a question's trajectories to their rewards: format, outcome under REWARD_SCHEME, rewards of turns."""

import asyncio
import math
from dataclasses import asdict
from functools import cached_property

import config
from asks import render_path, render_turns
from credit import group_advantages
from format_reward import check_format
from records import ScoredGroup, seed_from
from schemes import play, rank_to_quantile
from tournament import normalize_wins, run_tournament
from turn_reward import judged_turn_rewards, outcome_reward, turn_rewards

__all__ = ["check_format", "combine", "normalize_wins", "rank_to_quantile", "run_tournament", "score_group"]
# what the rewards of a group depend on, kept in its `group` line
SETTINGS = ("REWARD_SCHEME", "FORMAT_WEIGHT", "MATCH_SIZE", "WINNERS_PER_MATCH", "FINALISTS", "REPEATS", "TIE_REWARD",
            "ORDER", "IMPORTANCE_WEIGHTS", "ADVANTAGE_EPS")  # fmt: skip


class _Asking:
    """The judge as `play` sees it: players by number in, every call at its place in judge.jsonl.

    playing: the trajectories' k by player. Presentation order is that of the match.
    """

    def __init__(self, judge, question, trajectories, checks, playing, where):
        self.judge, self.question, self.rubrics, self.where = judge, question, question.rubrics, where
        self.playing, self.answers = playing, [checks[k].answer for k in playing]
        self.trajectories = [trajectories[k] for k in playing]
        self.outcomes = [outcome_reward(checks[k], question.answers) for k in playing] if question.answers else None

    @cached_property
    def paths(self):
        return [render_path(t) for t in self.trajectories] if config.ARENA_JUDGE == "process" else None

    def _place(self, match):
        return {**self.where, "repeat": match.repeat, "round": match.round, "index": match.index,
                "players": [self.playing[i] for i in match.players]}  # fmt: skip

    def _shown(self, texts, match):
        return [texts[i] for i in match.players]

    async def pick(self, match):
        won = await self.judge.pick(self.question.query, self.rubrics, self._shown(self.answers, match),
                                    match.num_winners, place=self._place(match))  # fmt: skip
        return [match.players[position] for position in won]

    async def compare(self, match):
        paths = self._shown(self.paths, match) if self.paths else ()
        return await self.judge.compare(self.question.query, self.rubrics, self._shown(self.answers, match),
                                        paths=paths, place=self._place(match))  # fmt: skip

    async def grade(self, player, by):
        return await self.judge.grade(self.question.query, self.rubrics, self.answers[player], by=by,
                                      place={**self.where, "k": self.playing[player]})  # fmt: skip

    async def turn_rewards(self, player):
        """Rewards of all turns but the last, by config.TURN_REWARD."""
        trajectory = self.trajectories[player]
        if config.TURN_REWARD == "verifiable" or len(trajectory.turns) < 2:
            return turn_rewards(trajectory, self.question.answers)
        marks = await self.judge.grade(self.question.query, self.rubrics, self.answers[player], by="turns",
                                       turns=render_turns(trajectory),
                                       place={**self.where, "k": self.playing[player]})  # fmt: skip
        return judged_turn_rewards(trajectory, marks)


async def score_group(question, trajectories, judge, *, step=0, seed=None):
    """Judge one question's trajectories under config.REWARD_SCHEME; reward = relative reward + format reward.

    judge: a judge.Judge, or anything with its async `pick`, `compare`, `grade` and its `record(line)`. Broken
    trajectories do not play and get NaN. A trajectory without an answer plays as empty text, counts in
    minimum, maximum and ranks, and only then gets 0. Writes the `group` and `scored` lines of judge.jsonl.
    seed: of the draws; None derives it from SEED, step and question.
    Returns a ScoredGroup; JudgeError passes through.
    """
    checks = [check_format(t.transcript) for t in trajectories]
    playing = [k for k, t in enumerate(trajectories) if not t.broken]
    where = {"step": step, "question_id": question.id}
    seed = seed_from(config.SEED, step, question.id, "tournament") if seed is None else seed
    settings = {name: getattr(config, name) for name in SETTINGS}
    asking = _Asking(judge, question, trajectories, checks, playing, where)
    judge.record(_group_line(question, trajectories, checks, asking, {**where, "settings": settings, "seed": seed}))
    raw_scores, relative = await play(len(playing), asking, settings, seed)
    formats = [checks[k].reward for k in playing]
    relative, rewards = combine(relative, [bool(checks[k].answer) for k in playing], formats, settings)
    turns = []
    if config.CREDIT != "outcome":
        turns = await asyncio.gather(*(asking.turn_rewards(player) for player in range(len(playing))))
    judge.record({"kind": "scored", **where, "players": playing, "raw_scores": raw_scores,
                  "tournament_rewards": relative, "format_rewards": formats, "rewards": rewards,
                  "turn_rewards": turns})  # fmt: skip
    size = len(checks)
    return ScoredGroup(
        question=question,
        trajectories=tuple(trajectories),
        answers=tuple(check.answer for check in checks),
        format_rewards=tuple(check.reward for check in checks),
        raw_scores=_spread(raw_scores, playing, size),
        tournament_rewards=_spread(relative, playing, size),
        rewards=_spread(rewards, playing, size),
        turn_rewards=_spread(map(tuple, turns), playing, size, ()) if config.CREDIT != "outcome" else (),
    )


def _group_line(question, trajectories, checks, asking, where):
    outcomes = dict(zip(asking.playing, asking.outcomes or [None] * len(asking.playing), strict=True))
    answers = [
        {"k": k, "answer": check.answer, "has_answer": bool(check.answer), "format": check.reward,
         "failures": list(check.failures), "finish": t.finish, "plays": k in outcomes, "outcome": outcomes.get(k)}
        for k, (t, check) in enumerate(zip(trajectories, checks, strict=True))
    ]  # fmt: skip
    return {"kind": "group", **where, "query": question.query, "source": question.source,
            "rubrics": [asdict(rubric) for rubric in question.rubrics], "answers": answers}  # fmt: skip


def combine(relative, has_answer, formats, settings):
    """(relative rewards with 0 for whoever has no answer, those plus the weighted format rewards).

    gdpo standardises each of the two within the group before it adds them; exact_match has both within it already.
    """
    if settings["REWARD_SCHEME"] == "exact_match":
        return relative, relative
    relative = [r if there else 0.0 for r, there in zip(relative, has_answer, strict=True)]
    parts = relative, formats
    if settings["REWARD_SCHEME"] == "gdpo":
        parts = (group_advantages(part, settings["ADVANTAGE_EPS"]).tolist() for part in parts)
    return relative, [r + settings["FORMAT_WEIGHT"] * f for r, f in zip(*parts, strict=True)]


def _spread(values, playing, size, missing=math.nan):
    """Values of the playing trajectories at their k; `missing` at every other."""
    spread = [missing] * size
    for k, value in zip(playing, values, strict=True):
        spread[k] = value
    return tuple(spread)
