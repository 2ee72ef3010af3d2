"""The frozen records that cross rooms, counter-based seeds, and the append-only JSONL journal."""

import dataclasses
import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Rubric:
    """One item of a question's rubric; importance is critical | important | nice_to_have in the authors' data."""

    title: str
    description: str
    dimension: str
    importance: str


@dataclass(frozen=True)
class Question:
    """One research question; `id` is unique in its file, `source` is the data set it came from.

    An open one has rubrics for a judge; one with a short, known answer has `answers`, each of them right.
    """

    id: str
    query: str
    rubrics: tuple[Rubric, ...]
    source: str = ""
    answers: tuple[str, ...] = ()


@dataclass(frozen=True)
class ToolCall:
    """What the policy asked for. `fault` says in words why the call cannot run; None when it can."""

    name: str
    argument: str
    fault: str | None = None


@dataclass(frozen=True)
class Turn:
    """One stretch of policy text, and what the environment put after it.

    text: as the server gave it, cut after `</call_tool>`, end-of-turn markers stripped.
    observation: exactly the text appended after the turn, "" for the last one.
    tool_status: "ok", "error:<kind>", or "" when no tool was asked for.
    """

    text: str
    call: ToolCall | None = None
    observation: str = ""
    tool_status: str = ""


@dataclass(frozen=True)
class Trajectory:
    """One finished attempt at one question, as token ids and as text.

    prompt_ids: context, never trained on. The response's four lists have equal length T:
    token_ids; loss_mask (1 only on ids a generation call returned); logprobs (nats, the sampler's
    own, 0 where the mask is 0); turn_index (0-based turn every token belongs to).
    opening: text the prompt already opened for the policy ("<think>\\n" or ""); the transcript starts with it.
    finish: no_tool_call | max_turns | max_tools | max_tokens | error:<kind>.
    path: of a leaf of a rollout tree, the branch it took at every state that branched; () for a chain.
    """

    question_id: str
    k: int
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    loss_mask: tuple[int, ...]
    logprobs: tuple[float, ...]
    turn_index: tuple[int, ...]
    turns: tuple[Turn, ...]
    opening: str
    finish: str
    temperature: float
    policy_version: int
    seed: int
    path: tuple[int, ...] = ()

    def __post_init__(self):
        lengths = {len(self.token_ids), len(self.loss_mask), len(self.logprobs), len(self.turn_index)}
        if len(lengths) > 1:
            raise ValueError(
                f"trajectory {self.question_id}/{self.k}: token_ids, loss_mask, logprobs and turn_index "
                f"have lengths {sorted(lengths)}; they must be equal"
            )

    @property
    def transcript(self):
        """The whole response as text: opening, then every turn with its observation."""
        return self.opening + "".join(turn.text + turn.observation for turn in self.turns)

    @property
    def broken(self):
        """True when infrastructure, not the policy, ended it: left out of every statistic."""
        return self.finish.startswith("error:")


@dataclass(frozen=True)
class Match:
    """One judge call: `players` in presentation order; `outcome`, once decided, the ordered winners, or in arena.py the
    two scores."""

    repeat: int
    round: int
    index: int
    players: tuple[int, ...]
    num_winners: int
    outcome: tuple[float, ...] | None = None


@dataclass(frozen=True)
class Standings:
    """What a tournament leaves: a raw score per player, ranks where the topology makes them, all matches."""

    raw_scores: list[float]
    ranks: list[float] | None
    matches: list[Match]


@dataclass(frozen=True)
class ScoredGroup:
    """A group with its rewards; every list has one entry per trajectory, NaN where it is broken.

    tournament_rewards: relative to the group, whatever the scheme. turn_rewards: of all turns but the last, an empty
    list for a broken trajectory; none at all where config.CREDIT is "outcome".
    """

    question: Question
    trajectories: tuple[Trajectory, ...]
    answers: tuple[str, ...]
    format_rewards: tuple[float, ...]
    raw_scores: tuple[float, ...]
    tournament_rewards: tuple[float, ...]
    rewards: tuple[float, ...]
    turn_rewards: tuple[tuple[float, ...], ...] = ()


def seed_from(*parts):
    """A 63-bit seed that depends on every part and on nothing else, e.g. seed_from(SEED, step, question.id, k)."""
    digest = hashlib.sha256(json.dumps(parts).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def digest(value):
    """Sixteen hexadecimal digits that stand for a JSON-able value."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def write_whole(path, text):
    """Write a UTF-8 file whole or not at all: under a temporary name first."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def question_from_row(row):
    """A prepared Parquet row (id, data_source, query, rubrics and, in newer files, answers) as a Question."""
    rubrics = tuple(Rubric(r["title"], r["description"], r["dimension"], r["importance"]) for r in row["rubrics"])
    answers = tuple(row.get("answers") or ())
    return Question(id=row["id"], query=row["query"], rubrics=rubrics, source=row["data_source"], answers=answers)


def trajectory_from_json(record):
    """The Trajectory that `dataclasses.asdict` wrote into a journal line."""
    fields = {field.name for field in dataclasses.fields(Trajectory)}
    kept = {
        name: tuple(value) if isinstance(value, list) else value for name, value in record.items() if name in fields
    }
    turns = tuple(
        Turn(t["text"], ToolCall(**t["call"]) if t["call"] else None, t["observation"], t["tool_status"])
        for t in record["turns"]
    )
    return Trajectory(**{**kept, "turns": turns})


class JournalError(ValueError):
    """A journal holds a line that is none of ours; the message names file and line."""


class Journal:
    """An append-only JSONL file, one record per line.

    When `append` returns, the line survives a kill of this process; after `sync`, a power cut too.
    A line that a kill cut short is skipped by `read_journal` and closed off when the file is opened again.
    """

    def __init__(self, path):
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self.path, "ab+")  # noqa: SIM115  open as long as the journal
        size = self._file.seek(0, os.SEEK_END)
        if size:
            self._file.seek(size - 1)
            if self._file.read(1) != b"\n":
                self._file.write(b"\n")

    def append(self, record):
        """Write one record (a dict, or a dataclass) as one line."""
        if dataclasses.is_dataclass(record):
            record = dataclasses.asdict(record)
        self._file.write(json.dumps(record, ensure_ascii=False, allow_nan=False).encode() + b"\n")
        self._file.flush()

    def sync(self):
        """Wait until the disk has everything appended so far."""
        os.fsync(self._file.fileno())

    def close(self):
        self._file.close()


def read_journal(path):
    """Yield (line number, record) for each complete record of a JSONL file; nothing when it does not exist.

    Only a cut line (the mark of a kill) is skipped: broken JSON that ends in a closing brace, or JSON that is
    no object, raises JournalError with file and line.
    """
    path = Path(path)
    if not path.exists():
        return
    with open(path, encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            try:
                record = json.loads(line)
            except ValueError as error:
                if line.rstrip().endswith("}"):
                    raise JournalError(f"{path}:{number}: not JSON ({error}); mend or delete this line") from None
                continue
            if not isinstance(record, dict):
                raise JournalError(f"{path}:{number}: not a JSON object; mend or delete this line")
            yield number, record
