"""Rewards to advantages: pure tensors, no model, no I/O.

A group is K trajectories of one question. Trajectory i has U_i turns: U_i - 1 intermediate ones, each with a
turn reward, and the final one, which carries the outcome reward. Turn rewards of a group are one matrix
(K, U - 1), U the longest trajectory's turns, with NaN where a trajectory has no such intermediate turn.
"""

import math
import statistics

import torch

import config


def group_advantages(rewards_K, eps, ddof=1):
    """Centre the rewards of one question's group and divide by their spread.

    rewards_K: K rewards, unitless; a non-finite one is a missing trajectory: it is left out of mean and
    spread and gets 0. eps: added to the standard deviation. ddof: 1 for the sample deviation, 0 for the
    population's. Returns (K,) float64. A tie is decided by exact comparison and gives exactly 0, as does
    a group with fewer than two usable rewards: rounding noise over eps is not a signal.
    Source: article section 4, A_i = (r_i - mean) / (s_r + 1e-6).
    """
    rewards = torch.as_tensor(rewards_K, dtype=torch.float64)
    usable = rewards[rewards.isfinite()]
    if len(usable) < 2 or bool((usable == usable[0]).all()):
        return torch.zeros_like(rewards)
    advantages = (rewards - usable.mean()) / (usable.std(correction=ddof) + eps)
    return torch.where(rewards.isfinite(), advantages, 0.0)


def is_degenerate(rewards_K):
    """True when the group carries no signal: fewer than two usable rewards, or all of them equal."""
    return not bool(group_advantages(rewards_K, eps=1.0).any())


# ---- advantages of turns, without a critic -------------------------------------------------------


def pad_turn_rewards(rewards_by_trajectory):
    """Lists of different lengths, one per trajectory, as the (K, U - 1) matrix with NaN past each one's last."""
    width = max(map(len, rewards_by_trajectory), default=0)
    rows = [[*rewards, *[math.nan] * (width - len(rewards))] for rewards in rewards_by_trajectory]
    return torch.tensor(rows, dtype=torch.float64).reshape(len(rows), width)


def turn_advantages(turn_rewards, outcome_rewards, paths=None):
    """(K, U) advantages as config.CREDIT says: outcome | merged | mt_grpo. For mt_ppo: `gae`.

    The first two give every turn of a trajectory the same number. 0 past a trajectory's last turn, and
    everywhere for a broken one. paths: of the leaves, where config.ROLLOUT_TREE made the trajectories.
    """
    if config.ROLLOUT_TREE:
        return tree_advantages(paths, turn_rewards, outcome_rewards, config.TURN_ALPHA)
    if config.CREDIT == "mt_grpo":
        baseline = config.TURN_COUNT_BASELINE
        return mt_grpo_advantages(turn_rewards, outcome_rewards, config.TURN_ALPHA, baseline=baseline)
    scalars = {"outcome": outcome_rewards, "merged": merged_rewards(turn_rewards, outcome_rewards)}[config.CREDIT]
    turns, _, present = _checked(turn_rewards, outcome_rewards)
    own = torch.arange(turns.shape[1] + 1) <= present.sum(1, keepdim=True)
    return torch.where(own, group_advantages(scalars, config.ADVANTAGE_EPS)[:, None], 0.0)


def merged_rewards(turn_rewards, outcome_rewards):
    """(K,) one scalar per trajectory: the sum of its turn rewards and its outcome; NaN for a broken one."""
    turns, outcome, _ = _checked(turn_rewards, outcome_rewards)
    return outcome + turns.nansum(1)


