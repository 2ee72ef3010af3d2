"""A step in numbers: metrics under the article's names, metrics.jsonl, and the tracker that may fail."""

import json
import logging
import math
import os
import queue
import statistics
import threading
import time
from collections import Counter

import config
from credit import is_degenerate, pad_turn_rewards, turn_count_bias
from records import Journal, read_journal, write_whole
from turn_reward import is_right

CLOSE_SECONDS = 20  # how long the end of a run waits for the tracker
FINISHES = ("no_tool_call", "max_turns", "max_tools", "max_tokens", "error")


def group_metrics(groups):
    """Reward, rollout and tool metrics of a step's ScoredGroups, as {name: float}.

    Means are over trajectories that infrastructure did not break (rollout/finish_* over all of them).
    Lengths in tokens, calls per trajectory, rates and rewards unitless.
    """
    rows = [
        (t, answer, form, tournament, reward)
        for group in groups
        for t, answer, form, tournament, reward in zip(
            group.trajectories,
            group.answers,
            group.format_rewards,
            group.tournament_rewards,
            group.rewards,
            strict=True,
        )
    ]
    usable = [row for row in rows if not row[0].broken]
    finishes = Counter(row[0].finish.split(":")[0] for row in rows)
    turns = [turn for row in usable for turn in row[0].turns]
    calls = [turn for turn in turns if turn.tool_status]
    return {
        "reward/has_answer": _mean(bool(row[1]) for row in usable),
        "reward/format": _mean(row[2] for row in usable),
        "reward/tournament": _mean(row[3] for row in usable),
        "reward/total": _mean(row[4] for row in usable),
        "reward/degenerate_group_rate": _mean(is_degenerate(group.rewards) for group in groups),
        "reward/tournament_group_var": _mean(_variance(group.tournament_rewards) for group in groups),
        **{f"rollout/finish_{name}": finishes[name] / max(1, len(rows)) for name in FINISHES},
        "rollout/search_calls": _mean(_calls(row[0], "google_search") for row in usable),
        "rollout/browse_calls": _mean(_calls(row[0], "browse_webpage") for row in usable),
        "rollout/response_tokens": _mean(len(row[0].token_ids) for row in usable),
        "rollout/sampled_tokens": _mean(sum(row[0].loss_mask) for row in usable),
        "rollout/turns": _mean(len(row[0].turns) for row in usable),
        "tools/error_rate": _mean(turn.tool_status != "ok" for turn in calls),
        **_turn_metrics(groups),
    }


def _turn_metrics(groups):
    """Of questions with reference answers: how many are met exactly; of credit by turn: rewards and bias."""
    metrics = {}
    if any(group.question.answers for group in groups):
        metrics["reward/exact_match"] = _mean(
            is_right(answer, group.question.answers)
            for group in groups if group.question.answers
            for t, answer in zip(group.trajectories, group.answers, strict=True) if not t.broken
        )  # fmt: skip
    if config.CREDIT != "outcome":
        metrics["reward/turn"] = _mean(r for group in groups for rewards in group.turn_rewards for r in rewards)
        metrics["credit/turn_count_bias"] = _mean(
            turn_count_bias(pad_turn_rewards(group.turn_rewards), group.rewards)
            for group in groups
            if group.turn_rewards
        )
    return metrics


def _mean(values):
    values = list(values)
    return statistics.fmean(values) if values else 0.0


def _variance(values):
    finite = [value for value in values if math.isfinite(value)]
    return statistics.variance(finite) if len(finite) > 1 else 0.0


def _calls(trajectory, name):
    return sum(turn.call is not None and turn.call.name == name and bool(turn.tool_status) for turn in trajectory.turns)


class Clock:
    """Seconds by phase, under the metric names time/<phase>."""

    def __init__(self):
        self.laps = {}
        self.last = time.perf_counter()

    def lap(self, name):
        now = time.perf_counter()
        self.laps[f"time/{name}"] = now - self.last
        self.last = now

    @property
    def total(self):
        return sum(self.laps.values())


def step_line(step, metrics, judge_calls, clock):
    """The one line a finished step prints: reward parts, answers, calls so far, seconds by phase, time left."""
    left = (config.STEPS - step) * clock.total
    return (
        f"step {step}/{config.STEPS}  reward {metrics['reward/total']:.3f} "
        f"(tournament {metrics['reward/tournament']:.3f}, format {metrics['reward/format']:.3f})  "
        f"answers {metrics['reward/has_answer']:.3f}  searches {metrics['rollout/search_calls']:.2f}  "
        f"pages {metrics['rollout/browse_calls']:.2f}  judge calls {judge_calls}  "
        + "  ".join(f"{name.removeprefix('time/')} {seconds:.1f}s" for name, seconds in clock.laps.items())
        + f"  left {left / 60:.1f} min"
    )


def drop_uncommitted(folder, step):
    """Remove lines of steps that were never committed: they are about to be made again."""
    path = folder / "metrics.jsonl"
    lines = [line for _, line in read_journal(path)]
    if any(line["step"] > step for line in lines):
        kept = [json.dumps(line) + "\n" for line in lines if line["step"] <= step]
        write_whole(path, "".join(kept))


class Tracker:
    """Writes metrics.jsonl at once, and feeds SwanLab from a thread of its own.

    SwanLab runs online when SWANLAB_API_KEY is set, else locally below the run folder (view it with
    `swanlab watch`). Whatever it does (no network, no account, a crash), training neither stops nor waits.
    """

    def __init__(self, folder, constants):
        self.journal = Journal(folder / "metrics.jsonl")
        self.queue = queue.Queue()
        self.thread = None
        if config.TRACKER == "swanlab":
            self.thread = threading.Thread(target=self._track, args=(folder, constants), daemon=True)
            self.thread.start()

    def log(self, step, metrics):
        """Record one step's metrics, {name: number}."""
        self.journal.append({"step": step, **metrics})
        self.queue.put((step, metrics))

    def close(self):
        """Flush; waits for the tracker's thread a few seconds at most."""
        self.journal.sync()
        self.journal.close()
        self.queue.put(None)
        if self.thread:
            self.thread.join(timeout=CLOSE_SECONDS)

    def _track(self, folder, constants):
        mode = "online" if os.environ.get("SWANLAB_API_KEY") else "local"
        try:
            import swanlab

            swanlab.init(
                project=config.PROJECT,
                name=folder.name,
                id=folder.name if mode == "online" else None,
                resume="allow" if mode == "online" else None,
                mode=mode,
                log_dir=str(folder / "swanlab"),
                config=constants,
                settings=swanlab.Settings(interactive=False),
            )
            while (item := self.queue.get()) is not None:
                swanlab.log(item[1], step=item[0])
            swanlab.finish()
        except Exception as error:  # a tracker has no say in training; what it lost is in metrics.jsonl
            logging.getLogger(__name__).warning(
                "tracker: %s: %s; metrics.jsonl has everything", type(error).__name__, error
            )
