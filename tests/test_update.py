"""Batches and the optimiser step: masks from lengths, any micro-batching, empty and broken steps."""

import copy
import math
import random

import pytest
import torch
from conftest import ROOT, use_demo
from fakes import QUESTION
from transformers import AutoTokenizer, Qwen3_5ForCausalLM, Qwen3_5TextConfig

import checkpoint
import config
import train
from loss import kl_penalty
from policy import Policy, coverage
from records import Question, ScoredGroup, Trajectory
from train import take
from update import Batch, Row, _backward, build_batch, micro_batches, update


@pytest.fixture(scope="module")
def policy():
    with use_demo():
        yield Policy()


@pytest.fixture(autouse=True)
def demo(policy):
    with use_demo():
        yield
    for parameter in policy.parameters.values():
        parameter.grad = None


def make_rows(policy, lengths, seed=0):
    """Rows of random ids; two spans of each are trained on."""
    draw = random.Random(seed)
    rows = []
    for length in lengths:
        ids = [draw.randrange(8, 900) for _ in range(length)]
        positions = [*range(3, length // 2), *range(length // 2 + 4, length)]
        rows.append(Row(ids, positions, torch.full((len(positions),), draw.uniform(-2, 2)),
                        torch.full((len(positions),), -1.0), 1.0))  # fmt: skip
    return rows


def gradients(policy, rows, budget):
    """{name: gradient} of the step's loss when rows are packed under the token budget; weights stay as they are."""
    config.MICRO_BATCH_TOKENS = budget
    tokens = sum(len(row.positions) for row in rows)
    policy.model.zero_grad()
    sums = dict.fromkeys(("loss", "clipped", "held", "difference", "largest", "kl"), 0)
    for packed in micro_batches(rows):
        _backward(policy, packed, Batch(rows, tokens, len(rows)), sums)
    return {name: p.grad.clone() for name, p in policy.parameters.items() if p.grad is not None}


@pytest.mark.parametrize("updates", [1, 2])
def test_LOSS_06_gradients_do_not_depend_on_micro_batches(policy, updates):
    """One by one, all at once, and mixed: the same gradient, not only the same logged loss."""
    rows = make_rows(policy, [17, 40, 23, 31, 12, 40])
    if updates == 2:
        for row in rows:
            row.old = torch.full((len(row.positions),), -6.0)
    single = gradients(policy, rows, 1)
    whole = gradients(policy, rows, 10_000)
    mixed = gradients(policy, rows[::-1], 85)
    assert len(micro_batches(rows)) == 3
    assert single and any(g.abs().max() > 1e-4 for g in single.values())
    for name, gradient in single.items():
        assert torch.allclose(gradient, whole[name], atol=1e-6, rtol=0)
        assert torch.allclose(gradient, mixed[name], atol=1e-6, rtol=0)


def test_LOSS_05_denominator_is_the_steps_token_count(policy):
    """Token mean over everything, not a mean of row means."""
    rows = make_rows(policy, [12, 60])
    with torch.no_grad():
        logprobs = [policy.logprobs([row]) for row in rows]
    expected = sum(float((-row.advantages).sum()) for row in rows) / sum(map(len, logprobs))
    batch = Batch(rows, sum(len(row.positions) for row in rows), len(rows))
    optimizer = torch.optim.SGD(policy.parameters.values(), lr=0.0)
    assert update(policy, optimizer, batch)["train/loss"] == pytest.approx(expected, rel=1e-5)


def test_micro_batches_keep_the_budget_and_every_row(policy):
    rows = make_rows(policy, [50, 10, 20, 30, 90, 25])
    config.MICRO_BATCH_TOKENS = 60
    packed = micro_batches(rows)
    assert sorted(len(r.ids) for batch in packed for r in batch) == [10, 20, 25, 30, 50, 90]
    assert all(len(batch) == 1 or len(batch) * len(batch[0].ids) <= 60 for batch in packed)
    assert len(packed[0]) == 1 and len(packed[0][0].ids) == 90  # longer than the budget: alone


def trajectory(ids, mask, k=0, finish="no_tool_call", prompt=(7, 8)):
    return Trajectory("q1", k, prompt, tuple(ids), tuple(mask), tuple(-0.5 * m for m in mask), (0,) * len(ids), (), "",
                      finish, 1.0, 0, 1)  # fmt: skip


def group(rewards, trajectories=None, question=QUESTION):
    trajectories = trajectories or [trajectory([5, 6, 2], [1, 1, 1], k) for k in range(len(rewards))]
    none = (0.0,) * len(rewards)
    return ScoredGroup(question, tuple(trajectories), ("",) * len(rewards), none, none, none, tuple(rewards))


def test_TOK_12_pad_equals_eos_and_the_end_token_is_trained_on(policy):
    batch = build_batch([group([1.0, 0.0], [trajectory([5, 6, 2], [1, 1, 1]), trajectory([5, 2], [1, 1], 1)])], 1)
    assert [row.positions for row in batch.rows] == [[2, 3, 4], [2, 3]]
    assert batch.tokens == 5
    padded = policy.logprobs(batch.rows)
    assert torch.allclose(padded, torch.cat([policy.logprobs([row]) for row in batch.rows]), atol=1e-5)


def test_only_masked_tokens_become_positions():
    mask = [1, 1, 0, 0, 1]
    batch = build_batch([group([1.0, 0.0], [trajectory(range(5), mask), trajectory(range(5), mask, 1)])], 1)
    assert batch.rows[0].positions == [2, 3, 6] and len(batch.rows[0].advantages) == 3
    assert batch.rows[0].sampled.tolist() == [-0.5] * 3


def test_LOSS_11_groups_without_signal_stay_in_the_denominator():
    """The article's batch mean outranks the report: no row, but its tokens count."""
    batch = build_batch([group([1.0, 0.5, 0.5, 0.0]), group([0.5] * 4)], 1)
    assert len(batch.rows) == 2 and batch.tokens == 8 * 3  # two rows of the first group have advantage 0


def test_LOSS_14_statistics_are_per_group():
    """Two groups of one question stay two groups, and a missing row moves nobody."""
    twice = [group([1.0, 0.0, 0.5]), group([0.2, 0.4])]
    advantages = [float(row.advantages[0]) for row in build_batch(twice, 1).rows]
    assert advantages == pytest.approx([1.0, -1.0, -0.7071, 0.7071], abs=1e-4)


def test_broken_trajectories_add_neither_rows_nor_tokens():
    members = [trajectory([5, 6, 2], [1, 1, 1], k, "error:engine" if k == 1 else "no_tool_call") for k in range(3)]
    batch = build_batch([group([1.0, math.nan, 0.0], members)], 1)
    assert len(batch.rows) == 2 and batch.tokens == 6


def test_permuted_advantages_are_the_same_numbers_in_another_order():
    groups = [group([1.0, 0.0, 2.0, 0.5, 0.25, 0.75, 1.5, 1.75])]
    honest = [float(row.advantages[0]) for row in build_batch(groups, 1).rows]
    config.PERMUTE_ADVANTAGES = True
    permuted = [float(row.advantages[0]) for row in build_batch(groups, 1).rows]
    assert sorted(honest) == sorted(permuted) and honest != permuted
    assert permuted == [float(row.advantages[0]) for row in build_batch(groups, 1).rows]


def snapshot(policy):
    return {name: p.detach().clone() for name, p in policy.parameters.items()}


def test_LOSS_07_an_empty_batch_moves_nothing(policy):
    """No step, no weight decay, no state."""
    optimizer, before = checkpoint.make_optimizer(policy), snapshot(policy)
    metrics = update(policy, optimizer, build_batch([group([0.5] * 4)], 1))
    assert all(torch.equal(before[name], p) for name, p in policy.parameters.items())
    assert not optimizer.state and metrics["train/rows"] == 0 and "train/loss" not in metrics


def test_LOSS_04_a_gradient_that_is_not_finite_skips_the_step_and_repeats_stop_the_run(policy):
    optimizer, before = checkpoint.make_optimizer(policy), snapshot(policy)
    rows = make_rows(policy, [20])
    rows[0].advantages[0] = math.inf
    metrics = update(policy, optimizer, Batch(rows, len(rows[0].positions), len(rows)))
    assert metrics["train/skipped_updates"] == 1
    assert all(torch.equal(before[name], p) for name, p in policy.parameters.items())
    progress = {}
    for _ in range(2):
        train._count_skips(progress, metrics)
    with pytest.raises(SystemExit, match="not finite in 3 steps"):
        train._count_skips(progress, metrics)
    train._count_skips(progress, {"train/skipped_updates": 0})
    assert progress == {"skipped_in_a_row": 0}


def test_several_updates_keep_the_first_ones_logprobs(policy):
    """With old frozen before the first update, the second one's ratio has moved away from 1."""
    config.UPDATES_PER_STEP = 3
    config.LEARNING_RATE = 0.05
    saved = copy.deepcopy(snapshot(policy))
    rows = make_rows(policy, [30, 30])
    tokens = sum(len(row.positions) for row in rows)
    metrics = update(policy, checkpoint.make_optimizer(policy), Batch(rows, tokens, len(rows)))
    with torch.no_grad():
        for name, parameter in policy.parameters.items():
            parameter.copy_(saved[name])
        expected = policy.logprobs(rows)
    assert torch.allclose(torch.cat([row.old for row in rows]), expected, atol=1e-6)
    assert metrics["train/clip_fraction"] > 0


def test_take_walks_each_epoch_once_and_without_repeats_in_a_step():
    questions = [Question(str(i), "q", ()) for i in range(10)]
    config.QUESTIONS_PER_STEP = 3
    epoch = [q.id for step in (1, 2, 3) for q in take(questions, step)]
    assert len(set(epoch)) == 9
    assert [q.id for q in take(questions, 2)] == [q.id for q in take(questions, 2)]
    assert [q.id for q in take(questions, 4)] != epoch[:3]


def test_lora_covers_every_linear_of_every_block(policy):
    names = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
             "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")  # fmt: skip
    assert coverage(policy.model) == dict.fromkeys(names, 4)
    assert all("lora_" in name for name in policy.parameters)
    bare = copy.deepcopy(policy.model)
    bare.get_base_model().model.layers[2].mlp.up_proj = torch.nn.Linear(4, 4)
    with pytest.raises(ValueError, match="layers.2.mlp.up_proj"):
        coverage(bare)


@pytest.fixture(scope="module")
def qwen35(tmp_path_factory):
    """A tiny random Qwen3.5: three gated-delta-net blocks and one with attention."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
    linear = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
              "linear_value_head_dim": 16}  # fmt: skip
    model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(vocab_size=1024, num_key_value_heads=2, head_dim=16,
                                                 tie_word_embeddings=True, **sizes, **linear))  # fmt: skip
    folder = tmp_path_factory.mktemp("qwen35")
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(ROOT / "demo" / "policy").save_pretrained(folder)
    with use_demo():
        config.MODEL = str(folder)
        yield Policy()


def test_LOSS_13_padding_changes_nothing_in_gated_delta_nets(qwen35):
    rows = make_rows(qwen35, [12, 20, 33])
    with torch.no_grad():
        together = qwen35.logprobs(rows)
        alone = torch.cat([qwen35.logprobs([row]) for row in rows])
    assert torch.allclose(together, alone, atol=1e-5)


def test_lora_covers_gated_delta_nets(qwen35):
    covered = coverage(qwen35.model)
    assert {name: covered[name] for name in covered if name.startswith("linear_attn")} == {
        f"linear_attn.{name}": 3 for name in ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")
    }
    assert covered["self_attn.q_proj"] == 1 and covered["mlp.up_proj"] == 4


def test_LORA_10_checkpointing_reaches_every_adapter(qwen35):
    """Activations recomputed, base frozen: still every lora_B has a finite gradient other than zero."""
    qwen35.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    qwen35.model.train()
    rows = make_rows(qwen35, [24])
    qwen35.logprobs(rows).sum().backward()
    slopes = {name: p.grad for name, p in qwen35.parameters.items() if "lora_B" in name}
    for parameter in qwen35.parameters.values():
        parameter.grad = None
    assert len(slopes) == sum(coverage(qwen35.model).values())
    assert all(g is not None and g.isfinite().all() and g.abs().max() > 0 for g in slopes.values())


def test_kl_of_the_initial_adapter_is_zero_and_grows_with_the_adapter(policy):
    rows, saved = make_rows(policy, [30, 20]), snapshot(policy)
    with torch.no_grad():
        fresh = kl_penalty(policy.logprobs(rows), policy.reference_logprobs(rows))
        for name, parameter in policy.parameters.items():
            if "lora_B" in name:
                parameter.add_(0.05)
        moved = kl_penalty(policy.logprobs(rows), policy.reference_logprobs(rows))
        for name, parameter in policy.parameters.items():
            parameter.copy_(saved[name])
    assert fresh.abs().max() < 1e-6
    assert moved.mean() > 1e-3


def test_a_kl_penalty_trains_rows_without_an_advantage_and_is_reported(policy):
    tied = [group([0.5] * 4)]
    assert not build_batch(tied, 1).rows
    config.KL_COEF = 0.1
    batch = build_batch(tied, 1)
    assert len(batch.rows) == 4
    metrics = update(policy, torch.optim.SGD(policy.parameters.values(), lr=0.0), batch)
    assert metrics["train/kl"] == pytest.approx(0, abs=1e-6)


def test_kl_adds_its_coefficient_times_its_token_mean(policy):
    rows, saved = make_rows(policy, [30, 20]), snapshot(policy)
    with torch.no_grad():
        for name, parameter in policy.parameters.items():
            if "lora_B" in name:
                parameter.add_(0.05)
    tokens = sum(len(row.positions) for row in rows)
    optimizer, losses = torch.optim.SGD(policy.parameters.values(), lr=0.0), []
    for config.KL_COEF in (0.0, 0.5):
        metrics = update(policy, optimizer, Batch(rows, tokens, 2))
        losses.append(metrics["train/loss"])
    with torch.no_grad():
        for name, parameter in policy.parameters.items():
            parameter.copy_(saved[name])
    assert losses[1] - losses[0] == pytest.approx(0.5 * metrics["train/kl"], rel=1e-3) and metrics["train/kl"] > 1e-3


def test_sequence_level_is_a_mean_over_trajectories_whatever_the_micro_batches(policy):
    """Short and long trajectories weigh the same, and packing does not matter."""
    rows = make_rows(policy, [12, 60, 30])
    config.RATIO_LEVEL = "sequence"
    expected = -sum(float(row.advantages[0]) for row in rows) / 3
    optimizer = torch.optim.SGD(policy.parameters.values(), lr=0.0)
    loss = update(policy, optimizer, Batch(rows, sum(len(row.positions) for row in rows), 3))["train/loss"]
    assert loss == pytest.approx(expected, rel=1e-5)
    single, whole = gradients(policy, rows, 1), gradients(policy, rows, 10_000)
    assert all(torch.allclose(gradient, whole[name], atol=1e-6, rtol=0) for name, gradient in single.items())


def test_rows_of_another_temperature_are_packed_apart(policy):
    rows = make_rows(policy, [20, 20, 20])
    rows[1].temperature = 0.8
    assert sorted(len(packed) for packed in micro_batches(rows)) == [1, 2]
