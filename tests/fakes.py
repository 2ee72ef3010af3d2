"""Scripted stand-ins: for faults and speed only, never the only witness."""

import asyncio
import re

from records import Question, Rubric, Trajectory, Turn
from sampler import Completion
from tools import Observation

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


class ScriptedSampler:
    """Says the scripted texts, one a call, spelled letter by letter; keeps every request with its reply."""

    def __init__(self, tokenizer, texts):
        self.tokenizer, self.texts = tokenizer, list(texts)
        self.requests, self.cut_stop_tag, self.fixed = [], False, None

    def spell(self, text):
        """Ids of the text: tags and markers as they are, all else letter by letter."""
        pieces = re.findall(r"<\|[a-z_]+\|>|<[^<>]*>|.", text, re.DOTALL)
        return [i for piece in pieces for i in self.tokenizer.encode(piece, add_special_tokens=False)]

    async def sample(self, prompt_ids, *, max_tokens, temperature, seed, slot):
        reply = self.fixed or self.say(self.texts.pop(0), max_tokens)
        self.requests.append({"prompt_ids": list(prompt_ids), "seed": seed, "reply": reply})
        return reply

    def say(self, text, max_tokens):
        ids = self.spell(text)
        cut = len(ids) > max_tokens
        stopped = not cut and text.endswith("</call_tool>")
        ids = ids[:max_tokens]
        said = self.tokenizer.decode(ids) if cut else text.removesuffix("</call_tool>" if self.cut_stop_tag else "")
        return Completion(tuple(ids), (-0.5,) * len(ids), said, "length" if cut else "stop",
                          "</call_tool>" if stopped else None)  # fmt: skip


class FakeTools:
    """Answers every call with the same text; keeps the calls."""

    def __init__(self, text="Paris is the capital.", status="ok", delay=0.0):
        self.text, self.status, self.delay, self.calls = text, status, delay, []

    async def call(self, call):
        self.calls.append(call)
        await asyncio.sleep(self.delay)
        return Observation(
            f"<tool_output>\n{self.text}\n</tool_output>", "error:bad_call" if call.fault else self.status, 0.0
        )
