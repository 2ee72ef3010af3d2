"""Token ids in, sampled token ids and log-probabilities out: the in-process engine.

`InProcessSampler` decodes many requests side by side on the trainer's own model. A request owns one
slot (one row) of a batch whose shape never changes: all arithmetic on a row has the same shapes
whoever else is being sampled, so a result depends on its own prompt, seed, slot and weights only.
"""

import asyncio
import contextlib
from dataclasses import dataclass, field

import numpy as np
import torch
from transformers import AttentionInterface

import config

TOOL_STOP = "</call_tool>"
PREFILL = 64  # context tokens a slot takes in per pass; part of the fixed shapes


class SamplerError(RuntimeError):
    """The sampler, not the policy, failed; `kind` is one word for the counters."""

    def __init__(self, kind, message):
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True)
class Completion:
    """What one generation call returned.

    token_ids and logprobs (nats, after temperature) have equal length and keep a token in whole when the
    stop string ends inside it; text is decoded and cut after the stop string. finish_reason: stop | length;
    stop_reason: "</call_tool>" when a tool call ended it, None at an end-of-turn token or a full budget.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str
    finish_reason: str
    stop_reason: str | None


def check_completion(completion):
    """SamplerError when a reply cannot be trained on: lengths differ, or a log-prob is missing or not finite."""
    if not completion.token_ids:
        raise SamplerError("empty_reply", "the sampler returned no token")
    if len(completion.token_ids) != len(completion.logprobs):
        raise SamplerError(
            "lengths", f"{len(completion.token_ids)} ids but {len(completion.logprobs)} log-probs in one reply"
        )
    # servers send null, or a sentinel such as -9999, for values JSON cannot carry
    odd = [value for value in completion.logprobs if value is None or not -1000 < value <= 0]
    if odd:
        raise SamplerError("logprobs", f"{len(odd)} log-probs that are none, the first {odd[0]}")


@dataclass
class _Request:
    pending: list[int]  # context not yet in the slot's cache
    context: list[int]
    max_tokens: int
    temperature: float
    draws: np.ndarray
    future: asyncio.Future
    sampled: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


class _SlotCache:
    """Keys and values of all slots; what transformers' attention layers call a cache (they only call `update`).

    Position p of slot s lies at row s, column p. The last PREFILL columns are scratch: padding, and rows
    that sit a pass out, write there, and no mask shows it to anyone else.
    """

    def __init__(self, model_config, device, dtype):
        heads = model_config.num_key_value_heads
        size = getattr(model_config, "head_dim", None) or model_config.hidden_size // model_config.num_attention_heads
        shape = (config.SLOTS, heads, config.SLOT_TOKENS + PREFILL, size)
        layers = model_config.num_hidden_layers
        self.keys = [torch.zeros(shape, device=device, dtype=dtype) for _ in range(layers)]
        self.values = [torch.zeros(shape, device=device, dtype=dtype) for _ in range(layers)]
        self.slots = slice(0)  # the rows this pass works on
        self.columns = None  # (rows, width): where it writes

    def update(self, keys, values, layer):
        """Write keys and values (rows, heads, width, size) at `columns`; return all columns of these rows."""
        kept = self.keys[layer][self.slots], self.values[layer][self.slots]  # views
        rows = torch.arange(len(keys), device=keys.device)[:, None]
        for view, new in zip(kept, (keys, values), strict=True):
            view[rows, :, self.columns] = new.transpose(1, 2)
        return kept

    def get_seq_length(self, layer=0):
        return 0


def slot_attention(module, query, key, value, attention_mask, scaling=None, **_):
    """Grouped-query attention over the slots' caches as they lie, without copying keys and values per head.

    query: (S, heads, width, size); key, value: (S, kv_heads, columns, size); attention_mask: (S, 1, width,
    columns) bool. Returns ((S, width, heads, size), None), as transformers expects of an attention function.
    """
    slots, heads, width, size = query.shape
    kv_heads = key.shape[1]
    grouped = (query * scaling).reshape(slots, kv_heads, -1, size)  # heads of one key head lie side by side
    scores = (grouped @ key.transpose(2, 3)).view(slots, heads, width, -1)
    weights = scores.masked_fill_(~attention_mask, -torch.inf).softmax(dim=-1)
    out = weights.view(slots, kv_heads, -1, key.shape[2]) @ value
    return out.view(slots, heads, width, size).transpose(1, 2), None


AttentionInterface.register("slots", slot_attention)


@contextlib.contextmanager
def _attention(model_config, name):
    """The model's attention function, exchanged for the duration: the trainer keeps its own."""
    before = model_config._attn_implementation
    model_config._attn_implementation = name
    try:
        yield
    finally:
        model_config._attn_implementation = before


