"""`python train.py --check`: everything a run will lean on, tried once, one line each with its remedy."""

import asyncio
import functools
import importlib.metadata
import os
import re
import shutil
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import adapters
import asks
import config
import preflight
import protocol
import verdicts
import web
from judge import BACKENDS
from judges import REFUSALS
from policy import linear_names
from records import Rubric
from rollout import most_trajectories
from tools import Tools
from wire import AccountError, CallFailure

HERE = Path(__file__).parent
KEYS = {  # back end -> the environment variables it reads, the first that is set
    "deepseek": ("DEEPSEEK_API_KEY",),
    "serper": ("SERPER_API_KEY",),
    "jina": ("JINA_API_KEY",),
    "jev": ("TYPESAFE_API_KEY",),
}
TRITON_WRONG = ((3, 4, 0), (3, 7, 1))  # from the first up to the second: wrong gated-delta-net gradients on Hopper
ACTIVATION_BYTES = 2 * 34  # per token, hidden unit and block, with activations recomputed: a coarse upper estimate
FREE_DISK = 20e9  # bytes: checkpoints, adapters, journals and the compiled kernels of one run


class Problem(Exception):
    """A check failed; the message says what is wrong and how to mend it."""


def run():
    """Print one line a check; returns the number of problems."""
    problems = 0
    for name, check in CHECKS.items():
        try:
            print(f"ok       {name}: {check()}")
        except Problem as problem:
            problems += 1
            print(f"PROBLEM  {name}: {problem}")
    print("ready" if not problems else f"{problems} problem(s): mend them before any GPU hour is spent")
    return problems


def constants():
    """Every constant makes sense."""
    if problems := preflight.config_problems():
        raise Problem("; ".join(problems))
    each = most_trajectories()
    return f"config.py makes sense; {config.QUESTIONS_PER_STEP} x {each} trajectories, {config.STEPS} steps"


def versions():
    """What is installed is what requirements.txt pins."""
    wanted = re.findall(r"^([\w.-]+)(?:\[\w+\])?==([\w.]+)", (HERE / "requirements.txt").read_text(), re.MULTILINE)
    found = {package: _version(package) or "missing" for package, _ in wanted}
    other = [f"{package} is {found[package]}, not {version}" for package, version in wanted
             if found[package].partition("+")[0] != version]  # fmt: skip
    if other:
        raise Problem("; ".join(other) + ". Run: pip install -r requirements.txt")
    return f"{len(wanted)} packages as pinned"


def device():
    """A CUDA device, and kernels that are right on it."""
    if not torch.cuda.is_available():
        raise Problem(preflight.no_cuda())
    name, capability = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    if fault := triton_fault(_version("triton"), capability, _has_delta_nets()):
        raise Problem(fault)
    return f"{name}, compute capability {capability[0]}.{capability[1]}, torch {torch.__version__}"


def triton_fault(triton, capability, delta_nets):
    """Why this Triton cannot train this model on this card, or None. triton: "3.7.1" or None; capability: (9, 0)."""
    if triton is None or not delta_nets or capability[0] != 9:
        return None
    numbers = tuple(int(part) for part in re.findall(r"\d+", triton)[:3])
    if TRITON_WRONG[0] <= numbers < TRITON_WRONG[1]:
        return (
            f"Triton {triton} computes wrong gradients for gated delta nets on Hopper. Run: pip install triton==3.7.1"
        )
    return None


