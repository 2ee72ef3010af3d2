"""The adapter's way into the server, and the proof that it arrived.

vLLM answers 200 to an adapter whose keys match none of its modules, and ignores it; and it keeps keys and values
computed with older weights for as long as an adapter's name and path stay. So every policy version has a name
and a path of its own, keys are renamed for the served class, and the server's log-probabilities are compared with
the trainer's: at the start for each kind of layer alone (`probe`), then for every version (`prove`).
"""

import contextlib
import shutil
from dataclasses import dataclass

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

import config
import protocol
from checkpoint import sync
from policy import coverage, linear_names
from records import seed_from
from sampler import check_completion
from server import ServerError

TENSORS = "adapter_model.safetensors"
PEFT_BLOCKS = "base_model.model.model.layers."  # what PEFT puts before the block number of a causal language model
# classes vLLM serves in a wrapper around the language model; the others take PEFT's keys as they are
BLOCKS = {"Qwen3_5ForConditionalGeneration": "base_model.model.model.language_model.layers."}
PROOF_CONTEXT = 2048  # tokens of the fixed prompt: blocks of the prefix cache are 16 long, in hybrids up to 1,056
PROOF_TOKENS = 32  # sampled per completion
PROOF_SAMPLES = 3  # one after the other: the first fills the prefix cache, the third finds it even in hybrids
PROBE_MOVE = 0.5  # nats per token by which a probe adapter moves the trainer; well above ADAPTER_TOLERANCE
PROBE_SCALES = tuple(0.01 * 2**i for i in range(11))  # of the random lora_B: the first that moves so far, else the last


class AdapterError(ServerError):
    """The server does not serve the trainer's policy; the message is one line with the remedy."""


@dataclass(frozen=True)
class ServedModel:
    """What the server makes of config.MODEL: its class, and the linear layers an adapter may have."""

    architecture: str
    targets: tuple[str, ...]

    @property
    def multimodal(self):
        return self.architecture.endswith("ForConditionalGeneration")


def served_model():
    """The ServedModel of config.MODEL, from its configuration alone: no weights are loaded."""
    try:
        model_config = AutoConfig.from_pretrained(config.MODEL)
    except (OSError, ValueError) as error:
        raise AdapterError(
            f"config.MODEL = {config.MODEL!r}: no configuration could be loaded ({str(error).splitlines()[0][:200]}); "
            "check the name, the network, or give a local folder"
        ) from None
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(model_config)
    return ServedModel((model_config.architectures or ["unknown"])[0], tuple(sorted(linear_names(skeleton))))


def served_key(key, architecture):
    """A key of PEFT's adapter file as the served class knows it; AdapterError when it is no key of a block."""
    if not key.startswith(PEFT_BLOCKS):
        raise AdapterError(f"adapter key {key}: only layers of the blocks ({PEFT_BLOCKS}N...) can be served")
    return BLOCKS.get(architecture, PEFT_BLOCKS) + key.removeprefix(PEFT_BLOCKS)


def name_of(version):
    """The adapter's name on the server, one per policy version."""
    return f"policy-{version:06d}"


