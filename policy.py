"""The policy: a frozen causal language model with a LoRA on every linear layer of every block.

Log-probabilities never pass through full logits: the body gives hidden states, `selective_logprobs`
turns those at trained positions into log-probabilities, chunk by chunk, forwards and backwards.
"""

import re
from collections import Counter

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

import config
from records import seed_from

CRITIC = "critic"  # name of the critic's adapter; the policy's is PEFT's "default"
BLOCK = re.compile(r"(?:^|\.)layers\.(\d+)\.(.+)$")


class SelectiveLogprobs(torch.autograd.Function):
    """log softmax(hidden @ weight.T / temperature) at the target, recomputed chunk by chunk in the backward pass."""

    @staticmethod
    def forward(ctx, hidden, weight, target_ids, temperature, chunk):
        logprobs = hidden.new_empty(len(hidden), dtype=_wide(hidden.dtype))
        for part in _chunks(len(hidden), chunk):
            logits = _logits(hidden[part], weight, temperature)
            chosen = logits.gather(1, target_ids[part, None]).squeeze(1)
            logprobs[part] = chosen - logits.logsumexp(dim=1)
        ctx.save_for_backward(hidden, weight, target_ids)
        ctx.temperature, ctx.chunk = temperature, chunk
        return logprobs

    @staticmethod
    def backward(ctx, grad):
        hidden, weight, target_ids = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        for part in _chunks(len(hidden), ctx.chunk):
            # d logprob / d logits = onehot(target) - softmax
            slope = -_logits(hidden[part], weight, ctx.temperature).softmax(dim=1)
            slope.scatter_add_(1, target_ids[part, None], torch.ones_like(slope[:, :1]))
            slope.mul_(grad[part, None] / ctx.temperature)
            grad_hidden[part] = slope.to(weight.dtype) @ weight
        return grad_hidden, None, None, None, None


