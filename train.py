"""Tournament-GRPO, the whole training loop: question, K trajectories, tournament, reward, advantage, update.

    python train.py [--run NAME] [--steps N] [--check]

Article section -> function: 3 (tournament reward) reward.run_tournament, reward.normalize_wins;
4 (advantage) credit.group_advantages, (loss) ppo_objective; 5 (rollout) rollout.Rollout.
Departures from the article and from the authors' code are tabled in the README.
"""

import argparse
import asyncio
import random
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

import checklist
import checkpoint
import config
import preflight
import prepare_data
import web
from collect import collect
from credit import group_advantages
from judge import Judge, JudgeError
from ledger import LEDGER, cost_rows
from metrics import Clock, Tracker, drop_uncommitted, group_metrics, step_line
from policy import Policy, coverage
from records import JournalError, seed_from
from reward import count_matches
from rollout import Rollout
from sampler import InProcessSampler
from server import ServerError
from tools import Tools
from vllm_sampler import VllmSampler, start_server
from wire import AccountError


def ppo_objective(current, old, advantages, *, clip_low, clip_high, dual_clip):
    """Per-token PPO loss with dual clip, to be minimised.

    current, old: log-probabilities (nats) of the same tokens, advantages: unitless; all (N,). The log-ratio
    is clamped to +-config.LOG_RATIO_CLAMP, the ratio clipped to [1 - clip_low, 1 + clip_high]; where the
    advantage is negative the loss is at most -dual_clip * advantage. Returns (N,).
    Source: article section 4; verl's vanilla policy loss for the order of the clips.
    """
    ratio = (current - old).clamp(-config.LOG_RATIO_CLAMP, config.LOG_RATIO_CLAMP).exp()
    clipped = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - clip_low, 1 + clip_high))
    return torch.where(advantages < 0, torch.minimum(clipped, -advantages * dual_clip), clipped)


def clip_counts(current, old, advantages, *, clip_low, clip_high, dual_clip):
    """How many tokens each clip moved: (outside the ratio range and worse for it, held by the dual clip)."""
    ratio = (current - old).clamp(-config.LOG_RATIO_CLAMP, config.LOG_RATIO_CLAMP).exp()
    plain, bounded = -advantages * ratio, -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    held = (torch.maximum(plain, bounded) > -advantages * dual_clip) & (advantages < 0)
    return (bounded > plain).sum(), held.sum()


@dataclass
class Row:
    """One trajectory as the update sees it.

    ids: prompt and response. positions: where in ids the P trained tokens stand. advantages: (P,);
    sampled: the sampler's log-probs (P,), for the check that sampler and trainer agree. old: (P,), the
    frozen log-probs of the first of several updates.
    """

    ids: list[int]
    positions: list[int]
    advantages: torch.Tensor
    sampled: torch.Tensor
    temperature: float
    old: torch.Tensor | None = None


@dataclass
class Batch:
    """Rows with a signal, and the count of all trained tokens of the step, rows without one included."""

    rows: list[Row]
    tokens: int


def build_batch(groups, step):
    """Advantages per group, spread over each trajectory's sampled tokens.

    A group without signal adds its tokens to the denominator (the article's batch mean) and no row;
    a broken trajectory adds neither.
    """
    rows, tokens = [], 0
    for group in groups:
        advantages = group_advantages(group.rewards, config.ADVANTAGE_EPS).tolist()
        if config.PERMUTE_ADVANTAGES:
            random.Random(seed_from(config.SEED, step, group.question.id, "permute")).shuffle(advantages)
        for trajectory, advantage in zip(group.trajectories, advantages, strict=True):
            if trajectory.broken:
                continue
            trained = [i for i, trained in enumerate(trajectory.loss_mask) if trained]
            tokens += len(trained)
            if advantage:
                rows.append(_row(trajectory, trained, advantage))
    return Batch(rows, tokens)


def _row(trajectory, trained, advantage):
    return Row(
        ids=[*trajectory.prompt_ids, *trajectory.token_ids],
        positions=[len(trajectory.prompt_ids) + i for i in trained],
        advantages=torch.full((len(trained),), advantage, dtype=torch.float32),
        sampled=torch.tensor([trajectory.logprobs[i] for i in trained]),
        temperature=trajectory.temperature,
    )


def micro_batches(rows):
    """Rows packed longest first, so that rows times the longest stays within config.MICRO_BATCH_TOKENS."""
    batches = []
    for row in sorted(rows, key=lambda row: -len(row.ids)):
        if batches and (len(batches[-1]) + 1) * len(batches[-1][0].ids) <= config.MICRO_BATCH_TOKENS:
            batches[-1].append(row)
        else:
            batches.append([row])
    return batches


