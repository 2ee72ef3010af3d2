"""Scripted stand-ins: for faults and speed only, never the only witness."""

import asyncio

from records import Question, Rubric, Trajectory, Turn

RUBRICS = (Rubric("Capital", 'States that the capital is "Paris".', "Accuracy", "critical"),)
QUESTION = Question("q1", "What is the capital of France?", RUBRICS, "test")


def trajectory(text, k=0, finish="no_tool_call", question_id="q1", opening=""):
    """A trajectory whose whole response is `text`; its ids are the text's code points."""
    ids = tuple(map(ord, text))
    return Trajectory(question_id, k, (1, 2), ids, (1,) * len(ids), (-0.5,) * len(ids), (0,) * len(ids),
                      (Turn(text),), opening, finish, 1.0, 0, 7)  # fmt: skip


class ScriptedJudge:
    """Decides by `choose(answers, num_winners)`; keeps every line it is given, and every place it was asked about."""

    def __init__(self, choose, delay=0.0):
        self.choose, self.delay = choose, delay
        self.lines, self.places, self.queries = [], [], []

    def record(self, line):
        self.lines.append(line)

    async def pick(self, question, rubrics, answers, num_winners, *, place):
        self.places.append(place)
        self.queries.append((question, rubrics))
        await asyncio.sleep(self.delay)
        return self.choose(answers, num_winners)
