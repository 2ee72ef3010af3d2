"""Measurements as ratios taken in one run; absolute times mean little on a shared machine.

python bench.py judge      a step's matches against the sequential algorithm, 50 ms per judge call
python bench.py rollout    64 trajectories with mixed latencies against the slowest of them alone
"""

import argparse
import asyncio
import json
import random
import tempfile
import time
from pathlib import Path

import config
from judge import Judge
from judges import Reply
from policy import load_tokenizer
from protocol import SearchResult
from records import Question, Rubric, Trajectory, Turn, seed_from
from reward import score_group
from rollout import Rollout
from sampler import Completion
from tools import Tools

JUDGE_SECONDS = 0.05  # latency of the stub judge
GROUPS = 8
TRAJECTORIES = 64
RUBRIC = (Rubric("Length", "States as much as possible.", "Depth", "important"),)


def sequential_tournament(n, choose, match_size, winners_per_match, finalists, repeats, seed):
    """The tournament as one reads it in the article: one match after the other, nothing drawn beforehand.

    choose: (players, number of winners) -> winners. Returns (raw scores, [(players, winners)]).
    """
    generator, raw, played = random.Random(seed), [0.0] * n, []
    for _ in range(repeats):
        alive = list(range(n))
        while len(alive) > finalists:
            generator.shuffle(alive)
            count = max(1, len(alive) // match_size)
            winners = []
            for i in range(count):
                players = alive[i::count]
                won = choose(players, min(winners_per_match, len(players) - 1))
                played.append((tuple(players), tuple(won)))
                winners += won
            for winner in winners:
                raw[winner] += 1
            alive = winners
    return raw, played


def bench_judge():
    """Ours: GROUPS groups at once, as train.collect does, through the real Judge and its journal."""
    config.JUDGE_BACKEND, config.JUDGE_CONCURRENCY = "rule", 128
    groups = [(Question(f"q{g}", "question", RUBRIC), _answers(g)) for g in range(GROUPS)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "judge.jsonl"
        started = time.perf_counter()
        asyncio.run(_judge_all(groups, path))
        ours = time.perf_counter() - started
        lines = [json.loads(line) for line in path.read_text().splitlines()]
    started = time.perf_counter()
    expected = {question.id: _one_by_one(question, answers) for question, answers in groups}
    sequential = time.perf_counter() - started
    same = all(_played(lines, name) == played for name, played in expected.items())
    calls = sum(line["kind"] == "match" for line in lines)
    return {"matches": calls, "same_matches": same, "sequential_over_ours": sequential / ours,
            "limit": calls / depth()}  # fmt: skip


def depth():
    """Judge calls that must follow one another: the rounds of one bracket."""
    rounds, alive = 0, config.K
    while alive > config.FINALISTS:
        rounds, alive = rounds + 1, alive // config.MATCH_SIZE
    return rounds


def _answers(group):
    draw = random.Random(group)
    return ["x" * draw.randrange(1, 400) for _ in range(config.K)]


def _trajectory(question, k, answer):
    text = f"<think>t</think><answer>{answer}</answer>"
    return Trajectory(question.id, k, (1,), (2,), (1,), (0.0,), (0,), (Turn(text),), "", "no_tool_call", 1.0, 0, 0)


async def _judge_all(groups, path):
    judge = Judge(path)

    async def reply(ask):
        await asyncio.sleep(JUDGE_SECONDS)
        return Reply(json.dumps({"winners": [i + 1 for i in _longest(ask.answers, ask.num_winners)]}), "stub")

    judge.reply = reply
    await asyncio.gather(
        *(score_group(q, [_trajectory(q, k, a) for k, a in enumerate(answers)], judge, step=1) for q, answers in groups)
    )


def _longest(answers, number):
    return sorted(range(len(answers)), key=lambda i: -len(answers[i]))[:number]


def _one_by_one(question, answers):
    def choose(players, number):
        time.sleep(JUDGE_SECONDS)
        return [players[i] for i in _longest([answers[p] for p in players], number)]

    seed = seed_from(config.SEED, 1, question.id, "tournament")
    settings = (config.MATCH_SIZE, config.WINNERS_PER_MATCH, config.FINALISTS, config.REPEATS)
    return sequential_tournament(config.K, choose, *settings, seed)[1]


def _played(lines, question_id):
    matches = [line for line in lines if line["kind"] == "match" and line["question_id"] == question_id]
    matches.sort(key=lambda line: (line["repeat"], line["round"], line["index"]))
    return [(tuple(m["players"]), tuple(m["players"][w] for w in m["winners"])) for m in matches]


class TimedSampler:
    """Searches in every turn but the last; slot s has s % 4 searches, and latencies that depend on the seed alone."""

    def __init__(self, tokenizer):
        self.tokenizer, self.turns = tokenizer, {}

    async def sample(self, prompt_ids, *, max_tokens, temperature, seed, slot):
        turn = self.turns[slot] = self.turns.get(slot, -1) + 1
        await asyncio.sleep(random.Random(seed).uniform(0.1, 0.6))
        if turn < slot % 4:
            text = f'evidence first</think>\n<call_tool name="google_search">{slot} {turn}</call_tool>'
        else:
            text = "enough</think>\n<answer>report</answer>"
        ids = self.tokenizer.encode(text)
        stop = "</call_tool>" if turn < slot % 4 else None
        return Completion(tuple(ids), (-0.5,) * len(ids), text, "stop", stop)


class TimedSearch:
    """A search back end whose answers take 20 ms, 200 ms or a second, by the query."""

    async def search(self, query):
        await asyncio.sleep(random.Random(query).choice((0.02, 0.2, 1.0)))
        return [SearchResult("title", "https://example.org/", "a snippet of text " * 20)]


async def _roll_out(slots, tokenizer):
    """Seconds for these trajectories together, and for each of them within that."""
    tools, spans = Tools(), {}
    tools._searcher = TimedSearch()
    rollout = Rollout(TimedSampler(tokenizer), tools, tokenizer)
    question = Question("q", "How long does it take?", RUBRIC)

    async def one(slot):
        started = time.perf_counter()
        await rollout.run(question, slot, step=1, version=0, slot=slot)
        spans[slot] = time.perf_counter() - started

    started = time.perf_counter()
    await asyncio.gather(*map(one, slots))
    return time.perf_counter() - started, spans


def bench_rollout():
    """All trajectories at once, then the slowest of them alone: tool calls and turns overlap, so the two are close."""
    import demo  # the real tokenizer, prompt and corpus

    demo.configure(demo.parse([]))
    config.TOOL_CONCURRENCY, config.RESPONSE_TOKENS, config.MAX_TURNS, config.MAX_TOOL_CALLS = (
        TRAJECTORIES,
        18_000,
        6,
        4,
    )
    tokenizer = load_tokenizer()
    together, spans = asyncio.run(_roll_out(range(TRAJECTORIES), tokenizer))
    alone, _ = asyncio.run(_roll_out([max(spans, key=spans.get)], tokenizer))
    return {"trajectories": TRAJECTORIES, "together_over_slowest_alone": together / alone,
            "one_by_one_over_together": sum(spans.values()) / together}  # fmt: skip


BENCHES = {"judge": bench_judge, "rollout": bench_rollout}


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=BENCHES)
    for name, value in BENCHES[parser.parse_args(argv).what]().items():
        print(f"{name}: {value:.2f}" if isinstance(value, float) else f"{name}: {value}")


if __name__ == "__main__":
    main()