class InProcessSampler:
    """Continuous batching over the fixed slots of the policy's own model, on the caller's event loop."""

    def __init__(self, policy):
        self.policy = policy
        model_config = policy.model.config
        if "linear_attention" in (getattr(model_config, "layer_types", None) or ()):
            raise SystemExit(
                "SAMPLER = 'in_process' needs a model with attention layers only; "
                f"{config.MODEL} has recurrent ones: use the vLLM sampler"
            )
        self.cache = _SlotCache(model_config, policy.device, getattr(torch, config.DTYPE))
        self.cached = [[] for _ in range(config.SLOTS)]  # ids whose keys and values each slot holds
        self.locks = [asyncio.Lock() for _ in range(config.SLOTS)]
        self.active = {}  # slot -> _Request
        self.engine = None

    async def publish(self, version):
        """Serve the present weights as policy `version`: everything cached under older ones is dropped."""
        if self.active:
            raise RuntimeError("weights were changed while requests were being sampled")
        self.policy.version = version
        self.cached = [[] for _ in range(config.SLOTS)]

    async def sample(self, prompt_ids, *, max_tokens, temperature, seed, slot):
        """Sample one continuation of prompt_ids (list of int), up to max_tokens new tokens.

        temperature: 0 decodes greedily. slot: the row to use, any integer; taken modulo SLOTS.
        Raises SamplerError("too_long") when not even one token fits the slot.
        """
        room = config.SLOT_TOKENS - len(prompt_ids)
        if room < 1:
            raise SamplerError("too_long", f"prompt of {len(prompt_ids)} tokens, SLOT_TOKENS = {config.SLOT_TOKENS}")
        slot %= config.SLOTS
        async with self.locks[slot]:
            cached = self.cached[slot]
            if cached != list(prompt_ids[: len(cached)]) or len(cached) == len(prompt_ids):
                cached.clear()
            request = _Request(
                pending=list(prompt_ids[len(cached) :]),
                context=list(prompt_ids),
                max_tokens=min(max_tokens, room),
                temperature=temperature,
                draws=np.random.Generator(np.random.Philox(seed)).random(min(max_tokens, room)),
                future=asyncio.get_running_loop().create_future(),
            )
            self.active[slot] = request
            if self.engine is None or self.engine.done():
                self.engine = asyncio.create_task(self._run())
            try:
                return await request.future
            finally:
                self.active.pop(slot, None)

    async def _run(self):
        """Decode while anyone waits. Between passes every other coroutine (tools, judge) gets its turn."""
        try:
            while self.active:
                self._pass()
                await asyncio.sleep(0)
        except Exception as error:  # handed to every waiting caller, who records it
            for request in self.active.values():
                if not request.future.done():
                    request.future.set_exception(SamplerError("engine", f"{type(error).__name__}: {error}"))

    @torch.inference_mode()
    def _pass(self):
        """Take in waiting context, slot by slot at the shape (1, PREFILL); then decode one token at (SLOTS, 1)."""
        waiting = {slot: request for slot, request in self.active.items() if not request.future.done()}
        decoding = {slot: request.sampled[-1:] for slot, request in waiting.items() if not request.pending}
        for slot, request in waiting.items():
            while request.pending:
                new, request.pending = request.pending[:PREFILL], request.pending[PREFILL:]
                hidden = self._forward({slot: new}, slice(slot, slot + 1), PREFILL)
            if slot not in decoding:
                self._sample([slot], hidden)
        if decoding:
            self._sample(list(decoding), self._forward(decoding, slice(config.SLOTS), 1)[list(decoding)])

    def _forward(self, inputs, slots, width):
        """Feed `inputs` {slot: ids} through the model in a batch of the rows `slots` (a slice), `width` ids each.

        Returns each row's hidden state at its last id, (rows, H).
        """
        device, rows = self.policy.device, range(*slots.indices(config.SLOTS))
        ids = torch.zeros(len(rows), width, dtype=torch.long)
        columns = torch.arange(config.SLOT_TOKENS, config.SLOT_TOKENS + width).repeat(len(rows), 1)
        last = torch.zeros(len(rows), dtype=torch.long)
        for slot, new in inputs.items():
            row, start = slot - rows.start, len(self.cached[slot])
            ids[row, : len(new)] = torch.tensor(new)
            columns[row, : len(new)] = torch.arange(start, start + len(new))
            last[row] = len(new) - 1
            self.cached[slot].extend(new)
        every = torch.arange(config.SLOT_TOKENS + PREFILL)
        visible = every <= columns[:, :, None]
        # padding and idle rows see their own scratch column alone: softmax needs something to sum
        visible = torch.where((columns >= config.SLOT_TOKENS)[:, :, None], every == columns[:, :, None], visible)
        self.cache.slots, self.cache.columns = slots, columns.to(device)
        self.policy.model.eval()
        base = self.policy.model.get_base_model()
        with _attention(base.config, "slots"):
            hidden = base.model(
                input_ids=ids.to(device),
                position_ids=columns.clamp(max=config.SLOT_TOKENS - 1).to(device),
                attention_mask=visible[:, None].to(device),
                past_key_values=self.cache,
                use_cache=True,
            ).last_hidden_state
        return hidden[torch.arange(len(rows)), last]

    def _sample(self, slots, hidden):
        """Draw the next token of every slot in the list from its hidden state, (len(slots), H)."""
        head = self.policy.model.get_base_model().lm_head
        # one row at a time through the head: the arithmetic must not depend on how many are ready
        logits = torch.cat([head(state[None]) for state in hidden]).float()
        for slot, token, logprob in zip(slots, *self._choose(logits, slots), strict=True):
            self._accept(slot, token, logprob)

    def _choose(self, logits, slots):
        """Inverse-CDF sampling, one counter-based uniform draw per token: (ids, log-probs) of the slots' rows."""
        requests = [self.active[slot] for slot in slots]
        temperatures = torch.tensor([[request.temperature] for request in requests], device=logits.device)
        draws = torch.tensor([[r.draws[len(r.sampled)]] for r in requests], dtype=torch.float64, device=logits.device)
        greedy = temperatures == 0
        logprobs = (logits / torch.where(greedy, 1.0, temperatures)).log_softmax(dim=1)
        cumulative = logprobs.double().exp().cumsum(dim=1)
        # scaled by the total, so that rounding cannot put a draw beyond the last token
        drawn = torch.searchsorted(cumulative, draws * cumulative[:, -1:], right=True).clamp(max=logits.shape[1] - 1)
        ids = torch.where(greedy, logits.argmax(dim=1, keepdim=True), drawn)
        return ids.squeeze(1).tolist(), logprobs.gather(1, ids).squeeze(1).tolist()

    def _accept(self, slot, token, logprob):
        request = self.active[slot]
        request.sampled.append(token)
        request.logprobs.append(logprob)
        # every token is at least one character of the stop string, so its last tokens hold all of it
        tail = self.policy.tokenizer.decode(request.sampled[-len(TOOL_STOP) :], skip_special_tokens=False)
        if TOOL_STOP in tail:
            self._finish(request, "stop", TOOL_STOP)
        elif token in self.policy.end_ids:
            self._finish(request, "stop", None)
        elif len(request.sampled) >= request.max_tokens:
            self._finish(request, "length", None)

    def _finish(self, request, finish_reason, stop_reason):
        text = self.policy.tokenizer.decode(request.sampled, skip_special_tokens=False)
        if stop_reason:
            text = text[: text.index(stop_reason) + len(stop_reason)]
        request.future.set_result(
            Completion(tuple(request.sampled), tuple(request.logprobs), text, finish_reason, stop_reason)
        )
