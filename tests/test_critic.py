"""critic.py: two adapters that never mix, values and returns, the clipped loss, saving, and the update it feeds."""

import math

import pytest
import torch
from conftest import use_demo
from fakes import QUESTION

import checkpoint
import config
from credit import gae
from critic import Critic, value_loss
from policy import Policy, coverage
from records import ScoredGroup, Trajectory
from update import Batch, build_batch, update


@pytest.fixture
def pair():
    with use_demo():
        config.CREDIT = "mt_ppo"
        policy = Policy()
        yield policy, Critic(policy)


def trajectory(k, turns=3, broken=False):
    """Turns of four sampled tokens and three of a tool's between them."""
    ids, mask, index = [], [], []
    for turn in range(turns):
        ids += [20 + k + turn, 30, 40 + k, 50] + [60, 61, 62] * (turn < turns - 1)
        mask += [1] * 4 + [0] * 3 * (turn < turns - 1)
        index += [turn] * (4 + 3 * (turn < turns - 1))
    logprobs = tuple(-0.5 * sampled for sampled in mask)
    return Trajectory("q1", k, (7, 8, 9), tuple(ids), tuple(mask), logprobs, tuple(index), (), "",
                      "error:engine" if broken else "no_tool_call", 1.0, 0, 1)  # fmt: skip


def batch_of(rewards, turn_rewards):
    trajectories = tuple(trajectory(k, len(turns) + 1, math.isnan(rewards[k])) for k, turns in enumerate(turn_rewards))
    none = (0.0,) * len(rewards)
    group = ScoredGroup(QUESTION, trajectories, ("",) * len(rewards), none, none, none, tuple(rewards),
                        tuple(map(tuple, turn_rewards)))  # fmt: skip
    return build_batch([group], 1)


def shake(parameters, scale=0.05):
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in parameters.values():
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator))


def test_rewards_stand_on_the_last_sampled_token_of_their_turns(pair):
    batch = batch_of([1.0, 0.2, math.nan], [(0.3, -0.1), (0.5,), ()])
    assert batch.tokens == 20 and len(batch.rows) == 2  # the broken one is out
    assert batch.rows[0].rewards.tolist() == [0, 0, 0, 0.3, 0, 0, 0, -0.1, 0, 0, 0, 1.0]
    assert batch.rows[1].rewards.tolist() == [0, 0, 0, 0.5, 0, 0, 0, 0.2]


def test_a_fresh_critic_gives_sums_of_rewards_and_afterwards_what_gae_says(pair):
    policy, critic = pair
    batch = batch_of([1.0, 0.2], [(0.3, -0.1), (0.5,)])
    critic.appraise(batch)
    assert batch.rows[0].returns.tolist() == pytest.approx([1.2] * 4 + [0.9] * 4 + [1.0] * 4)
    every = torch.cat([row.advantages for row in batch.rows])
    assert float(every.mean()) == pytest.approx(0, abs=1e-6) and float(every.std()) == pytest.approx(1, abs=1e-4)
    shake(critic.parameters)
    critic.appraise(batch)
    raw = torch.cat([gae(row.rewards, row.values, 1.0, 1.0) for row in batch.rows])
    expected = (raw - raw.mean()) / (raw.std() + config.ADVANTAGE_EPS)
    ours = torch.cat([row.advantages for row in batch.rows])
    assert torch.allclose(ours.double(), expected, atol=1e-5) and batch.rows[0].values.std() > 0


def test_the_two_adapters_never_mix(pair):
    """The critic's training leaves the policy's log-probs alone, and the policy's training its values."""
    policy, critic = pair
    batch = batch_of([1.0, 0.2], [(0.3, -0.1), (0.5,)])
    assert not policy.parameters.keys() & critic.parameters.keys()
    assert len(policy.parameters) + 2 == len(critic.parameters)
    with torch.no_grad():
        before = policy.logprobs(batch.rows)
    shake(critic.parameters)
    critic.appraise(batch)
    values = [row.values for row in batch.rows]
    metrics = critic.fit(batch)
    with torch.no_grad():
        assert torch.equal(policy.logprobs(batch.rows), before)
        assert torch.equal(policy.reference_logprobs(batch.rows), before)  # its lora_B is still zero
    assert metrics["critic/gradient_norm"] > 0
    shake(policy.parameters)
    critic.appraise(batch)
    moved = [row.values for row in batch.rows]
    assert not torch.equal(torch.cat(values), torch.cat(moved))  # by fit; the policy's shake must add nothing
    with torch.no_grad():
        for parameter in policy.parameters.values():
            parameter.zero_()
    critic.appraise(batch)
    assert all(torch.equal(a, row.values) for a, row in zip(moved, batch.rows, strict=True))
    update(policy, checkpoint.make_optimizer(policy), batch)
    assert set(coverage(policy.model).values()) == {4}


def test_fitting_brings_the_values_to_the_returns(pair):
    policy, critic = pair
    for group in critic.optimizer.param_groups:
        group["lr"] = 0.004
    batch = batch_of([1.0, -1.0, 0.2], [(0.3, -0.1), (0.5,), ()])
    config.CRITIC_CLIP = 10.0
    losses = []
    for _ in range(40):
        critic.appraise(batch)
        losses.append(critic.fit(batch)["critic/loss"])
    assert losses[-1] < 0.2 * losses[0]
    critic.appraise(batch)
    assert critic.fit(batch)["critic/explained_variance"] > 0.8


def test_value_loss_by_hand():
    values, old, returns = (torch.tensor(v) for v in ([0.0, 1.0, 2.0], [0.0, 0.0, 0.0], [1.0, 1.0, 5.0]))
    # unmoved; moved beyond the clip although it is right; moved towards its return, the clip holds it back
    assert value_loss(values, old, returns, 0.5).tolist() == pytest.approx([0.5, 0.5 * 0.25, 0.5 * 4.5**2])


def test_the_critic_is_saved_and_restored_with_its_optimizer(pair, tmp_path):
    policy, critic = pair
    optimizer, batch = checkpoint.make_optimizer(policy), batch_of([1.0, 0.2], [(0.3, -0.1), (0.5,)])

    def step(policy, optimizer, critic):
        critic.appraise(batch)
        update(policy, optimizer, batch)
        critic.fit(batch)

    step(policy, optimizer, critic)
    checkpoint.save(tmp_path, 1, policy, optimizer, {}, critic)
    step(policy, optimizer, critic)
    other = Policy()
    fresh = Critic(other)
    restored = checkpoint.make_optimizer(other)
    assert checkpoint.load(tmp_path, other, restored, fresh)[0] == 1
    step(other, restored, fresh)
    for ours, theirs in ((critic, fresh), (policy, other)):
        assert all(torch.equal(p, theirs.parameters[name]) for name, p in ours.parameters.items())


def test_an_empty_batch_moves_no_critic(pair):
    policy, critic = pair
    empty = Batch([], 0, 0)
    critic.appraise(empty)
    assert critic.fit(empty) == {} and not critic.optimizer.state
