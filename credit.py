"""Rewards to advantages: pure tensors, no model, no I/O."""

import torch


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