def mt_grpo_advantages(turn_rewards, outcome_rewards, alpha, ddof=1, *, baseline="survivors"):
    """One advantage per turn: what this turn and all later ones earned, compared across the group.

    turn_rewards: (K, U - 1), NaN where there is no such turn; outcome_rewards: (K,), NaN for a broken trajectory,
    which is out of every statistic and gets 0. alpha: weight of a turn further on, per turn. ddof: as in
    `group_advantages`. For a trajectory of n turns, with l counted from 1,
        A_k = sum over l = k..n-1 of alpha^(l-k) A^I_l  +  alpha^(n-k) A^O,
    so its final turn gets A^O. A^O is the outcome and A^I_l turn reward l, standardised over the group; fewer
    than two values, or an exact tie, give 0. The group is K independent chains, so turn l is compared across
    different histories: within one history it is compared by `tree_advantages`.
    baseline: "survivors" takes A^I_l's mean and spread over the trajectories that have turn l. Which these are
    is the policy's own doing (it stopped, or went on), so that mean is conditional on a choice it made, and the
    choice itself is never judged (`turn_count_bias`). "corrected" counts a missing turn as the reward 0, which
    is what a finished trajectory earns from then on: all trajectories are in every turn's statistics, and going
    on is compared with having stopped.
    Returns (K, U) float64, 0 past a trajectory's last turn: no token stands there, and 0 trains nothing should
    one be looked up by mistake, where NaN would spoil the step.
    Raises ValueError for shapes that do not fit, or a turn reward after a missing one.
    Source: MT-GRPO, in its general form; the two-turn form is A_1 = A^I + alpha A^O, A_2 = A^O.
    """
    turns, outcome, present = _checked(turn_rewards, outcome_rewards)
    filled = torch.where(outcome.isfinite()[:, None], turns.nan_to_num(), math.nan)
    compared = {"survivors": turns, "corrected": filled}[baseline]
    advantages = torch.zeros(len(outcome), turns.shape[1] + 1, dtype=torch.float64)
    final = group_advantages(outcome, config.ADVANTAGE_EPS, ddof)
    advantages[torch.arange(len(outcome)), present.sum(1)] = final
    for turn in reversed(range(turns.shape[1])):
        own = group_advantages(compared[:, turn], config.ADVANTAGE_EPS, ddof) + alpha * advantages[:, turn + 1]
        advantages[:, turn] = torch.where(present[:, turn], own, advantages[:, turn])
    return advantages


def tree_advantages(paths, turn_rewards, outcome_rewards, alpha, ddof=1):
    """`mt_grpo_advantages` over the leaves of one question's rollout tree: turns are compared after one history.

    paths: of the leaves, the branch taken at every state that branched; the rest as there, with one row per leaf. A^I_l
    is turn reward l standardised over the node's siblings, one value per node however many leaves it has; A^O is the
    outcome standardised over the siblings of the leaf's last branching, where a sibling that went on counts with the
    mean outcome of its leaves. A turn that several leaves share is trained once per leaf, with each leaf's sum: the
    mean over them is the estimate of what the turn leads to. Returns (leaves, U) float64.
    """
    turns, outcome, present = _checked(turn_rewards, outcome_rewards)
    advantages = torch.zeros(len(outcome), turns.shape[1] + 1, dtype=torch.float64)
    for level in range(max(map(len, paths), default=0)):
        final = _among_siblings(paths, outcome.tolist(), level, ddof)
        for leaf, path in enumerate(paths):
            if len(path) == level + 1:
                advantages[leaf, present[leaf].sum()] = final[leaf]
    for level in reversed(range(turns.shape[1])):
        own = torch.tensor(_among_siblings(paths, turns[:, level].tolist(), level, ddof), dtype=torch.float64)
        total = own + alpha * advantages[:, level + 1]
        advantages[:, level] = torch.where(present[:, level], total, advantages[:, level])
    return advantages


def _among_siblings(paths, values, level, ddof):
    """Per leaf, its node's value at one level standardised over the node's siblings; 0 where it has none there."""
    below = {}
    for path, value in zip(paths, values, strict=True):
        if len(path) > level and math.isfinite(value):
            below.setdefault(path[:level], {}).setdefault(path[: level + 1], []).append(value)
    found = {}
    for nodes in below.values():
        means = [statistics.mean(leaves) for leaves in nodes.values()]  # exact: equal ones stay a tie
        found |= dict(zip(nodes, group_advantages(means, config.ADVANTAGE_EPS, ddof).tolist(), strict=True))
    return [found.get(path[: level + 1], 0.0) if len(path) > level else 0.0 for path in paths]


def turn_count_bias(turn_rewards, outcome_rewards):
    """How far the comparison of turn l is one among survivors: metric credit/turn_count_bias, in units of the outcome.

    For each turn that a usable trajectory has: mean outcome of those that have it, minus mean outcome of the whole
    group; then the mean over these turns. Positive when those that go on end better; 0 when all have equally many
    turns, or nobody has an intermediate one. Shapes as in `mt_grpo_advantages`.
    """
    _, outcome, present = _checked(turn_rewards, outcome_rewards)
    usable = outcome[outcome.isfinite()].mean()
    gaps = [outcome[there].mean() - usable for there in present.T if there.any()]
    return float(torch.stack(gaps).mean()) if gaps else 0.0


