"""What a run folder remembers: its constants, and checkpoints that are complete or not there at all."""

import contextlib
import fcntl
import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import torch
from peft import set_peft_model_state_dict
from safetensors.torch import load_file, save_file

import config
from records import write_whole

MANIFEST = "manifest.json"
MOMENTS = ("exp_avg", "exp_avg_sq", "step")  # AdamW's state of one parameter
# constants that may differ between a run and its continuation: they change no result
FREE = {"RUNS_DIR", "STEPS", "TRACKER", "PROJECT", "CHECKPOINTS_KEPT", "CHECKPOINT_FOREVER_EVERY", "JUDGE_CONCURRENCY",
        "TOOL_CONCURRENCY", "JUDGE_PAUSE", "JUDGE_TIMEOUT", "JUDGE_TRIES", "TOOL_TIMEOUT", "TRAJECTORY_DEADLINE",
        "MAX_BROKEN_SHARE", "SERVER_PORT", "SERVER_MEMORY_FRACTION", "SERVER_SEQUENCES", "SERVER_START_TIMEOUT",
        "SERVER_EXTRA_ARGS", "ADAPTER_TOLERANCE", "WIRE_TRIES", "RETRY_PAUSE", "RETRY_AFTER_CAP", "GPU_HOUR_PRICE",
        "PRICES", "CONTACT", "WIKIPEDIA_RPM", "JINA_URLS", "JINA_RPM", "JINA_KEYLESS_RPM", "JEV_CONCURRENCY",
        "JEV_RPM", "EVAL_DIR", "EVAL_SEED", "EVAL_SEARCH_RESULTS", "EVAL_TOOL_CALLS", "EVAL_JUDGE_URL",
        "EVAL_JUDGE_MODEL", "EVAL_MAX_TOKENS", "EVAL_TRIES", "EVAL_PROMPT_CHARACTERS"}  # fmt: skip
PACKAGES = ("torch", "transformers", "peft", "safetensors", "numpy")


def constants():
    """Every constant of config.py as it stands now."""
    return {name: value for name, value in vars(config).items() if name.isupper()}


def open_run(name, kind):
    """The run folder to use, as (folder, why); a new folder gets its config.json.

    name: a run asked for by name, or None: the newest unfinished run of this kind ("train", "demo") whose
    constants equal the present ones is continued, else a new numbered one is started.
    Raises SystemExit when the named run was made with other constants, or is finished.
    """
    runs = Path(config.RUNS_DIR)
    if name:
        if not re.fullmatch(r"\w[\w.-]*", name):
            raise SystemExit(f"--run {name!r}: a run's name is one word of letters, digits, dots and dashes")
        folder = runs / name
        if not (folder / "config.json").exists():
            return _new_run(folder), "a new run of that name"
        if changed := differences(folder):
            raise SystemExit(f"{folder} was made with other constants: {'; '.join(changed)}. "
                             "Restore them, or start another run with --run OTHER_NAME")  # fmt: skip
        if (step := last_step(folder)) >= config.STEPS:
            raise SystemExit(f"{folder} is finished: step {step} of {config.STEPS}. "
                             "Raise STEPS to go on, or start another run with --run OTHER_NAME")  # fmt: skip
        return folder, f"it exists, with equal constants, at step {step} of {config.STEPS}"
    numbered = sorted(runs.glob(f"{kind}-[0-9][0-9][0-9][0-9]"), reverse=True)
    for folder in numbered:
        if not (folder / "config.json").exists() or differences(folder):
            continue
        if (step := last_step(folder)) < config.STEPS:  # reads and hashes the checkpoint: once
            return folder, f"the newest unfinished run with equal constants, at step {step} of {config.STEPS}"
    number = int(numbered[0].name[-4:]) + 1 if numbered else 1
    return _new_run(runs / f"{kind}-{number:04d}"), "no unfinished run has these constants"


@contextlib.contextmanager
def claimed(folder):
    """Hold a run folder for this process; SystemExit when another is working in it. A dead process holds nothing."""
    with open(folder / ".lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SystemExit(f"{folder} is in use by another process; wait for it, or use --run OTHER_NAME") from None
        yield


def differences(folder):
    """Constants of a run folder that differ from the present ones, in words; FREE ones are not compared."""
    try:
        then = json.loads((Path(folder) / "config.json").read_text())["constants"]
    except (ValueError, KeyError) as error:
        raise SystemExit(f"{folder}/config.json cannot be read ({error}); move the folder away") from None
    now = json.loads(json.dumps(constants()))
    return [f"{name} was {then.get(name)!r}, is {now.get(name)!r}"
            for name in sorted((then.keys() | now.keys()) - FREE) if then.get(name) != now.get(name)]  # fmt: skip


def _new_run(folder):
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SystemExit(
            f"{folder} cannot be made ({error.strerror}); set RUNS_DIR to a folder you may write"
        ) from None
    described = {
        "constants": constants(),
        "versions": {package: importlib.metadata.version(package) for package in PACKAGES},
        "git_commit": _git_commit(),
    }
    write_whole(folder / "config.json", json.dumps(described, indent=1))
    return folder


def _git_commit():
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent)
    except FileNotFoundError:
        return None
    return done.stdout.strip() or None


