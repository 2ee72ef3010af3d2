"""Tournament-GRPO, the whole training loop: question, K trajectories, tournament, reward, advantage, update.

    python train.py [--run NAME] [--steps N] [--check]

Article section -> function: 3 (tournament reward) tournament.run_tournament, normalize_wins;
4 (advantage) credit.group_advantages, (loss) loss.ppo_objective, update.update; 5 (rollout) rollout.Rollout.
Departures from the article and from the authors' code are tabled in the README.
"""

import argparse
import asyncio
import random
import time
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
from critic import Critic
from judge import Judge, JudgeError
from ledger import LEDGER, cost_rows
from loss import kl_penalty, ppo_objective
from metrics import Clock, Tracker, drop_uncommitted, group_metrics, step_line
from policy import Policy, coverage
from records import JournalError, seed_from
from rollout import Rollout, most_trajectories
from sampler import InProcessSampler
from schemes import check_questions, count_calls
from server import ServerError
from tools import Tools
from update import Batch, build_batch, update
from vllm_sampler import VllmSampler, start_server
from wire import AccountError

__all__ = ["Run", "build_batch", "kl_penalty", "main", "ppo_objective", "take", "update"]


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
        self.critic = Critic(self.policy) if config.CREDIT == "mt_ppo" else None
        self.step, self.progress, skipped = checkpoint.load(folder, self.policy, self.optimizer, self.critic)
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
        print(f"model: {config.MODEL}, LoRA rank {config.LORA_RANK}, {trained:,} trained parameters on "
              f"{sum(covered.values())} linears ({', '.join(f'{k} x{v}' for k, v in covered.items())})")  # fmt: skip
        print(f"judge: {self.judge.name}   search: {config.SEARCH_BACKEND}   reader: {config.BROWSE_BACKEND}   "
              f"reward: {config.REWARD_SCHEME}   credit: {config.CREDIT}")  # fmt: skip
        each = most_trajectories()
        marks = config.CREDIT != "outcome" and config.TURN_REWARD == "judge"
        print(f"budget: steps {self.step + 1}..{config.STEPS}, each {config.QUESTIONS_PER_STEP} questions x {each} "
              f"trajectories and {config.QUESTIONS_PER_STEP * count_calls(each)} judge calls"
              f"{', and one more for each trajectory with turns to mark' if marks else ''}; "
              f"{len(self.questions)} questions")  # fmt: skip

    async def train(self):
        """Steps until config.STEPS; each is committed by its checkpoint's rename."""
        await self.sampler.publish(self.step)
        for step in range(self.step + 1, config.STEPS + 1):
            clock, before = Clock(), self.judge.totals()
            questions = take(self.questions, step)
            groups, refused = await collect(questions, self.rollout, self.judge, self.folder, step, self.policy.version)
            clock.lap("rollout_and_judge")
            trained = self._learn(build_batch(groups, step), step)
            clock.lap("update")
            asked = {f"judge/{name}": total - before[name] for name, total in self.judge.totals().items()}
            metrics = {**group_metrics(groups), **asked, "judge/refused_groups": refused, **trained}
            await self._commit(step, metrics, clock)
            print(step_line(step, metrics, self.judge.calls, clock))
        await self.tools.close()
        await self.judge.close()

    def _learn(self, batch, step):
        """The step's update of the policy and, where there is one, of its critic; returns train/* and critic/*."""
        if self.critic:
            self.critic.appraise(batch)
        warming_up = self.critic is not None and step <= config.CRITIC_WARMUP_STEPS
        learnt = Batch([], batch.tokens, batch.sequences) if warming_up else batch
        with tqdm(total=len(learnt.rows), desc=f"step {step} update", leave=False, disable=None) as bar:
            metrics = update(self.policy, self.optimizer, learnt, bar)
        return {**metrics, **(self.critic.fit(batch) if self.critic else {})}

    async def _commit(self, step, metrics, clock):
        """Metrics, then the checkpoint, then the weights in service: in that order, so that a kill loses no line."""
        _count_skips(self.progress, metrics)
        self.judge.journal.sync()
        self.tracker.log(step, {**metrics, **clock.laps})
        checkpoint.save(self.folder, step, self.policy, self.optimizer, self.progress, self.critic)
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
    check_questions(questions)
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
