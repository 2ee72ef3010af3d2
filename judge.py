"""One question to the judge, one verdict: back ends, retries, and judge.jsonl, which is also the memory."""

import asyncio
import time

import config
from asks import Ask, render, render_prompt
from jev import JevJudge
from judges import REFUSALS, ChatJudge, Reply, persist
from pace import time_limit
from records import Journal, digest, read_journal
from rule import rule
from verdicts import VerdictError, parse_verdict, read
from wire import CallFailure

__all__ = ["Judge", "JudgeError", "JudgeRefusal", "VerdictError", "parse_verdict", "render_prompt"]
# the field of a decided line, by kind of question
RESULT = {"pick": "winners", "compare": "scores", "items": "grade", "overall": "grade", "turns": "grade"}
PLACE = ("step", "question_id", "repeat", "round", "index", "k")  # where a question to the judge stands in a run


class JudgeError(RuntimeError):
    """The judge gave no verdict in JUDGE_TRIES attempts; the step stops, and nothing is invented."""


class JudgeRefusal(RuntimeError):
    """The judge will not look at this content (too long, moderated): the question's group is void, the run goes on."""


class RuleJudge:
    """The embedded judge as a back end: deterministic, offline."""

    name = "rule"
    prompt = staticmethod(render)

    def __init__(self):
        self.concurrency = config.JUDGE_CONCURRENCY

    async def reply(self, ask):
        """The rule's verdict as a Reply."""
        return Reply(rule(ask), "rule")

    async def close(self):
        """Nothing is open."""


BACKENDS = {
    "rule": lambda *server: RuleJudge(),
    "openai": lambda *server: ChatJudge(*server),
    "jev": lambda *server: JevJudge(),
}


class Judge:
    """Asks a back end, retries, and writes every attempt to judge.jsonl, which is also its memory.

    server_url, server_model: the policy's server and its base model, which judges when config.JUDGE_URL is empty.
    revive: async, awaited when the connection broke, before the next attempt: a server that died may come back.
    `name` identifies the judge.
    """

    def __init__(self, path, *, server_url="", server_model="", revive=None):
        backend = BACKENDS[config.JUDGE_BACKEND](server_url, server_model)
        self.revive = revive
        self.name, self.prompt, self.reply, self.close = backend.name, backend.prompt, backend.reply, backend.close
        self.calls, self.input_tokens, self.output_tokens, self.seconds = 0, 0, 0, 0.0
        self.limit = asyncio.Semaphore(min(config.JUDGE_CONCURRENCY, backend.concurrency))
        self.decided, self.voided = {}, set()
        for _, line in read_journal(path):
            if line.get("kind") in ("match", "grade") and line[RESULT[line["ask"]]] is not None:
                self.decided[self._key(line)] = line
            elif line.get("kind") == "void":
                self.voided.add((line["step"], line["question_id"]))
        self.journal = Journal(path)

    @staticmethod
    def _key(line):
        place = (line.get(name) for name in PLACE)
        return line["judge"], line["prompt_hash"], line["ask"], *place, tuple(line.get("players", ()))

    def totals(self):
        """What has been asked since the start of this process: calls, seconds (summed over calls), tokens."""
        return {"calls": self.calls, "seconds": self.seconds,
                "input_tokens": self.input_tokens, "output_tokens": self.output_tokens}  # fmt: skip

    def record(self, line):
        """Append a `group`, `scored` or `void` line."""
        self.journal.append(line)

    async def pick(self, question, rubrics, answers, num_winners, *, place):
        """Positions of the winners among `answers`, best first: one match of the article's tournament.

        question: the query's text. place: where the match stands (step, question_id, repeat, round, index,
        players), for the journal. A match decided in the journal is not asked again. Raises JudgeError after
        JUDGE_TRIES failed attempts, JudgeRefusal when the reply blames the content, AccountError (wire.py).
        """
        return await self._decide(Ask("pick", question, tuple(rubrics), tuple(answers), num_winners), place)

    async def compare(self, question, rubrics, answers, *, paths=(), place):
        """Scores of two trajectories, 0..10 each, in the order shown; paths: theirs, or () for the answers alone.

        Otherwise as `pick`. Source: ArenaRL's process-aware judge.
        """
        return await self._decide(Ask("compare", question, tuple(rubrics), tuple(answers), paths=tuple(paths)), place)

    async def grade(self, question, rubrics, answer, *, by, turns=(), place):
        """One report alone. by "items": 0 or 1 per rubric item, a tuple; by "overall": a score, 1..10; by "turns", with
        the texts of a trajectory's turns but the last: three marks a turn, 0..10 (asks.MARKS).

        place: step, question_id, k. Otherwise as `pick`.
        """
        return await self._decide(Ask(by, question, tuple(rubrics), (answer,), turns=tuple(turns)), place)

    async def _decide(self, ask, place):
        prompt_hash = digest(self.prompt(ask))
        kind, field = "match" if ask.kind in ("pick", "compare") else "grade", RESULT[ask.kind]
        line = {"kind": kind, "ask": ask.kind, "judge": self.name, "prompt_hash": prompt_hash, **place}
        if (known := self.decided.get(self._key(line))) is not None:
            self.journal.append({**known, "cached": True})  # the lines after a `group` line are all of its group's
            return _as_tuples(known[field])
        verdict, error, attempts = await persist(lambda n: self._ask(ask, line, n), config.JUDGE_TRIES, self.revive)
        if error is None:
            return verdict
        if error.kind in REFUSALS:
            raise JudgeRefusal(f"judge {self.name!r} refuses question {place['question_id']} in step "
                               f"{place['step']} ({error.kind}): {error}")  # fmt: skip
        raise JudgeError(
            f"no verdict from judge {self.name!r} in {attempts} attempts (step {place['step']}, question "
            f"{place['question_id']}), the last: {error}. Everything is saved: run the same command to continue"
        )

    async def _ask(self, ask, line, attempt):
        """One attempt, journaled whatever comes of it: (verdict, None) or (None, the error)."""
        reply, verdict, failure = None, None, None
        async with self.limit:
            started = time.perf_counter()
            try:
                async with time_limit(config.JUDGE_TIMEOUT):
                    reply = await self.reply(ask)
                verdict = read(ask, reply)
            except VerdictError as error:
                failure = error
            except CallFailure as error:
                failure = VerdictError(error.kind, str(error), final=error.final)
            except TimeoutError:
                failure = VerdictError("timeout", f"no reply in {config.JUDGE_TIMEOUT} s")
            seconds = time.perf_counter() - started
        reply = reply or Reply(raw=None)
        self.calls += 1
        self.seconds += seconds
        self.input_tokens += reply.input_tokens
        self.output_tokens += reply.output_tokens
        done = {
            **line, "model": reply.model, "raw": reply.raw, RESULT[ask.kind]: verdict,
            "error": failure and failure.kind, "attempt": attempt, "seconds": round(seconds, 4),
            "input_tokens": reply.input_tokens, "output_tokens": reply.output_tokens, "cached": False,
        }  # fmt: skip
        self.journal.append(done)
        if failure is None:
            self.decided[self._key(line)] = done
        return verdict, failure


def _as_tuples(value):
    """A verdict as it was before JSON made lists of its tuples."""
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value
