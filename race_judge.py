"""Scoring with RACE: back ends of the judge, retries, and eval/NAME/judge.jsonl, which is the memory too."""

import asyncio
import json

import config
import race
from judges import ChatJudge, Reply, persist
from pace import time_limit
from records import Journal, digest, read_journal
from verdicts import VerdictError
from wire import CallFailure


class RuleJudge:
    """The embedded judge: deterministic, offline; it stands in where the run's own judge was the rule judge."""

    name = "rule"

    async def ask(self, task, article, messages, numbered):
        """The Reply with what race.rule_sheet counts; the messages are for the record only."""
        return Reply(json.dumps(race.rule_sheet(task, article)), "rule")

    async def close(self):
        """Nothing is open."""


class ChatBackend:
    """Any OpenAI-compatible server, temperature 0, held to the reply's JSON schema when it can."""

    def __init__(self, server):
        self.chat = ChatJudge(server.url if server else "", server.base if server else "")
        self.name, self.close = self.chat.name, self.chat.close

    async def ask(self, task, article, messages, numbered):
        """The Reply to one comparison."""
        schema = race.schema(task.criteria, numbered)
        return await self.chat.chat(messages, schema=schema, max_tokens=config.EVAL_MAX_TOKENS)


def is_rule():
    """Whether the embedded judge scores: the run's was the rule judge, and no other is named for evaluation."""
    return config.JUDGE_BACKEND == "rule" and not config.EVAL_JUDGE_URL


def needs_server():
    """Whether the judge is the base model on the policy's own server."""
    return not is_rule() and not config.EVAL_JUDGE_URL and not config.JUDGE_URL


def make_judge(server):
    """The back end that config names; SystemExit, with the remedy, when none can give scores."""
    if is_rule():
        return RuleJudge()
    if config.EVAL_JUDGE_URL:
        config.JUDGE_URL, config.JUDGE_MODEL = config.EVAL_JUDGE_URL, config.EVAL_JUDGE_MODEL
    elif config.JUDGE_BACKEND == "jev":
        raise SystemExit("Jev chooses between reports and gives no scores; set EVAL_JUDGE_URL and EVAL_JUDGE_MODEL")
    elif config.EVAL_JUDGE_MODEL:
        config.JUDGE_MODEL = config.EVAL_JUDGE_MODEL
    if not config.JUDGE_URL and server is None:
        raise SystemExit("no judge: set EVAL_JUDGE_URL and EVAL_JUDGE_MODEL in config.py to an OpenAI-compatible one, "
                         "or add --run NAME of a run whose judge has an address of its own")  # fmt: skip
    try:
        return ChatBackend(server)
    except ValueError as error:
        raise SystemExit(str(error)) from None


class Scorer:
    """Scores reports; every reply is journaled at once, and one that gave scores is not asked for again.

    revive: async, awaited when the connection broke: the policy's own server may come back.
    """

    def __init__(self, folder, judge, prompts, revive=None):
        self.judge, self.prompts, self.revive = judge, prompts, revive
        self.limit = asyncio.Semaphore(config.JUDGE_CONCURRENCY)
        self.stopped = None  # what no later call can survive
        self.known = {}
        path = folder / "judge.jsonl"
        for _, line in read_journal(path):
            if line["scores"] is not None:
                self.known[self._key(line)] = line
        self.journal = Journal(path)

    @staticmethod
    def _key(line):
        return tuple(line[name] for name in ("judge", "prompt_hash", "id", "repeat"))

    async def score(self, task, article, repeat):
        """(scores, model, None), or (None, "", why not in words) after EVAL_TRIES attempts."""
        messages = race.render(task, article, self.prompts)
        line = {"judge": self.judge.name, "prompt_hash": digest([messages, task.hash]), "id": task.id,
                "repeat": repeat}  # fmt: skip
        if (known := self.known.get(self._key(line))) is not None:
            return known["scores"], known["model"], None
        characters = sum(len(message["content"]) for message in messages)
        if characters > config.EVAL_PROMPT_CHARACTERS:
            return None, "", (f"too_long: the judge's prompt has {characters:,} characters, EVAL_PROMPT_CHARACTERS is "
                              f"{config.EVAL_PROMPT_CHARACTERS:,}")  # fmt: skip

        def ask(attempt):
            return self._attempt(line, attempt, task, article, messages)

        decided, error, _ = await persist(ask, config.EVAL_TRIES, self.revive)
        return (*decided, None) if error is None else (None, "", f"{error.kind}: {error}")

    async def _attempt(self, line, attempt, task, article, messages):
        """One call, journaled whatever comes of it: ((scores, model), None) or (None, the error)."""
        reply, scores, failure = None, None, None
        async with self.limit:
            if self.stopped:
                raise self.stopped
            try:
                async with time_limit(config.JUDGE_TIMEOUT):
                    reply = await self.judge.ask(task, article, messages, self.prompts.numbered)
                scores = race.read_scores(reply, task.criteria, numbered=self.prompts.numbered)
            except (VerdictError, CallFailure) as error:
                failure = error
            except TimeoutError:
                failure = VerdictError("timeout", f"no reply in {config.JUDGE_TIMEOUT} s")
            except Exception as error:  # an account, a server: the others stop as well
                self.stopped = error
                raise
        reply = reply or Reply(raw=None)
        self.journal.append({
            **line, "prompts": self.prompts.hash, "attempt": attempt, "model": reply.model, "raw": reply.raw,
            "finish": reply.finish, "scores": scores, "error": failure and failure.kind,
            "said": failure and str(failure), "input_tokens": reply.input_tokens, "output_tokens": reply.output_tokens,
        })  # fmt: skip
        return (None, failure) if failure else ((scores, reply.model), None)

    async def judge_report(self, task, report, repeats):
        """The line of results.jsonl for one report (a dict of eval_race); report None: there is none."""
        result = {"id": task.id, "language": task.language, "task": task.hash, "prompts": self.prompts.hash,
                  "judge": self.judge.name, "models": [], "completed": False, "valid_format": None, "tool_calls": None,
                  "generated_tokens": None, "scores": None, "repeats": [], "failure": None}  # fmt: skip
        if report is None:
            return {**result, "failure": "no report"}
        result |= {name: report[name] for name in ("valid_format", "tool_calls", "generated_tokens")}
        if not report["article"].strip():
            return {**result, "scores": dict.fromkeys(race.SCORES, 0.0)}
        judged = await asyncio.gather(*(self.score(task, report["article"], n) for n in range(repeats)))
        failures = [failure for _, _, failure in judged if failure]
        if failures:
            return {**result, "completed": True, "failure": failures[0]}
        sheets = [scores for scores, _, _ in judged]
        return {**result, "completed": True, "models": sorted({model for _, model, _ in judged}), "repeats": sheets,
                "scores": {name: sum(s[name] for s in sheets) / len(sheets) for name in race.SCORES}}  # fmt: skip
