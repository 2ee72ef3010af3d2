"""Rewards again from judge.jsonl alone: the same schemes, played over logged verdicts instead of a judge."""

import asyncio

from records import Rubric
from reward import combine
from schemes import play


def rebuild_rewards(lines):
    """Every complete group's rewards from the lines of judge.jsonl alone: {(step, question_id): {k: reward}}.

    Answers, formats and settings come from a group's last `group` line (a resumed step writes it again), verdicts from
    the lines after it. A group whose verdicts are not all there (a kill, a refusal) is left out.
    """
    groups = {}
    for line in lines:
        if line["kind"] == "group":
            groups[line["step"], line["question_id"]] = LoggedJudge(line)
        elif line["kind"] in ("match", "grade"):
            groups[line["step"], line["question_id"]].add(line)
    rebuilt = {key: asyncio.run(judge.rewards()) for key, judge in groups.items()}
    return {key: rewards for key, rewards in rebuilt.items() if rewards is not None}


class Undecided(LookupError):
    """A log lacks a verdict that its group's scheme asks for."""


class LoggedJudge:
    """One group's judge as its log remembers it; has what schemes.play asks for."""

    def __init__(self, group):
        self.group, self.verdicts = group, {}
        self.rubrics = [Rubric(**rubric) for rubric in group["rubrics"]]
        self.playing = [answer for answer in group["answers"] if answer["plays"]]
        self.outcomes = [answer["outcome"] for answer in self.playing]

    def add(self, line):
        """Take one `match` or `grade` line; attempts that failed decide nothing."""
        if line["error"] is None and line["ask"] != "turns":  # marks of turns are credit's, not the scheme's
            match = (line["repeat"], line["round"], line["index"], *line["players"]) if line["kind"] == "match" else ()
            self.verdicts[match or line["k"]] = line

    async def pick(self, match):
        return [match.players[position] for position in self._match(match)["winners"]]

    async def compare(self, match):
        return tuple(self._match(match)["scores"])

    async def grade(self, player, by):
        return self._line(self.playing[player]["k"])["grade"]

    def _match(self, match):
        shown = (self.playing[player]["k"] for player in match.players)
        return self._line((match.repeat, match.round, match.index, *shown))

    def _line(self, place):
        if place not in self.verdicts:
            raise Undecided(place)
        return self.verdicts[place]

    async def rewards(self):
        """{k: reward}, None when a verdict is missing."""
        settings = self.group["settings"]
        try:
            _, relative = await play(len(self.playing), self, settings, self.group["seed"])
        except Undecided:
            return None
        has_answer, formats = ([answer[name] for answer in self.playing] for name in ("has_answer", "format"))
        _, rewards = combine(relative, has_answer, formats, settings)
        return {answer["k"]: reward for answer, reward in zip(self.playing, rewards, strict=True)}
