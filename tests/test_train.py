"""The whole loop as a process: it learns from judge.jsonl alone, resumes bit for bit, and refuses bad input first."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import ROOT, use_demo
from peers import Peer, chat_reply, ok
from safetensors.torch import load_file, save_file

import checkpoint
import config
import preflight
import train
from policy import Policy
from records import read_journal, trajectory_from_json
from replay import rebuild_rewards
from reward import check_format
from update import Batch, Row

SMALL = [sys.executable, str(ROOT / "tests" / "small_demo.py")]
STEPS = 3


def start(folder, *arguments, program=SMALL):
    return subprocess.Popen(
        [*program, *arguments], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def finish(process, code=0):
    output, _ = process.communicate(timeout=400)
    assert process.returncode == code, output[-3000:]
    return output


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An uninterrupted run: (its folder, what it printed)."""
    folder = tmp_path_factory.mktemp("whole")
    output = finish(start(folder, "--run", "one", "--steps", str(STEPS)))
    return folder / "runs" / "one", output


def lines(path):
    return [line for _, line in read_journal(path)]


def test_demo_prints_what_it_does_and_leaves_the_run_folder(whole):
    folder, output = whole
    assert "judge: rule   search: local   reader: local" in output
    assert "self_attn.q_proj x4" in output and f"step {STEPS}/{STEPS}" in output
    assert "first step" in output and (folder / "curves.png").stat().st_size > 5000
    metrics = lines(folder / "metrics.jsonl")
    assert [line["step"] for line in metrics] == [1, 2, 3]
    for name in ("reward/has_answer", "reward/degenerate_group_rate", "rollout/finish_no_tool_call", "judge/seconds",
                 "tools/error_rate", "train/gradient_norm", "time/update"):  # fmt: skip
        assert name in metrics[0]
    assert max(line["train/sampler_difference_max"] for line in metrics) < 1e-4  # the sampler serves these weights
    written = json.loads((folder / "config.json").read_text())
    assert written["constants"]["MODEL"].endswith("demo/policy") and "torch" in written["versions"]


def test_every_reward_is_rebuilt_from_judge_jsonl_alone(whole):
    judged = lines(whole[0] / "judge.jsonl")
    scored = [line for line in judged if line["kind"] == "scored"]
    rebuilt = rebuild_rewards(line for line in judged if line["kind"] != "scored")
    assert len(scored) == len(rebuilt) == 2 * STEPS
    for line in scored:
        assert rebuilt[line["step"], line["question_id"]] == dict(zip(line["players"], line["rewards"], strict=True))
    assert f"rewards of {2 * STEPS} of {2 * STEPS} groups" in whole[1]


def test_answers_in_judge_jsonl_are_those_of_the_rollouts(whole):
    judged = {
        (g["step"], g["question_id"]): g["answers"] for g in lines(whole[0] / "judge.jsonl") if g["kind"] == "group"
    }
    for step in range(1, STEPS + 1):
        for record in lines(whole[0] / "rollouts" / f"step-{step:06d}.jsonl"):
            trajectory = trajectory_from_json(record)
            answer = judged[step, trajectory.question_id][trajectory.k]
            check = check_format(trajectory.transcript)
            assert (answer["answer"], answer["format"]) == (check.answer, check.reward)


def adapter(folder, step):
    return (folder / "checkpoints" / f"step-{step:06d}" / "adapter_model.safetensors").read_bytes()


def stable(line):
    """A journal line without its times."""
    return {
        name: value for name, value in line.items() if name != "seconds" and not name.startswith(("time/", "judge/"))
    }