def tree_leaves(group_size, turns):
    """Trajectories of one question in a rollout tree: every turn but the last branches `group_size`-fold; turns >= 2.

    Within it, turns are compared after one history, not across different ones; this is the price.
    """
    return group_size ** (turns - 1)


def _checked(turn_rewards, outcome_rewards):
    """(turns (K, U - 1), outcome (K,), present (K, U - 1)) in float64; a broken trajectory is NaN in all its turns."""
    turns = torch.as_tensor(turn_rewards, dtype=torch.float64)
    outcome = torch.as_tensor(outcome_rewards, dtype=torch.float64)
    if turns.ndim != 2 or outcome.ndim != 1 or len(turns) != len(outcome):
        found = f"{tuple(turns.shape)} and {tuple(outcome.shape)}"
        raise ValueError(f"turn and outcome rewards must have shapes (K, U - 1) and (K,), not {found}")
    present = ~turns.isnan()
    odd = turns.isinf().any(1) | (present[:, 1:] & ~present[:, :-1]).any(1)
    if odd.any():
        row = int(odd.nonzero()[0])
        raise ValueError(f"turn rewards of trajectory {row} are infinite or have a gap: {turns[row].tolist()}")
    turns = torch.where(outcome.isfinite()[:, None], turns, math.nan)
    return turns, outcome, ~turns.isnan()


# ---- advantages of tokens ------------------------------------------------------------------------


def spread_turns(advantages_U, turn_index, loss_mask):
    """(P,) float64: each of the P sampled tokens with its turn's advantage; the lists are a trajectory's, length T."""
    advantages = torch.as_tensor(advantages_U, dtype=torch.float64)
    return advantages[[turn for turn, sampled in zip(turn_index, loss_mask, strict=True) if sampled]]


def place_turn_rewards(turn_rewards, outcome, turn_index, loss_mask):
    """Rewards on the tokens that earned them: a turn's on its last sampled token, the outcome on the very last one.

    turn_rewards: U - 1 numbers, all turns but the final one; turn_index, loss_mask: a trajectory's, length T.
    Never on a tool's tokens, which end every intermediate turn: an advantage there would train nothing, and the
    value before it would learn from it. Returns (T,) float64. ValueError when a turn has no sampled token.
    Source: MT-PPO, token-level rewards at turn ends.
    """
    last = {turn: place for place, turn in enumerate(turn_index) if loss_mask[place]}  # a later place replaces one
    if sorted(last) != list(range(len(turn_rewards) + 1)):
        raise ValueError(f"{len(turn_rewards)} turn rewards and an outcome, but sampled tokens in turns {sorted(last)}")
    rewards = torch.zeros(len(turn_index), dtype=torch.float64)
    for turn, reward in enumerate([*turn_rewards, outcome]):
        rewards[last[turn]] = reward
    return rewards


def gae(rewards_T, values_T, gamma, lam):
    """Generalised advantage estimates over the sampled tokens of a trajectory, tool output left out.

    rewards_T, values_T: (..., T), leading dimensions are sequences of equal length; the value after the last token
    is 0. With V the values, A_t = r_t + gamma V_(t+1) - V_t + gamma lam A_(t+1); gamma = lam = 1 gives the sum of
    the rewards from t on, minus V_t. Returns (..., T) float64; A + V is what the critic learns.
    """
    rewards = torch.as_tensor(rewards_T, dtype=torch.float64)
    values = torch.as_tensor(values_T, dtype=torch.float64)
    if rewards.shape != values.shape:
        raise ValueError(f"rewards {tuple(rewards.shape)} and values {tuple(values.shape)} differ in shape")
    advantages = torch.zeros_like(rewards)
    following, value_after = torch.zeros_like(rewards[..., 0]), torch.zeros_like(rewards[..., 0])
    for t in reversed(range(rewards.shape[-1])):
        delta = rewards[..., t] + gamma * value_after - values[..., t]
        following = delta + gamma * lam * following
        value_after = values[..., t]
        advantages[..., t] = following
    return advantages