def write(policy, target, architecture):
    """Save the policy's adapter for the server in the folder `target`, which appears complete or not at all."""
    temporary = target.with_name(f".{target.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    policy.save_adapter(temporary)
    tensors = load_file(temporary / TENSORS)
    trained = {name.replace(".default.", ".") for name in policy.parameters}  # PEFT's name of the only adapter
    if different := tensors.keys() ^ trained:
        raise AdapterError(f"{len(different)} tensors are trained but not saved, or the reverse, the first is "
                           f"{min(different)}; only LoRA pairs can be served: no modules_to_save")  # fmt: skip
    save_file({served_key(key, architecture): tensor for key, tensor in tensors.items()}, temporary / TENSORS)
    for path in [*temporary.iterdir(), temporary]:
        sync(path)
    shutil.rmtree(target, ignore_errors=True)
    temporary.rename(target)
    return target.resolve()


async def load(sampler, name, path):
    """Load the adapter at `path` under `name`; AdapterError unless the server then lists both."""
    if name in await _listed(sampler):  # of an earlier run, in a server that is not ours
        await unload(sampler, name)
    reply = await sampler.request("POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(path)})
    if not reply.is_success:
        raise AdapterError(f"the server refused the adapter {name} ({reply.status_code}: {message_of(reply)}). "
                           + _remedy(reply))  # fmt: skip
    root = (await _listed(sampler)).get(name)
    if root != str(path):
        raise AdapterError(f"the server accepted the adapter {name}, but lists it with path {root} instead of {path}; "
                           "restart the server")  # fmt: skip


def _remedy(reply):
    message = message_of(reply)
    if "max_lora_rank" in message:
        return f"Start the server with --max-lora-rank {config.LORA_RANK} or more, or lower LORA_RANK"
    if "No adapter found" in message:
        return "The server must see the run folder under the same path"
    if reply.status_code == 404:
        return "Start the server with VLLM_ALLOW_RUNTIME_LORA_UPDATING=True and --enable-lora"
    return "See the server's log"


async def unload(sampler, name):
    """Forget an adapter on the server; one it does not know is no fault."""
    await sampler.request("POST", "/v1/unload_lora_adapter", {"lora_name": name})


async def _listed(sampler):
    """{name: path} of all models the server lists."""
    reply = await sampler.request("GET", "/v1/models")
    if not reply.is_success:
        raise AdapterError(f"the server does not list its models ({reply.status_code}: {message_of(reply)}); "
                           "see the server's log")  # fmt: skip
    return {model["id"]: model.get("root") for model in reply.json()["data"]}


def message_of(reply):
    """The message of an error reply, one line of 300 characters at most."""
    try:
        message = reply.json()["error"]["message"]
    except (ValueError, LookupError, TypeError):
        message = reply.text
    return " ".join(str(message).split())[:300]


@dataclass
class Row:
    """A completion as Policy.logprobs takes it."""

    ids: list[int]
    positions: list[int]
    temperature: float


def proof_prompt(policy):
    """The ids of the fixed prompt, half the server's context at most."""
    length, ids, number = min(PROOF_CONTEXT, config.SERVER_CONTEXT // 2), [], 0
    while len(ids) < length:
        number += 1
        ids += policy.tokenizer.encode(f"{number}. {protocol.system_prompt()}\n", add_special_tokens=False)
    return ids[:length]


async def _sampled(sampler, model):
    """Completions of the fixed prompt by a model of the server: (rows, its own log-probs (N,))."""
    prompt, rows, logprobs = proof_prompt(sampler.policy), [], []
    for seed in range(PROOF_SAMPLES):
        completion = await sampler.complete(
            model, prompt, max_tokens=PROOF_TOKENS, temperature=config.TEMPERATURE, seed=seed
        )
        check_completion(completion)
        ids = [*prompt, *completion.token_ids]
        rows.append(Row(ids, list(range(len(prompt), len(ids))), config.TEMPERATURE or 1.0))  # greedy: as at 1
        logprobs += completion.logprobs
    return rows, torch.tensor(logprobs)


@torch.no_grad()
def _trainers(policy, rows, adapter=True):
    """The trainer's log-probs of the rows' sampled tokens (N,), with or without its adapter."""
    policy.model.eval()
    with contextlib.nullcontext() if adapter else policy.model.disable_adapter():
        return policy.logprobs(rows).cpu()


def _apart(first, second):
    """Mean |difference| in nats per token: one outlier of low-precision arithmetic decides nothing."""
    return float((first - second).abs().mean())


async def prove(sampler, name):
    """AdapterError unless the server's adapter `name` gives the fixed prompt the log-probs of the trainer's policy.

    One step may move them by less than bfloat16 resolves: name and path, which `load` has checked, tell versions
    apart then; this catches whatever is further off. Returns the mean |difference| in nats.
    """
    rows, served = await _sampled(sampler, name)
    apart = _apart(served, _trainers(sampler.policy, rows))
    if not apart <= config.ADAPTER_TOLERANCE[config.DTYPE]:
        raise AdapterError(f"{name}: the server's log-probs are {apart:.3g} nats per token off the trainer's: it has "
                           "another version, or keys and values cached under one; restart the server")  # fmt: skip
    return apart


async def probe(sampler):
    """Show for the base model, then for each kind of layer alone, that server and trainer agree. Raises AdapterError.

    Returns {kind of layer, or "base": mean |difference| in nats}. The policy's weights are the same afterwards.
    """
    policy = sampler.policy
    rows, served = await _sampled(sampler, sampler.server.base)
    own = _trainers(policy, rows, adapter=False)
    apart = {"base": _apart(served, own)}
    if not apart["base"] <= config.ADAPTER_TOLERANCE[config.DTYPE]:
        raise AdapterError(f"the server's base model is {apart['base']:.3g} nats per token off the trainer's: "
                           "other weights or dtype, or started without --logprobs-mode processed_logprobs")  # fmt: skip
    for kind in sorted(coverage(policy.model)):
        with _only(policy, kind) as spread:
            for scale in PROBE_SCALES:
                spread(scale)
                if _apart(_trainers(policy, rows), own) >= PROBE_MOVE:
                    break
            apart[kind] = await _probe_kind(sampler, kind)
    return apart


async def _probe_kind(sampler, kind):
    """Publish the policy as it is (a probe) and compare; mean |difference| in nats, or AdapterError."""
    name = f"probe-{kind}"
    path = write(sampler.policy, sampler.folder / name, sampler.server.served.architecture)
    await load(sampler, name, path)
    rows, served = await _sampled(sampler, name)
    own, base = _trainers(sampler.policy, rows), _trainers(sampler.policy, rows, adapter=False)
    apart, from_base, moved = _apart(served, own), _apart(served, base), _apart(own, base)
    # a layer with little influence moves less than planned: then agreement must be the closer
    if not apart <= min(config.ADAPTER_TOLERANCE[config.DTYPE], moved / 3):
        how = "ignores it" if from_base < apart else "serves something else"
        raise AdapterError(
            f"the server accepted an adapter on {kind} and {how}: its log-probs are {apart:.3g} nats per token off the "
            f"trainer's and {from_base:.3g} off the base model's, which are {moved:.3g} apart. Restart the server; if "
            f"that changes nothing, BLOCKS in adapters.py must say what {sampler.server.served.architecture} calls "
            "its blocks"
        )
    await unload(sampler, name)
    shutil.rmtree(path)
    return apart


@contextlib.contextmanager
def _only(policy, kind):
    """For the duration, every lora_B is 0 but for layers of `kind`; yields spread(scale), which makes those random."""
    weights = {name: p for name, p in policy.parameters.items() if ".lora_B." in name}
    saved = {name: p.detach().clone() for name, p in weights.items()}

    @torch.no_grad()
    def spread(scale):
        generator = torch.Generator().manual_seed(seed_from(config.SEED, "probe", kind))
        for name, parameter in weights.items():
            parameter.zero_()
            if f".{kind}.lora_B." in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)

    try:
        yield spread
    finally:
        with torch.no_grad():
            for name, parameter in weights.items():
                parameter.copy_(saved[name])