def update(policy, optimizer, batch, bar=None):
    """One step's optimiser update(s); returns train/* metrics.

    The loss is the sum over tokens divided by batch.tokens, so it does not depend on the split into
    micro-batches. An empty batch, or a gradient that is not finite, leaves weights and optimizer untouched.
    """
    policy.model.train()
    batches = micro_batches(batch.rows)
    metrics = {"train/tokens": batch.tokens, "train/rows": len(batch.rows), "train/skipped_updates": 0}
    if config.UPDATES_PER_STEP > 1:
        for rows in batches:
            with torch.no_grad():
                for row, old in zip(rows, _split(policy.logprobs(rows), rows), strict=True):
                    row.old = old
    for _ in range(config.UPDATES_PER_STEP if batches else 0):
        optimizer.zero_grad(set_to_none=True)
        sums = {"loss": 0.0, "clipped": 0, "held": 0, "difference": 0.0, "largest": 0.0}
        for rows in batches:
            _backward(policy, rows, batch.tokens, sums)
            if bar is not None:
                bar.update(len(rows))
        norm = torch.nn.utils.clip_grad_norm_(policy.parameters.values(), config.GRADIENT_CLIP)
        if torch.isfinite(norm):
            optimizer.step()
        else:
            metrics["train/skipped_updates"] += 1
            sums = {name: 0.0 for name in sums}  # not a number would not fit into JSON
            norm = torch.zeros(())
        trained = sum(len(row.positions) for row in batch.rows)
        metrics |= {
            "train/loss": sums["loss"],
            "train/gradient_norm": float(norm),
            "train/clip_fraction": sums["clipped"] / trained,
            "train/dual_clip_fraction": sums["held"] / trained,
            "train/sampler_difference_mean": sums["difference"] / trained,
            "train/sampler_difference_max": sums["largest"],
        }
    optimizer.zero_grad(set_to_none=True)
    return metrics


def _split(values, rows):
    return values.split([len(row.positions) for row in rows])


def _backward(policy, rows, tokens, sums):
    """Add one micro-batch's gradient, and its share of the metrics to `sums`."""
    current = policy.logprobs(rows)
    old = current.detach() if rows[0].old is None else torch.cat([row.old for row in rows])
    advantages = torch.cat([row.advantages for row in rows]).to(current.device)
    clips = {"clip_low": config.CLIP_LOW, "clip_high": config.CLIP_HIGH, "dual_clip": config.DUAL_CLIP}
    loss = ppo_objective(current, old, advantages, **clips).sum() / tokens
    loss.backward()
    clipped, held = clip_counts(current.detach(), old, advantages, **clips)
    difference = (old.cpu() - torch.cat([row.sampled for row in rows])).abs()
    sums["loss"] += float(loss.detach())
    sums["clipped"] += int(clipped)
    sums["held"] += int(held)
    sums["difference"] += float(difference.sum())
    sums["largest"] = max(sums["largest"], float(difference.max()))


def take(questions, step):
    """The questions of a step (1-based): each epoch is one seeded permutation, its remainder is dropped."""
    per_epoch = len(questions) // config.QUESTIONS_PER_STEP
    epoch, place = divmod(step - 1, per_epoch)
    order = list(range(len(questions)))
    random.Random(seed_from(config.SEED, epoch, "epoch")).shuffle(order)
    start = place * config.QUESTIONS_PER_STEP
    return [questions[i] for i in order[start : start + config.QUESTIONS_PER_STEP]]


