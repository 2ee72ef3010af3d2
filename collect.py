"""A step's groups: rolled out and judged, all at once, with everything already paid for taken from the run folder."""

import asyncio

from tqdm import tqdm

import config
from judge import JudgeRefusal
from records import Journal, read_journal, trajectory_from_json
from reward import score_group
from rollout import most_trajectories
from schemes import GREEDY_ANCHOR


async def collect(questions, rollout, judge, folder, step, version):
    """Roll out and judge a step's questions; returns (ScoredGroups in order, number of groups the judge refused).

    A group's matches start when its own K trajectories are finished. Trajectories and matches that the run
    folder already holds (of this step, from before a kill) are taken from it. A group whose texts the judge
    refuses (too long, moderated) is void: it trains nothing, and too many of them stop the run, as do too many
    trajectories broken by infrastructure. Raises SystemExit then, and whatever rollout and judge raise, after
    every other group has finished what it has paid for.
    """
    path = folder / "rollouts" / f"step-{step:06d}.jsonl"
    kept = [trajectory_from_json(line) for _, line in read_journal(path)]
    finished = {(t.question_id, t.k): t for t in kept if not t.broken and t.policy_version == version}
    journal = Journal(path)
    each = most_trajectories()
    bars = [tqdm(total=len(questions) * each, desc=f"step {step} trajectories", leave=False, disable=None),
            tqdm(total=len(questions), desc=f"step {step} tournaments", leave=False, disable=None)]  # fmt: skip

    async def attempt(question, k, slot):
        if (trajectory := finished.get((question.id, k))) is None:
            greedy = {"temperature": 0.0} if k == 0 and config.REWARD_SCHEME in GREEDY_ANCHOR else {}
            trajectory = await rollout.run(question, k, step=step, version=version, slot=slot, **greedy)
            journal.append(trajectory)
        bars[0].update()
        return trajectory

    async def grown(question, slot):
        if (leaves := _whole_tree(kept, question.id, version)) is None:
            leaves = await rollout.run_tree(question, step=step, version=version, slot=slot)
            for leaf in leaves:
                journal.append(leaf)
        bars[0].update(each)
        return leaves

    async def one_group(place, question):
        if (step, question.id) in judge.voided:
            return None
        if config.ROLLOUT_TREE:
            trajectories = await grown(question, place * each)
        else:
            slots = range(place * each, (place + 1) * each)
            trajectories = await asyncio.gather(*(attempt(question, k, slot) for k, slot in enumerate(slots)))
        try:
            return await score_group(question, trajectories, judge, step=step)
        except JudgeRefusal as refusal:
            judge.record({"kind": "void", "step": step, "question_id": question.id, "reason": str(refusal)})
            return None
        finally:
            bars[1].update()

    results = await asyncio.gather(*(one_group(*item) for item in enumerate(questions)), return_exceptions=True)
    for bar in bars:
        bar.close()
    journal.sync()
    journal.close()
    for result in results:
        if isinstance(result, BaseException):
            raise result
    groups = [group for group in results if group is not None]
    _check_losses(groups, len(results), path)
    return groups, len(results) - len(groups)


def _whole_tree(kept, question_id, version):
    """The question's last journaled tree, a list of leaves; None unless all of it is there and none is broken."""
    leaves = []
    for trajectory in kept:
        if trajectory.question_id == question_id:  # a tree is journaled at once, from its first leaf on
            leaves = [trajectory] if trajectory.k == 0 else [*leaves, trajectory]
    usable = all(not leaf.broken and leaf.policy_version == version for leaf in leaves)
    return leaves if usable and _is_whole([leaf.path for leaf in leaves]) else None


def _is_whole(paths):
    """True when the paths are all leaves of one tree: config.K branches at every state that branched."""

    def whole(prefix):
        below = [path for path in paths if path[: len(prefix)] == prefix and len(path) > len(prefix)]
        branches = {path[len(prefix)] for path in below}
        return (
            prefix in paths if not below else len(branches) == config.K and all(whole((*prefix, b)) for b in branches)
        )

    return whole(())


def _check_losses(groups, asked, path):
    """Stop when so much of a step was lost that the run no longer measures the policy."""
    finishes = [t.finish for group in groups for t in group.trajectories]
    broken = [finish for finish in finishes if finish.startswith("error:")]
    if len(broken) > config.MAX_BROKEN_SHARE * len(finishes):
        raise SystemExit(
            f"{len(broken)} of {len(finishes)} trajectories broke ({', '.join(sorted(set(broken)))}); see {path}. "
            "Mend the cause and run the same command: finished trajectories are kept"
        )
    if asked - len(groups) > config.MAX_BROKEN_SHARE * asked:
        raise SystemExit(
            f"the judge refused {asked - len(groups)} of {asked} groups; see the void lines of judge.jsonl. "
            "Lower JUDGE_ANSWER_CHARACTERS, or choose a judge with a longer context"
        )