@pytest.mark.parametrize("moment", ["between steps", "inside a step"])
def test_killed_and_resumed_equals_uninterrupted(whole, tmp_path, moment):
    process = start(tmp_path, "--run", "one", "--steps", str(STEPS))
    folder = tmp_path / "runs" / "one"
    sign = folder / ("checkpoints/step-000001" if moment == "between steps" else "rollouts/step-000002.jsonl")
    wait_for(lambda: sign.exists() and (sign.is_dir() or len(lines(sign)) >= 2), process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (folder / "checkpoints" / f"step-{STEPS:06d}").exists()
    output = finish(start(tmp_path, "--run", "one", "--steps", str(STEPS)))
    assert "at step 1 of 3" in output
    assert adapter(folder, STEPS) == adapter(whole[0], STEPS)
    for name in ("metrics.jsonl", "rollouts/step-000003.jsonl"):
        ours, theirs = ([stable(line) for line in lines(path / name)] for path in (folder, whole[0]))
        key = json.dumps  # trajectories are journaled as they finish
        assert sorted(ours, key=key) == sorted(theirs, key=key)
    assert f"gives the rewards of {2 * STEPS} of {2 * STEPS} groups again" in output
    assert rebuild_rewards(lines(folder / "judge.jsonl")) == rebuild_rewards(lines(whole[0] / "judge.jsonl"))


def test_killed_and_resumed_with_a_critic_equals_uninterrupted(tmp_path):
    """Turn-level credit on questions with exact answers: policy, critic and both optimizers end up the same."""
    flags = ("--run", "one", "--steps", "2", "--data", "data/demo/qa.parquet", "--set", "CREDIT=mt_ppo",
             "--set", "REWARD_SCHEME=exact_match", "--set", "CRITIC_LEARNING_RATE=0.001")  # fmt: skip
    folders = [tmp_path / name for name in ("whole", "killed")]
    for folder in folders:
        folder.mkdir()
    output = finish(start(folders[0], *flags))
    assert "credit: mt_ppo" in output
    process = start(folders[1], *flags)
    sign = folders[1] / "runs" / "one" / "rollouts" / "step-000002.jsonl"
    wait_for(lambda: sign.exists() and len(lines(sign)) >= 2, process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    finish(start(folders[1], *flags))
    whole, killed = (folder / "runs" / "one" / "checkpoints" / "step-000002" for folder in folders)
    names = [path.name for path in whole.iterdir() if path.suffix == ".safetensors"]
    assert sorted(names) == ["adapter_model.safetensors", "critic.safetensors", "critic_optimizer.safetensors",
                             "optimizer.safetensors"]  # fmt: skip
    assert all((whole / name).read_bytes() == (killed / name).read_bytes() for name in names)
    metrics = lines(folders[0] / "runs" / "one" / "metrics.jsonl")
    assert {"critic/explained_variance", "reward/exact_match", "reward/turn", "credit/turn_count_bias"} <= set(
        metrics[1]
    )


def wait_for(condition, process):
    deadline = time.monotonic() + 300
    while not condition():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)


def test_a_finished_run_says_so(whole):
    output = finish(start(whole[0].parent.parent, "--run", "one", "--steps", str(STEPS)), code=1)
    assert "is finished: step 3 of 3" in output and "Traceback" not in output


def test_changed_constants_are_refused_with_a_list(whole):
    output = finish(start(whole[0].parent.parent, "--run", "one", "--steps", "9", "--seed", "5"), code=1)
    assert "SEED was 0, is 5" in output and "Traceback" not in output


def test_a_run_in_use_is_refused(tmp_path):
    with checkpoint.claimed(tmp_path), pytest.raises(SystemExit, match="in use by another process"), (
        checkpoint.claimed(tmp_path)
    ):  # fmt: skip
        pass
    with checkpoint.claimed(tmp_path):  # free again
        pass


@pytest.mark.parametrize("name", ["../x", "a/b", ".hidden", "a b"])
def test_a_run_name_is_one_word(tmp_path, name):
    config.RUNS_DIR = str(tmp_path)
    with pytest.raises(SystemExit, match="one word"):
        checkpoint.open_run(name, "train")
    assert not list(tmp_path.iterdir())


def test_ctrl_c_is_one_line_and_the_step_goes_on_later(tmp_path, whole):
    process = start(tmp_path, "--run", "one", "--steps", "1")
    rollouts = tmp_path / "runs" / "one" / "rollouts" / "step-000001.jsonl"
    wait_for(lambda: rollouts.exists() and len(lines(rollouts)) >= 1, process)
    process.send_signal(signal.SIGINT)
    assert "interrupted: run the same command" in finish(process, code=1)
    kept = len(lines(rollouts))
    finish(start(tmp_path, "--run", "one", "--steps", "1"))
    assert adapter(tmp_path / "runs" / "one", 1)
    assert len(lines(rollouts)) == 8 and kept < 8


# ---- wrong input ---------------------------------------------------------------------------------


def test_train_without_cuda_is_one_line_with_the_remedy(tmp_path):
    output = finish(start(tmp_path, program=[sys.executable, str(ROOT / "train.py")]), code=1)
    assert "no usable CUDA device" in output and "make demo" in output and output.count("\n") == 1


def test_unknown_constant_values_are_named_before_anything_else(tmp_path):
    with use_demo():
        config.JUDGE_BACKEND, config.K, config.LEARNING_RATE = "oracle", 1, 0
        with pytest.raises(SystemExit) as caught:
            train.main([])
    text = str(caught.value)
    assert "config.JUDGE_BACKEND = 'oracle' is not one of" in text
    assert "config.K = 1 must be a whole number of at least 2" in text and "LEARNING_RATE" in text


def test_a_context_too_small_for_the_judge_is_named_with_the_size_it_needs():
    config.SAMPLER, config.JUDGE_BACKEND, config.SERVER_CONTEXT = "vllm", "openai", 40_000
    assert ["43168" in problem and "SERVER_CONTEXT" in problem for problem in preflight.config_problems()] == [True]
    config.JUDGE_URL = "https://judge.example/v1"
    assert preflight.config_problems() == []


def test_missing_corpus_is_one_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with use_demo():
        config.TRAIN_FILE = questions_file(tmp_path)
        config.CORPUS_FILE = "nowhere.jsonl"
        with pytest.raises((SystemExit, FileNotFoundError), match="nowhere.jsonl"):
            train.main([])
    assert not (tmp_path / "runs").exists()


def questions_file(folder):
    import corpus

    corpus.build(folder / "world")
    return str(folder / "world" / "train.parquet")


def test_too_few_questions_are_refused(tmp_path):
    with use_demo():
        config.TRAIN_FILE, config.QUESTIONS_PER_STEP = questions_file(tmp_path), 100_000
        with pytest.raises(SystemExit, match="fewer than QUESTIONS_PER_STEP"):
            train.load_training_questions()


def test_a_wrong_key_stops_in_one_line_and_the_right_one_continues(tmp_path, monkeypatch):
    """Rollouts that are paid for are kept, and the key is nowhere in the run folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JUDGE_API_KEY", "sk-wrong-4711")
    refused = (401, {}, {"error": {"message": "Incorrect API key provided: sk-wrong-4711"}})
    with use_demo(), Peer(refused) as peer:
        config.TRAIN_FILE, config.CORPUS_FILE = questions_file(tmp_path), str(tmp_path / "world" / "corpus.jsonl")
        config.QUESTIONS_PER_STEP, config.K, config.REPEATS, config.SLOTS = 2, 4, 1, 8
        config.JUDGE_BACKEND, config.JUDGE_URL, config.JUDGE_MODEL = "openai", peer.url, "judge-1"
        with pytest.raises(SystemExit, match="stopped: judge: .* 401.*JUDGE_API_KEY") as caught:
            train.main(["--run", "keyed", "--steps", "1"])
        assert "\n" not in str(caught.value)
        folder = tmp_path / "runs" / "keyed"
        rollouts = (folder / "rollouts" / "step-000001.jsonl").read_bytes()
        peer.script[:] = [lambda asked: ok(chat_reply('{"winners": [1]}', asked.json["model"]))]
        assert train.main(["--run", "keyed", "--steps", "1"]) == Path("runs/keyed")
    assert (folder / "rollouts" / "step-000001.jsonl").read_bytes() == rollouts
    assert lines(folder / "metrics.jsonl")[0]["judge/input_tokens"] == 2 * 3 * 900  # two groups of three matches
    assert not [path for path in folder.rglob("*") if path.is_file() and b"4711" in path.read_bytes()]


# ---- checkpoints ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def policy():
    with use_demo():
        yield Policy()


def saved(policy, folder, steps):
    optimizer = checkpoint.make_optimizer(policy)
    for step in steps:
        checkpoint.save(folder, step, policy, optimizer, {"mark": step})
    return optimizer


def names(folder):
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def test_newest_two_stay_and_every_fifth(policy, tmp_path):
    saved(policy, tmp_path, range(1, 13))
    assert names(tmp_path) == ["step-000005", "step-000010", "step-000011", "step-000012"]


def test_LORA_04_adapters_train_on_after_save_and_load(policy, tmp_path):
    """And LORA-05: what is loaded is what was saved, tensor by tensor, not a new adapter."""
    row = Row(list(range(8, 40)), list(range(10, 32)), torch.ones(22), torch.zeros(22), 1.0)
    optimizer, fresh = checkpoint.make_optimizer(policy), set(policy.parameters)
    train.update(policy, optimizer, Batch([row], 22, 1))
    checkpoint.save(tmp_path, 1, policy, optimizer, {})
    saved_weights = {name: p.detach().clone() for name, p in policy.parameters.items()}
    other = Policy()
    resumed = checkpoint.make_optimizer(other)
    assert checkpoint.load(tmp_path, other, resumed)[0] == 1
    assert all(torch.equal(p, saved_weights[name]) for name, p in other.parameters.items())
    assert set(other.parameters) == fresh and sum(len(g["params"]) for g in resumed.param_groups) == len(fresh)
    for which, its_optimizer in ((policy, optimizer), (other, resumed)):
        train.update(which, its_optimizer, Batch([row], 22, 1))
    assert any(not torch.equal(p, saved_weights[name]) for name, p in other.parameters.items())
    assert all(torch.equal(p, policy.parameters[name]) for name, p in other.parameters.items())


def test_LORA_05_the_manifest_notices_another_adapter(policy, tmp_path):
    optimizer = saved(policy, tmp_path, [1])
    file = tmp_path / "checkpoints" / "step-000001" / "adapter_model.safetensors"
    tensors = load_file(file)
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, file)
    step, _, skipped = checkpoint.load(tmp_path, policy, optimizer)
    assert step == 0 and "differs from its hash" in skipped[0]


@pytest.mark.parametrize("harm", ["cut", "missing", "no manifest"])
def test_a_damaged_checkpoint_is_skipped_and_named(policy, tmp_path, harm):
    optimizer = saved(policy, tmp_path, [1, 2])
    newest = tmp_path / "checkpoints" / "step-000002"
    victim = newest / ("manifest.json" if harm == "no manifest" else "adapter_model.safetensors")
    victim.unlink() if harm != "cut" else victim.write_bytes(victim.read_bytes()[:-8])
    step, progress, skipped = checkpoint.load(tmp_path, policy, optimizer)
    assert (step, progress) == (1, {"mark": 1})
    assert len(skipped) == 1 and skipped[0].startswith("step-000002: ")


def test_nothing_unfinished_is_ever_visible(policy, tmp_path, monkeypatch):
    """A full disk, or a kill, in the middle of saving leaves the previous checkpoint as it is."""
    optimizer = saved(policy, tmp_path, [1])
    monkeypatch.setattr(checkpoint, "save_file", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left")))
    with pytest.raises(OSError, match="No space"):
        checkpoint.save(tmp_path, 2, policy, optimizer, {})
    assert [name for name in names(tmp_path) if not name.startswith(".")] == ["step-000001"]
    assert checkpoint.load(tmp_path, policy, optimizer)[0] == 1


def test_a_checkpoint_holds_no_pickle(policy, tmp_path):
    saved(policy, tmp_path, [1])
    files = {path.suffix for path in (tmp_path / "checkpoints" / "step-000001").iterdir()}
    assert files <= {".safetensors", ".json", ".md"}


def test_a_finished_looking_run_with_a_damaged_checkpoint_goes_on(policy, tmp_path):
    saved(policy, tmp_path, [1, 2])
    (tmp_path / "checkpoints" / "step-000002" / "manifest.json").write_text("[]")
    assert checkpoint.last_step(tmp_path) == 1


def test_a_runs_folder_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    config.RUNS_DIR = str(tmp_path / "file")
    with pytest.raises(SystemExit, match="cannot be made .* set RUNS_DIR"):
        checkpoint.open_run(None, "train")


def test_unnamed_runs_continue_the_newest_unfinished_one_with_equal_constants(policy, tmp_path):
    config.RUNS_DIR, config.STEPS = str(tmp_path), 4
    first, why = checkpoint.open_run(None, "train")
    assert first.name == "train-0001" and "no unfinished run" in why
    assert checkpoint.open_run(None, "train")[0] == first
    config.SEED = 7
    second, _ = checkpoint.open_run(None, "train")
    assert second.name == "train-0002"
    saved(policy, second, [4])
    assert checkpoint.open_run(None, "train")[0].name == "train-0003"
    config.SEED = 0
    assert checkpoint.open_run(None, "train")[0] == first
    assert Path(first / "config.json").exists()