def _version(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.cache
def _read_config(model):
    """(configuration, None) or (None, the error's first line): asked for once, as a hub out of reach takes a minute."""
    try:
        return AutoConfig.from_pretrained(model), None
    except (OSError, ValueError) as error:
        return None, str(error).strip().splitlines()[0][:160]


def _model_config():
    found, fault = _read_config(config.MODEL)
    if fault:
        raise Problem(f"config.MODEL = {config.MODEL!r} cannot be read ({fault}). Check the name and the network, "
                      "or give a local folder")  # fmt: skip
    return found


def _has_delta_nets():
    text = _model_config().get_text_config()
    return "linear_attention" in (getattr(text, "layer_types", None) or ())


def _skeleton():
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(_model_config())


def coverage():
    """Which linears the adapter will cover, and what the server will call them."""
    served = adapters.ServedModel((_model_config().architectures or ["unknown"])[0], tuple(linear_names(_skeleton())))
    key = f"{adapters.PEFT_BLOCKS}0.mlp.down_proj.lora_A.weight"
    kernels = "" if not _has_delta_nets() or _version("flash-linear-attention") else (
        "; without flash-linear-attention its gated delta nets run on a slow reference path"
    )  # fmt: skip
    return (f"rank {config.LORA_RANK} on {', '.join(sorted(served.targets))}; {served.architecture} takes {key} as "
            f"{adapters.served_key(key, served.architecture)}{kernels}")  # fmt: skip


def memory():
    """An estimate of what the trainer needs beside the server."""
    model = _skeleton()
    text = model.config.get_text_config()
    weights = sum(p.numel() for p in model.parameters()) * (2 if config.DTYPE == "bfloat16" else 4)
    linears = [m for name, m in model.named_modules() if ".layers." in name and isinstance(m, torch.nn.Linear)]
    adapter = sum(config.LORA_RANK * (m.in_features + m.out_features) for m in linears) * 16  # weight, gradient, Adam
    tokens = max(config.MICRO_BATCH_TOKENS, config.MAX_PROMPT_TOKENS + config.RESPONSE_TOKENS)
    activations = tokens * text.hidden_size * (ACTIVATION_BYTES + 2 * text.num_hidden_layers)
    logits = 3 * 4 * config.LOGPROB_CHUNK
    need = weights + adapter + activations + logits
    said = (f"trainer about {need / 1e9:.1f} GB (weights {weights / 1e9:.1f}, adapter and Adam {adapter / 1e9:.1f}, "
            f"activations of {tokens:,} tokens {activations / 1e9:.1f}, logits {logits / 1e9:.1f})")  # fmt: skip
    if torch.cuda.is_available():
        free = torch.cuda.get_device_properties(0).total_memory * (1 - config.SERVER_MEMORY_FRACTION)
        if need > free:
            raise Problem(f"{said}, but the server leaves {free / 1e9:.1f} GB. Lower SERVER_MEMORY_FRACTION or "
                          "MICRO_BATCH_TOKENS")  # fmt: skip
        said += f" of the {free / 1e9:.1f} GB that the server leaves"
    return said


def disk():
    """Room for one run."""
    folder = Path(config.RUNS_DIR)
    free = shutil.disk_usage(folder if folder.exists() else Path.cwd()).free
    if free < FREE_DISK:
        raise Problem(f"{free / 1e9:.1f} GB free for {config.RUNS_DIR}/, a run needs up to {FREE_DISK / 1e9:.0f}. "
                      "Make room, or set RUNS_DIR to another disk")  # fmt: skip
    return f"{free / 1e9:.0f} GB free for {config.RUNS_DIR}/"


def keys():
    """Which keys the chosen back ends have; a key itself is never printed."""
    search, reader, notes = web.resolve_backends()
    needed = [variable for backend in (search, config.JUDGE_BACKEND) for variable in KEYS.get(backend, ())]
    if missing := [variable for variable in needed if not os.environ.get(variable, "").strip()]:
        raise Problem(f"not set: {', '.join(missing)}. Export it, or choose another back end")
    return "; ".join([f"search {search}, reader {reader}, judge {config.JUDGE_BACKEND}", *notes])


def search():
    """One search and one page, through the run's own back ends."""
    return asyncio.run(_search())


async def _search():
    try:
        tools = Tools()
    except (OSError, ValueError) as error:
        raise Problem(str(error)) from None
    try:
        results = await tools._searcher.search("capital of France")
        said = f"{tools.names[0]} found {len(results)} results"
        if results:
            page = await tools._browser.browse(results[0].url)
            said += f"; {tools.names[1]} read {len(page.content):,} characters of {results[0].url}"
    except (CallFailure, AccountError) as error:
        raise Problem(f"{error}. Check the network and the key, or set SEARCH_BACKEND, BROWSE_BACKEND") from None
    finally:
        await tools.close()
    return said


def judge():
    """One comparison, where the judge is not the server that is yet to be started."""
    if config.JUDGE_BACKEND == "openai" and not config.JUDGE_URL and not os.environ.get("VLLM_URL"):
        return f"{config.MODEL} on the policy's own server, asked once that is up"
    return asyncio.run(_judge())


async def _judge():
    rubric = (Rubric("Capital", 'States that the capital is "Paris".', "Accuracy", "critical"),)
    try:
        backend = BACKENDS[config.JUDGE_BACKEND](os.environ.get("VLLM_URL", ""))
    except ValueError as error:
        raise Problem(str(error)) from None
    try:
        ask = asks.Ask("pick", "What is the capital of France?", rubric, ("It is Lyon.", "It is Paris."))
        reply = await backend.reply(ask)
        winner = verdicts.read(ask, reply)[0]
    except (CallFailure, AccountError, ValueError) as error:
        kind = "" if getattr(error, "kind", "") not in REFUSALS else " (it blames the content)"
        raise Problem(f"{error}{kind}. Check JUDGE_BACKEND, JUDGE_URL, JUDGE_MODEL and the key") from None
    finally:
        await backend.close()
    if winner != 1:
        raise Problem(f"{backend.name} prefers Lyon as the capital of France. Choose another judge")
    return f"{backend.name} answers, in {reply.input_tokens + reply.output_tokens} tokens"


def prompt():
    """The system prompt, and whether it is the authors'."""
    whose = "the authors'" if Path(config.SYSTEM_PROMPT_FILE).exists() else "ours; prepare_data.py fetches the authors'"
    return f"{len(protocol.system_prompt()):,} characters, {whose}"


CHECKS = {
    "constants": constants, "versions": versions, "device": device, "coverage": coverage, "memory": memory,
    "disk": disk, "keys": keys, "search": search, "judge": judge, "prompt": prompt,
}  # fmt: skip
