"""One step's update: advantages spread over tokens, micro-batches, loss, gradient, optimiser."""

import random
from dataclasses import dataclass

import torch

import config
from credit import pad_turn_rewards, place_turn_rewards, spread_turns, turn_advantages
from loss import clip_counts, kl_penalty, ppo_objective, sequence_logprobs
from records import seed_from


@dataclass
class Row:
    """One trajectory as the update sees it.

    ids: prompt and response. positions: where in ids the P trained tokens stand. advantages: (P,);
    sampled: the sampler's log-probs (P,), for the check that sampler and trainer agree. old: (P,), the
    frozen log-probs of the first of several updates. rewards, values, returns: (P,), where there is a critic.
    """

    ids: list[int]
    positions: list[int]
    advantages: torch.Tensor
    sampled: torch.Tensor
    temperature: float
    old: torch.Tensor | None = None
    rewards: torch.Tensor | None = None
    values: torch.Tensor | None = None
    returns: torch.Tensor | None = None


@dataclass
class Batch:
    """Rows with a signal; the counts of the step's trained tokens and trajectories include those without one."""

    rows: list[Row]
    tokens: int
    sequences: int


def build_batch(groups, step):
    """Advantages per group, on each trajectory's sampled tokens, as config.CREDIT says.

    A trajectory without signal (no advantage, no critic, no KL penalty) adds its tokens to the denominator (the
    article's batch mean) and no row; a broken one adds neither. mt_ppo's advantages are the critic's to fill in.
    """
    rows, tokens, sequences = [], 0, 0
    for group in groups:
        table = _turn_advantages(group, step)
        for k, trajectory in enumerate(group.trajectories):
            if trajectory.broken or not any(trajectory.loss_mask):
                continue
            row = _row(trajectory)
            tokens += len(row.positions)
            sequences += 1
            if config.CREDIT == "mt_ppo":
                rewards = place_turn_rewards(group.turn_rewards[k], group.rewards[k], trajectory.turn_index,
                                             trajectory.loss_mask)  # fmt: skip
                row.rewards = rewards[torch.tensor(trajectory.loss_mask, dtype=torch.bool)]
            else:
                row.advantages = spread_turns(table[k], trajectory.turn_index, trajectory.loss_mask).float()
            if config.CREDIT == "mt_ppo" or config.KL_COEF or row.advantages.any():
                rows.append(row)
    return Batch(rows, tokens, sequences)


def _turn_advantages(group, step):
    """(K, U) advantages of a group's turns; None where a critic gives them."""
    if config.CREDIT == "mt_ppo":
        return None
    # credit by outcome alone needs no turn rewards: any will do, of every trajectory's number of turns
    rewards = group.turn_rewards or [(0.0,) * max(t.turn_index, default=0) for t in group.trajectories]
    table = turn_advantages(pad_turn_rewards(rewards), group.rewards, [t.path for t in group.trajectories])
    if config.PERMUTE_ADVANTAGES:
        shuffled = table[:, 0].tolist()
        random.Random(seed_from(config.SEED, step, group.question.id, "permute")).shuffle(shuffled)
        table = torch.tensor(shuffled)[:, None].expand_as(table)
    return table


def _row(trajectory):
    trained = [i for i, sampled in enumerate(trajectory.loss_mask) if sampled]
    return Row(
        ids=[*trajectory.prompt_ids, *trajectory.token_ids],
        positions=[len(trajectory.prompt_ids) + i for i in trained],
        advantages=torch.zeros(len(trained)),
        sampled=torch.tensor([trajectory.logprobs[i] for i in trained]),
        temperature=trajectory.temperature or 1.0,  # greedy decoding logs the log-probs at temperature 1
    )


def micro_batches(rows):
    """Rows of one temperature packed longest first, so that rows times the longest stays within
    config.MICRO_BATCH_TOKENS."""
    batches = []
    for row in sorted(rows, key=lambda row: (row.temperature, -len(row.ids))):
        first = batches[-1][0] if batches else None
        if (first and first.temperature == row.temperature
                and (len(batches[-1]) + 1) * len(first.ids) <= config.MICRO_BATCH_TOKENS):  # fmt: skip
            batches[-1].append(row)
        else:
            batches.append([row])
    return batches


def update(policy, optimizer, batch, bar=None):
    """One step's optimiser update(s); returns train/* metrics.

    The loss is a mean over all trained tokens of the step (RATIO_LEVEL "sequence": over its trajectories, of their
    means over tokens), so it does not depend on the split into micro-batches. An empty batch, or a gradient that is
    not finite, leaves weights and optimizer untouched.
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
        sums = {"loss": 0.0, "clipped": 0, "held": 0, "difference": 0.0, "largest": 0.0, "kl": 0.0}
        for rows in batches:
            _backward(policy, rows, batch, sums)
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
            **({"train/kl": sums["kl"] / trained} if config.KL_COEF else {}),
            "train/sampler_difference_mean": sums["difference"] / trained,
            "train/sampler_difference_max": sums["largest"],
        }
    optimizer.zero_grad(set_to_none=True)
    return metrics


def _split(values, rows):
    return values.split([len(row.positions) for row in rows])


def _backward(policy, rows, batch, sums):
    """Add one micro-batch's gradient, and its share of the metrics to `sums`."""
    current = policy.logprobs(rows)
    old = current.detach() if rows[0].old is None else torch.cat([row.old for row in rows])
    advantages = torch.cat([row.advantages for row in rows]).to(current.device)
    lengths = [len(row.positions) for row in rows]
    clips = {"clip_low": config.CLIP_LOW, "clip_high": config.CLIP_HIGH, "dual_clip": config.DUAL_CLIP}
    weights, compared = torch.full_like(old, 1 / batch.tokens), current
    if config.RATIO_LEVEL == "sequence":
        compared = sequence_logprobs(current, old, lengths)
        weights = torch.cat([torch.full((n,), 1 / (n * batch.sequences)) for n in lengths]).to(current.device)
    per_token = ppo_objective(compared, old, advantages, **clips)
    if config.KL_COEF:
        kl = kl_penalty(current, policy.reference_logprobs(rows))
        per_token = per_token + config.KL_COEF * kl
        sums["kl"] += float(kl.detach().sum())
    loss = (per_token * weights).sum()
    loss.backward()
    clipped, held = clip_counts(compared.detach(), old, advantages, **clips)
    difference = (old.cpu() - torch.cat([row.sampled for row in rows])).abs()
    sums["loss"] += float(loss.detach())
    sums["clipped"] += int(clipped)
    sums["held"] += int(held)
    sums["difference"] += float(difference.sum())
    sums["largest"] = max(sums["largest"], float(difference.max()))