def selective_logprobs(hidden, lm_head_weight, target_ids, temperature):
    """Log-probabilities of the target ids, without a tokens x vocabulary tensor in the graph.

    hidden: (N, H), lm_head_weight: (V, H) frozen (it gets no gradient), target_ids: (N,) int64,
    temperature: logits are divided by it, > 0. Returns (N,) nats, float32 (float64 for float64 input).
    At most config.LOGPROB_CHUNK logits exist at any moment.
    """
    if not temperature > 0:
        raise ValueError(f"temperature must be above 0 for log-probabilities, got {temperature}")
    chunk = max(1, config.LOGPROB_CHUNK // lm_head_weight.shape[0])
    return SelectiveLogprobs.apply(hidden, lm_head_weight, target_ids, temperature, chunk)


def _chunks(length, size):
    return [slice(start, start + size) for start in range(0, length, size)]


def _wide(dtype):
    return torch.float64 if dtype == torch.float64 else torch.float32


def _logits(hidden, weight, temperature):
    return (hidden @ weight.T).to(_wide(hidden.dtype)) / temperature


class Policy:
    """Tokenizer, base model and the trainable adapter.

    `version` counts published updates: 0 is the model as loaded, n the one after step n.
    """

    def __init__(self, device="cpu"):
        self.device = torch.device(device)
        self.tokenizer = load_tokenizer()
        self.model = _with_adapter(_load_base()).to(self.device)
        self.version = 0
        _assert_precision(self.model)

    @property
    def parameters(self):
        """The trainable parameters by name, in a fixed order; a critic's are not among them."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad and f".{CRITIC}." not in name}

    @property
    def end_ids(self):
        """Every id that ends a turn: the generation config's and the tokenizer's."""
        declared = self.model.generation_config.eos_token_id
        ids = set(declared if isinstance(declared, list) else [declared]) | {self.tokenizer.eos_token_id}
        return frozenset(ids - {None})

    def logprobs(self, rows):
        """Log-probabilities the present policy gives to the trained tokens of a micro-batch.

        rows: objects with `ids` (list of int) and `positions` (indices in ids of the trained tokens) and
        `temperature`, one for all. Returns (N,) float32, row after row.
        """
        hidden, targets = self.hidden_states(rows)
        head = self.model.get_base_model().lm_head
        return selective_logprobs(hidden, head.weight, targets, rows[0].temperature)

    def hidden_states(self, rows):
        """(the body's last states that predict the trained tokens (N, H), the tokens (N,)), row after row.

        Rows are padded on the right.
        """
        width = max(len(row.ids) for row in rows)
        ids = torch.zeros(len(rows), width, dtype=torch.long)
        mask = torch.zeros(len(rows), width, dtype=torch.long)
        for i, row in enumerate(rows):
            ids[i, : len(row.ids)] = torch.tensor(row.ids)
            mask[i, : len(row.ids)] = 1
        base = self.model.get_base_model()
        hidden = base.model(
            input_ids=ids.to(self.device), attention_mask=mask.to(self.device), use_cache=False
        ).last_hidden_state
        row_of = torch.cat([torch.full((len(row.positions),), i) for i, row in enumerate(rows)])
        column = torch.cat([torch.as_tensor(row.positions) for row in rows])
        targets = ids[row_of, column].to(self.device)
        # the state at column - 1 predicts the token at column
        return hidden[row_of.to(self.device), (column - 1).to(self.device)], targets

    def reference_logprobs(self, rows):
        """As `logprobs`, of the base model with its adapter off, without gradient: the reference of the KL penalty."""
        with torch.no_grad(), self.model.disable_adapter():
            return self.logprobs(rows)

    def save_adapter(self, folder):
        """Write the adapter in PEFT's layout (adapter_config.json, adapter_model.safetensors)."""
        # without the argument PEFT asks the hub for the base model's configuration at every save
        self.model.save_pretrained(str(folder), save_embedding_layers=False, selected_adapters=["default"])


def load_tokenizer():
    """The tokenizer of config.MODEL; SystemExit with the remedy when it cannot be loaded."""
    try:
        return AutoTokenizer.from_pretrained(config.MODEL)
    except (OSError, ValueError) as error:
        raise SystemExit(
            f"config.MODEL = {config.MODEL!r}: no tokenizer could be loaded ({_first_line(error)}); "
            "check the name, the network, or give a local folder"
        ) from None


def _load_base():
    transformers_logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(config.MODEL, dtype=getattr(torch, config.DTYPE))
    except (OSError, ValueError) as error:
        raise SystemExit(
            f"config.MODEL = {config.MODEL!r}: no model could be loaded ({_first_line(error)}); "
            "check the name, the network, or give a local folder"
        ) from None
    if config.GRADIENT_CHECKPOINTING:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def _first_line(error):
    return str(error).strip().splitlines()[0][:200]


def _with_adapter(base):
    torch.manual_seed(seed_from(config.SEED, "lora") % 2**32)  # PEFT draws lora_A from the global generator
    lora = LoraConfig(
        r=config.LORA_RANK,
        lora_alpha=config.LORA_ALPHA,
        lora_dropout=0.0,
        target_modules=sorted(linear_names(base)),
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(base, lora, autocast_adapter_dtype=True)
    coverage(model)
    return model


def linear_names(base):
    """Last name parts of every linear layer inside the transformer blocks, e.g. {"q_proj", "down_proj"}."""
    return {
        match[2].rsplit(".", 1)[-1]
        for name, module in base.named_modules()
        if isinstance(module, nn.Linear) and (match := BLOCK.search(name))
    }


def coverage(model):
    """How many linears of the blocks carry the adapter, e.g. {"self_attn.q_proj": 4}; ValueError if one does not."""
    covered, bare = Counter(), []
    for name, module in model.named_modules():
        match = BLOCK.search(name)
        if match and isinstance(module, nn.Linear) and "lora_" not in name:
            if name.endswith(".base_layer"):
                covered[match[2].removesuffix(".base_layer")] += 1
            else:
                bare.append(name)
    if bare:
        raise ValueError(f"{len(bare)} linear layers carry no adapter, the first is {bare[0]}")
    return dict(covered)


def _assert_precision(model):
    assert isinstance(model, PeftModel)
    for name, parameter in model.named_parameters():
        expected = torch.float32 if "lora_" in name else getattr(torch, config.DTYPE)
        assert parameter.dtype == expected, f"{name} is {parameter.dtype}, expected {expected}"
        assert parameter.requires_grad == ("lora_" in name), f"{name}: requires_grad is {parameter.requires_grad}"
