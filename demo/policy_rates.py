"""What a policy does when it is sampled on the demo's questions: the rates that a run starts from."""

import asyncio
import tempfile
from collections import Counter
from pathlib import Path

import corpus

import config
import format_reward
import tools
import turn_reward
from policy import Policy
from prepare_data import load_questions
from rollout import Rollout
from rule import coverage
from sampler import InProcessSampler

ATTEMPTS = 96  # sampled transcripts per file of questions


def check(folder, show=0):
    """{file of questions: rates} of the policy in `folder`; prints the first `show` transcripts of each file."""
    config.MODEL = str(folder)
    found = {}
    with tempfile.TemporaryDirectory() as data:
        corpus.build(data)
        config.CORPUS_FILE = str(Path(data, "corpus.jsonl"))
        for name in ("train", "heldout", "qa", "qa_heldout"):
            questions = load_questions(Path(data, f"{name}.parquet"))
            questions = (questions * ATTEMPTS)[:ATTEMPTS]
            trajectories = asyncio.run(sample(questions))
            found[name] = rates(questions, trajectories)
            print("".join(f"{trajectory.transcript}\n\n" for trajectory in trajectories[:show]), end="")
    return found


async def sample(questions):
    """One trajectory of config.MODEL for each question, by the run's own sampler, tools and rollout."""
    policy = Policy()
    rollout = Rollout(InProcessSampler(policy), tools.Tools(), policy.tokenizer)
    runs = [rollout.run(question, i, step=0, version=0, slot=i) for i, question in enumerate(questions)]
    return await asyncio.gather(*runs)


def rates(questions, trajectories):
    """What sampled trajectories amount to, as {name: value}; an exact match counts in a broken format, too."""
    checks = [format_reward.check_format(trajectory.transcript) for trajectory in trajectories]
    lengths = [len(trajectory.prompt_ids) + len(trajectory.token_ids) for trajectory in trajectories]
    covered = [coverage(c.answer, q.rubrics) for q, c in zip(questions, checks, strict=True) if c.answer]
    searches = [sum(turn.call is not None for turn in trajectory.turns) for trajectory in trajectories]
    found = {
        "trajectories": len(checks),
        "with an answer": round(len(covered) / len(checks), 3),
        "in valid format": round(sum(c.reward for c in checks) / len(checks), 3),
        "facts an answer covers": round(sum(covered) / max(1, len(covered)), 3),
        "with a search": round(sum(map(bool, searches)) / len(checks), 3),
        "searches": round(sum(searches) / len(checks), 2),
        "finishes": dict(Counter(trajectory.finish for trajectory in trajectories)),
        "mean context, tokens": round(sum(lengths) / len(lengths)),
        "longest context, tokens": max(lengths),
    }
    if all(question.answers for question in questions):
        right = [turn_reward.is_right(c.answer, q.answers) for q, c in zip(questions, checks, strict=True)]
        sound = [hit and c.reward for hit, c in zip(right, checks, strict=True)]
        found |= {
            "exact match": round(sum(right) / len(right), 3),
            "and valid format": round(sum(sound) / len(sound), 3),
        }
    return found
