"""The critic of MT-PPO: a value per sampled token, from a second adapter on the frozen base and a scalar head."""

import contextlib
import copy

import torch
from torch import nn

import config
from checkpoint import make_optimizer
from credit import gae
from policy import CRITIC
from records import seed_from
from update import micro_batches


class Critic:
    """Values of one Policy's sampled tokens. It shares the base model; adapter, head and optimizer are its own.

    The value before a token is read off the hidden state that predicts it. The head starts at zero, so the first
    advantages are plain sums of rewards.
    """

    def __init__(self, policy):
        self.policy = policy
        base = policy.model.get_base_model()
        torch.manual_seed(seed_from(config.SEED, CRITIC) % 2**32)  # PEFT draws lora_A from the global generator
        policy.model.add_adapter(CRITIC, copy.deepcopy(policy.model.peft_config["default"]))
        self.head = nn.Linear(base.config.get_text_config().hidden_size, 1).to(policy.device)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self._train_all()
        self.optimizer = make_optimizer(self, config.CRITIC_LEARNING_RATE)

    @property
    def parameters(self):
        """Its trainable parameters by name, in a fixed order."""
        adapter = {name: p for name, p in self.policy.model.named_parameters() if f".{CRITIC}." in name}
        return {**adapter, "head.weight": self.head.weight, "head.bias": self.head.bias}

    @contextlib.contextmanager
    def _active(self):
        """The critic's adapter instead of the policy's. A backward pass belongs inside: checkpointing recomputes."""
        adapters = self.policy.model.base_model
        adapters.set_adapter(CRITIC)
        try:
            self._train_all()
            yield
        finally:
            adapters.set_adapter("default")
            self._train_all()

    def _train_all(self):
        """PEFT freezes an adapter that is not active; both are always trainable here, each by its own optimizer."""
        for name, parameter in self.policy.model.named_parameters():
            if "lora_" in name:
                parameter.requires_grad_(True)

    def _values(self, rows):
        hidden, _ = self.policy.hidden_states(rows)
        return self.head(hidden.float()).squeeze(1)

    def appraise(self, batch):
        """Give each row its `values`, `returns` and `advantages`, all (P,) float32.

        Advantages are GAE's with config.GAMMA and config.LAMBDA over the row's `rewards`, then standardised over the
        step's sampled tokens, as verl does; returns are the values plus the advantages before that.
        """
        with self._active(), torch.no_grad():
            for rows in micro_batches(batch.rows):
                for row, values in zip(rows, self._values(rows).cpu().split(_lengths(rows)), strict=True):
                    row.values = values
        if not batch.rows:
            return
        raw = [gae(row.rewards, row.values, config.GAMMA, config.LAMBDA) for row in batch.rows]
        every = torch.cat(raw)
        spread = every.std() if len(every) > 1 else torch.zeros(())
        for row, advantages in zip(batch.rows, raw, strict=True):
            row.returns = (advantages + row.values).float()
            row.advantages = ((advantages - every.mean()) / (spread + config.ADVANTAGE_EPS)).float()

    def fit(self, batch):
        """As many updates towards the rows' returns as the policy gets; returns critic/* metrics.

        Loss per token: half the larger of the squared errors of the value and of the value clipped to
        config.CRITIC_CLIP around the old one; the mean over the step's tokens. Source: PPO; verl's value loss.
        """
        if not batch.rows:
            return {}
        with self._active():
            for _ in range(config.UPDATES_PER_STEP):
                self.optimizer.zero_grad(set_to_none=True)
                total = sum(self._backward(rows, batch.tokens) for rows in micro_batches(batch.rows))
                norm = torch.nn.utils.clip_grad_norm_(self.parameters.values(), config.GRADIENT_CLIP)
                if torch.isfinite(norm):
                    self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        returns = torch.cat([row.returns for row in batch.rows])
        errors = returns - torch.cat([row.values for row in batch.rows])
        variance, unexplained = float(returns.var(correction=0)), float(errors.var(correction=0))
        return {"critic/loss": total, "critic/gradient_norm": float(norm), "critic/return": float(returns.mean()),
                "critic/explained_variance": 1 - unexplained / variance if variance else 0.0}  # fmt: skip

    def _backward(self, rows, tokens):
        values = self._values(rows)
        old, returns = (torch.cat([getattr(row, name) for row in rows]).to(values.device)
                        for name in ("values", "returns"))  # fmt: skip
        loss = value_loss(values, old, returns, config.CRITIC_CLIP).sum() / tokens
        loss.backward()
        return float(loss.detach())


def value_loss(values, old, returns, clip):
    """Per-token clipped value loss, (N,): half of max((v - R)^2, (clip(v, old +- clip) - R)^2)."""
    clipped = old + (values - old).clamp(-clip, clip)
    return 0.5 * torch.maximum((values - returns).square(), (clipped - returns).square())


def _lengths(rows):
    return [len(row.positions) for row in rows]