def last_step(folder):
    """Step of the newest complete checkpoint in a run folder; 0 when there is none."""
    return next((step for step, path in _checkpoints(folder) if not damage(path)), 0)


def _checkpoints(folder):
    """(step, path) of every checkpoint folder, newest first."""
    found = []
    for path in (Path(folder) / "checkpoints").glob("step-*"):
        if match := re.fullmatch(r"step-(\d{6})", path.name):
            found.append((int(match[1]), path))
    return sorted(found, reverse=True)


def save(folder, step, policy, optimizer, progress, critic=None):
    """Commit step `step`: everything is written and synced under a temporary name, then renamed.

    progress: a JSON-able dict that comes back from `load`. The rename is the commit: before it the
    previous checkpoint is untouched. Older checkpoints beyond config.CHECKPOINTS_KEPT are then removed.
    """
    target = Path(folder) / "checkpoints" / f"step-{step:06d}"
    temporary = target.with_name(f".{target.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    policy.save_adapter(temporary)
    save_file(_optimizer_tensors(policy, optimizer), temporary / "optimizer.safetensors")
    if critic:
        save_file({name: p.detach().contiguous() for name, p in critic.parameters.items()},
                  temporary / "critic.safetensors")  # fmt: skip
        save_file(_optimizer_tensors(critic, critic.optimizer), temporary / "critic_optimizer.safetensors")
    files = {path.name: _fingerprint(path) for path in sorted(temporary.iterdir()) if path.is_file()}
    (temporary / MANIFEST).write_text(json.dumps({"step": step, "files": files, "progress": progress}, indent=1))
    for path in [*temporary.iterdir(), temporary]:
        sync(path)
    shutil.rmtree(target, ignore_errors=True)  # an incomplete leftover of the same step
    temporary.rename(target)
    sync(target.parent)
    _remove_old(folder)


def load(folder, policy, optimizer, critic=None):
    """Restore the newest complete checkpoint into policy, optimizer and, where there is one, critic.

    Returns (step, progress, skipped): step 0 when there is none; skipped names every newer checkpoint
    that is incomplete or damaged, and how.
    """
    skipped = []
    for step, path in _checkpoints(folder):
        if what := damage(path):
            skipped.append(f"{path.name}: {what}")
            continue
        load_adapter(path, policy)
        _restore_optimizer(policy, optimizer, load_file(path / "optimizer.safetensors"))
        if critic:
            saved = load_file(path / "critic.safetensors")
            with torch.no_grad():
                for name, parameter in critic.parameters.items():
                    parameter.copy_(saved[name])
            _restore_optimizer(critic, critic.optimizer, load_file(path / "critic_optimizer.safetensors"))
        return step, json.loads((path / MANIFEST).read_text())["progress"], skipped
    return 0, {}, skipped


def load_adapter(path, policy):
    """Give the policy the adapter of a checkpoint folder; SystemExit when it is not of this model."""
    result = set_peft_model_state_dict(policy.model, load_file(path / "adapter_model.safetensors"))
    if result.unexpected_keys:
        raise SystemExit(f"{path}: adapter keys that the model lacks, the first is {result.unexpected_keys[0]}")


def _optimizer_tensors(policy, optimizer):
    tensors = {}
    for name, parameter in policy.parameters.items():
        for moment in MOMENTS:
            if moment in optimizer.state[parameter]:
                tensors[f"{name}.{moment}"] = optimizer.state[parameter][moment]
    return tensors


def _restore_optimizer(policy, optimizer, tensors):
    for name, parameter in policy.parameters.items():
        state = {moment: tensors[f"{name}.{moment}"] for moment in MOMENTS if f"{name}.{moment}" in tensors}
        optimizer.state[parameter] = {
            moment: tensor.to(parameter.device) if moment != "step" else tensor for moment, tensor in state.items()
        }


def _fingerprint(path):
    with open(path, "rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def damage(path):
    """What is wrong with a checkpoint folder, in words; None when it is complete."""
    try:
        files = json.loads((path / MANIFEST).read_text())["files"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"no readable manifest ({type(error).__name__})"
    for name, expected in files.items():
        if not (path / name).exists():
            return f"{name} is missing"
        if _fingerprint(path / name) != expected:
            return f"{name} differs from its hash"
    return None


def sync(path):
    """Wait until the disk has a file, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_old(folder):
    for step, path in _checkpoints(folder)[config.CHECKPOINTS_KEPT :]:
        if step % config.CHECKPOINT_FOREVER_EVERY:
            shutil.rmtree(path)


def make_optimizer(owner, rate=None):
    """AdamW over the parameters of a Policy or a Critic, in their fixed order; rate None: config.LEARNING_RATE."""
    return torch.optim.AdamW(
        owner.parameters.values(), lr=rate or config.LEARNING_RATE, weight_decay=config.WEIGHT_DECAY, foreach=False
    )