class Run:
    """Everything a training run holds between steps. server: the policy's, None for the in-process sampler."""

    def __init__(self, folder, questions, tools, server):
        self.folder, self.questions, self.tools = folder, questions, tools
        self.policy = Policy("cuda" if torch.cuda.is_available() else "cpu")
        self.optimizer = checkpoint.make_optimizer(self.policy)
        self.step, self.progress, skipped = checkpoint.load(folder, self.policy, self.optimizer)
        for damage in skipped:
            print(f"checkpoint skipped: {damage}")
        self.sampler = VllmSampler(self.policy, server, folder) if server else InProcessSampler(self.policy)
        self.rollout = Rollout(self.sampler, tools, self.policy.tokenizer)
        own = {"server_url": server.url, "server_model": server.base, "revive": server.revive} if server else {}
        self.judge = Judge(folder / "judge.jsonl", **own)
        drop_uncommitted(folder, self.step)
        self.tracker = Tracker(folder, checkpoint.constants())

    def describe(self):
        """The first lines of every run: what it trains, asks, searches, and how much of it."""
        covered = coverage(self.policy.model)
        trained = sum(p.numel() for p in self.policy.parameters.values())
        matches = count_matches(config.K, config.MATCH_SIZE, config.WINNERS_PER_MATCH, config.FINALISTS, config.REPEATS)
        print(f"model: {config.MODEL}, LoRA rank {config.LORA_RANK}, {trained:,} trained parameters on "
              f"{sum(covered.values())} linears ({', '.join(f'{k} x{v}' for k, v in covered.items())})")  # fmt: skip
        print(f"judge: {self.judge.name}   search: {config.SEARCH_BACKEND}   reader: {config.BROWSE_BACKEND}")
        print(f"budget: steps {self.step + 1}..{config.STEPS}, each {config.QUESTIONS_PER_STEP} questions x {config.K} "
              f"trajectories and {config.QUESTIONS_PER_STEP * matches} judge calls; "
              f"{len(self.questions)} questions")  # fmt: skip

    async def train(self):
        """Steps until config.STEPS; each is committed by its checkpoint's rename."""
        await self.sampler.publish(self.step)
        for step in range(self.step + 1, config.STEPS + 1):
            clock, before = Clock(), self.judge.totals()
            questions = take(self.questions, step)
            groups, refused = await collect(questions, self.rollout, self.judge, self.folder, step, self.policy.version)
            clock.lap("rollout_and_judge")
            batch = build_batch(groups, step)
            with tqdm(total=len(batch.rows), desc=f"step {step} update", leave=False, disable=None) as bar:
                trained = update(self.policy, self.optimizer, batch, bar)
            clock.lap("update")
            asked = {f"judge/{name}": total - before[name] for name, total in self.judge.totals().items()}
            metrics = {**group_metrics(groups), **asked, "judge/refused_groups": refused, **trained}
            await self._commit(step, metrics, clock)
            print(step_line(step, metrics, self.judge.calls, clock))
        await self.tools.close()
        await self.judge.close()

    async def _commit(self, step, metrics, clock):
        """Metrics, then the checkpoint, then the weights in service: in that order, so that a kill loses no line."""
        _count_skips(self.progress, metrics)
        self.judge.journal.sync()
        self.tracker.log(step, {**metrics, **clock.laps})
        checkpoint.save(self.folder, step, self.policy, self.optimizer, self.progress)
        await self.sampler.publish(step)
        clock.lap("commit")


def _count_skips(progress, metrics):
    """Stop the run when gradients were not finite in three steps on end: a broken model learns nothing overnight."""
    progress["skipped_in_a_row"] = progress.get("skipped_in_a_row", 0) + 1 if metrics["train/skipped_updates"] else 0
    if progress["skipped_in_a_row"] >= 3:
        raise SystemExit("the gradient was not finite in 3 steps on end; the last good checkpoint is kept. "
                         "Lower LEARNING_RATE or set DTYPE = 'float32', then start another run")  # fmt: skip


def load_training_questions():
    """Questions of config.TRAIN_FILE; prepares the data first when the default file is not there yet."""
    if not Path(config.TRAIN_FILE).exists() and Path(config.TRAIN_FILE) == Path(config.DATA_DIR) / "train.parquet":
        print(f"{config.TRAIN_FILE} is not there yet: preparing it")
        prepare_data.main(["--out", config.DATA_DIR])
    questions = prepare_data.load_questions(config.TRAIN_FILE)
    if len(questions) < config.QUESTIONS_PER_STEP:
        raise SystemExit(f"{config.TRAIN_FILE} holds {len(questions)} questions, fewer than "
                         f"QUESTIONS_PER_STEP = {config.QUESTIONS_PER_STEP}; lower it or give more data")  # fmt: skip
    return questions


def main(argv=None, kind="train"):
    """Train; `kind` names the run folders. Returns the folder of the finished run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", help="run to continue or to start; default: see the README")
    parser.add_argument("--steps", type=int, help="train up to this step instead of config.STEPS")
    parser.add_argument("--check", action="store_true", help="try everything a run leans on, and start nothing")
    arguments = parser.parse_args(argv)
    if arguments.steps is not None:
        config.STEPS = arguments.steps
    if arguments.check:
        raise SystemExit(checklist.run())
    preflight.check()
    config.SEARCH_BACKEND, config.BROWSE_BACKEND, notes = web.resolve_backends()  # once, and kept in the run's config
    questions = load_training_questions()
    try:
        tools = Tools()
    except (OSError, ValueError) as error:  # no corpus, or a broken one: said before a run is made
        raise SystemExit(str(error)) from None
    started = time.monotonic()
    try:
        folder, why = checkpoint.open_run(arguments.run, kind)
        print("\n".join([f"run: {folder} ({why})", *notes]))
        # the server starts before the trainer takes its memory
        with checkpoint.claimed(folder), start_server(folder) as server:
            run = Run(folder, questions, tools, server)
            run.describe()
            try:
                asyncio.run(run.train())
            finally:
                run.tracker.close()
    except (JudgeError, AccountError, ServerError, JournalError) as error:
        raise SystemExit(f"stopped: {error}") from None
    except KeyboardInterrupt:
        raise SystemExit("interrupted: run the same command to continue inside the step") from None
    for what, amount, dollars in cost_rows(LEDGER.summary(), (time.monotonic() - started) / 3600 if server else 0.0):
        if dollars:
            print(f"cost: {what} {'' if amount is None else f'{amount:,.2f}'}  ${dollars:.2f}")
    return folder


if __name__ == "__main__":
    main()
