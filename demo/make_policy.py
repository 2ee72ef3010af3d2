"""Makes demo/policy/ from nothing: a tokenizer of 1,024 entries and a Qwen3 model of 0.9 million parameters.

Command line: `python demo/make_policy.py [--out DIR] [--check]` from the repository's root. The run takes
about fifteen minutes on one core; `--check` only samples the policy in DIR and prints its rates.
The policy learns from demo/expert.py's sloppy transcripts, in searches over invented worlds, rendered by
the same code as a rollout.
"""

import argparse
import asyncio
import hashlib
import json
import math
import random
import re
import sys
import tempfile
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

sys.path.append(str(Path(__file__).resolve().parent.parent))
import corpus
import expert
import settings

import config
import protocol
import reward
import tools
from policy import Policy
from records import ToolCall, question_from_row
from rollout import Rollout
from sampler import InProcessSampler

OUT_DIR = "demo/policy"
SEED = 0
THREADS = 1  # cores
VOCABULARY = 1024  # entries, special tokens and tags included
CONTEXT = 1024  # tokens the position encoding is made for
WORLDS = 12  # invented worlds the transcripts come from
TRANSCRIPTS_PER_WORLD = 600
TRANSCRIPT_TOKENS = 832  # prompt included; a longer transcript is cut
TOKENIZER_SHARE = 6  # the tokenizer is trained on every so-many-th transcript
STEPS = 600  # optimiser steps
BATCH = 16  # transcripts per step
LEARNING_RATE = 3e-3  # peak; linear warm-up, cosine to zero
WARM_UP = 30  # steps
WEIGHT_DECAY = 0.05
READING_WEIGHT = 0.3  # of the loss on text the policy only reads
CHECK_ATTEMPTS = 64  # sampled transcripts per file of questions

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TAGS = (
    *("<think>", "</think>", "<answer>", "</answer>", "</call_tool>"),
    *('<call_tool name="google_search">', '<call_tool name="browse_webpage">'),
    *("<tool_output>", "</tool_output>", "<snippet>", "</snippet>", "<webpage>", "</webpage>"),
)
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)


def make_tokenizer(texts):
    """Byte-level BPE trained on `texts`; digits stand alone, every protocol tag is one ordinary token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(SPECIAL) - len(TAGS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in TAGS])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
        model_max_length=CONTEXT,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def make_model(tokenizer):
    """A randomly initialised Qwen3 model, float32."""
    torch.manual_seed(SEED)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCABULARY,
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=CONTEXT,
            tie_word_embeddings=True,
            initializer_range=0.05,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, tokenizer.pad_token_id]
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model


def observation(search, call, number, runner):
    """What a rollout appends after its tool call `number`: the block, with the notice when the budget is spent."""
    block = runner.run(search.call(call)).block
    return f"\n{protocol.budget_notice(block) if number == config.MAX_TOOL_CALLS else block}\n"


def transcripts(countries, runner):
    """Yield (query, pieces) from every invented world, one after the other; see expert.trajectory."""
    with tempfile.TemporaryDirectory() as folder:
        for number in range(WORLDS):
            rng = random.Random(f"{SEED}/{number}")
            world = expert.invent_world(countries, rng)
            config.CORPUS_FILE = str(Path(folder, f"world-{number}.jsonl"))
            corpus.write_corpus(config.CORPUS_FILE, corpus.documents(world))
            search = tools.Tools()

            def observe(words, call_number, search=search):
                return observation(search, ToolCall("google_search", words), call_number, runner)

            for _ in range(TRANSCRIPTS_PER_WORLD):
                name, facts, query = expert.question(world, rng)
                yield query, expert.trajectory(name, facts, observe, config.MAX_TOOL_CALLS, rng)


def encode(tokenizer, system, query, pieces):
    """(ids, loss mask) of one transcript, encoded piece by piece as a rollout appends it."""
    ids = tokenizer.encode(protocol.render_prompt(tokenizer, system, query), add_special_tokens=False)
    mask = [0] * len(ids)
    for text, written in pieces:
        piece = tokenizer.encode(text, add_special_tokens=False)
        ids += piece
        mask += [int(written)] * len(piece)
    return ids[:TRANSCRIPT_TOKENS], mask[:TRANSCRIPT_TOKENS]


def padded(rows, part, filler):
    """Part 0 (ids) or 1 (mask) of encoded transcripts as one tensor (B, T), right-padded."""
    width = max(len(row[part]) for row in rows)
    return torch.tensor([row[part] + [filler] * (width - len(row[part])) for row in rows])


def batches(rows):
    """Yield (ids, mask) of BATCH transcripts of like length, in random order without end; the mask is -1 on padding."""
    rows = sorted(rows, key=lambda row: len(row[0]))
    chunks = [rows[i : i + BATCH] for i in range(0, len(rows) - BATCH + 1, BATCH)]
    generator = torch.Generator().manual_seed(SEED)
    while True:
        for index in torch.randperm(len(chunks), generator=generator).tolist():
            yield padded(chunks[index], 0, 0), padded(chunks[index], 1, -1)


def learning_rate(step):
    """Step 0..STEPS-1 -> rate."""
    decay = 0.5 * (1 + math.cos(math.pi * max(0, step - WARM_UP) / (STEPS - WARM_UP)))
    return LEARNING_RATE * min(decay, (step + 1) / WARM_UP)


def losses_of(model, ids, mask):
    """Mean loss (nats per token) on the tokens the policy wrote, and on those it only reads; ids, mask: (B, T)."""
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model.model(ids[:, :-1]).last_hidden_state  # right padding: causal attention never sees it
    losses = cross_entropy(model.lm_head(hidden).float().transpose(1, 2), ids[:, 1:], reduction="none")
    written, read = mask[:, 1:] == 1, mask[:, 1:] == 0
    return losses[written].mean(), losses[read].mean()


def train(model, rows):
    """Fit the policy-written tokens; returns the mean loss (nats per token) of the last 20 steps."""
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=WEIGHT_DECAY)
    losses = []
    for step, (ids, mask) in zip(range(STEPS), batches(rows), strict=False):
        loss, extra = losses_of(model, ids, mask)
        (loss + READING_WEIGHT * extra).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if (step + 1) % 20 == 0:
            print(f"step {step + 1}: loss {sum(losses[-20:]) / 20:.4f}", flush=True)
    return sum(losses[-20:]) / 20


def make(out_dir):
    """Build tokenizer and model, train, and write both with a manifest to `out_dir`."""
    countries, _ = corpus.split(corpus.read_countries())
    with asyncio.Runner() as runner:
        data = list(transcripts(countries, runner))
    system = protocol.system_prompt()
    texts = [query + "".join(text for text, _ in pieces) for query, pieces in data[::TOKENIZER_SHARE]]
    tokenizer = make_tokenizer([tag_free(text) for text in (system, *texts)])
    model = make_model(tokenizer)
    loss = train(model, [encode(tokenizer, system, query, pieces) for query, pieces in data])
    model.save_pretrained(out_dir)
    tokenizer.save_pretrained(out_dir)
    write_manifest(out_dir, loss)


def write_manifest(out_dir, loss):
    """MANIFEST.json: how the policy was made, what it does when sampled, and the hash of its weights."""
    constants = {name: value for name, value in globals().items() if name.isupper() and isinstance(value, int | float)}
    manifest = {
        "made by": "demo/make_policy.py from the public-domain CIA World Factbook; weights start at random",
        "settings": {**constants, "habits": expert.HABITS, **settings.SETTINGS},
        "final loss, nats per written token": round(loss, 4),
        "sampled at temperature 1": check(out_dir),
        "sha256 of model.safetensors": hashlib.sha256(Path(out_dir, "model.safetensors").read_bytes()).hexdigest(),
        "torch": torch.__version__,
    }
    Path(out_dir, "MANIFEST.json").write_text(json.dumps(manifest, indent=1) + "\n")


def tag_free(text):
    """The text without protocol tags and special tokens, which are entries of their own."""
    return re.sub("|".join(map(re.escape, SPECIAL + TAGS)), "", text)


async def sample(questions):
    """One trajectory of config.MODEL for each question, by the run's own sampler, tools and rollout."""
    policy = Policy()
    rollout = Rollout(InProcessSampler(policy), tools.Tools(), policy.tokenizer)
    runs = [rollout.run(question, i, step=0, version=0, slot=i) for i, question in enumerate(questions)]
    return await asyncio.gather(*runs)


def rates(questions, trajectories):
    """What sampled trajectories amount to, as {name: value}."""
    checks = [reward.check_format(trajectory.transcript) for trajectory in trajectories]
    lengths = [len(trajectory.prompt_ids) + len(trajectory.token_ids) for trajectory in trajectories]
    coverage = [covered(q, c.answer) for q, c in zip(questions, checks, strict=True) if c.answer]
    return {
        "trajectories": len(checks),
        "with an answer": round(len(coverage) / len(checks), 3),
        "in valid format": round(sum(c.reward for c in checks) / len(checks), 3),
        "facts an answer covers": round(sum(coverage) / max(1, len(coverage)), 3),
        "finishes": dict(Counter(trajectory.finish for trajectory in trajectories)),
        "mean context, tokens": round(sum(lengths) / len(lengths)),
        "longest context, tokens": max(lengths),
    }


def check(folder, show=0):
    """Sample the policy in `folder` on real questions: the rates that a run starts from, per file of questions."""
    config.MODEL = str(folder)
    found = {}
    with tempfile.TemporaryDirectory() as data:
        corpus.build(data)
        config.CORPUS_FILE = str(Path(data, "corpus.jsonl"))
        for name in ("train", "heldout"):
            rows = pq.read_table(Path(data, f"{name}.parquet")).to_pylist()
            questions = [question_from_row(row) for row in (rows * CHECK_ATTEMPTS)[:CHECK_ATTEMPTS]]
            trajectories = asyncio.run(sample(questions))
            found[name] = rates(questions, trajectories)
            print("".join(f"{trajectory.transcript}\n\n" for trajectory in trajectories[:show]), end="")
    return found


def covered(question, answer):
    """Share of the rubric's quoted facts that the answer states."""
    facts = [re.search('"(.*)"', item.description)[1] for item in question.rubrics]
    return sum(fact.lower() in answer.lower() for fact in facts) / len(facts)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default=OUT_DIR)
    parser.add_argument("--check", action="store_true", help="only sample the policy and print its rates")
    parser.add_argument("--show", type=int, default=0, help="transcripts to print")
    args = parser.parse_args()
    torch.set_num_threads(THREADS)
    settings.apply()
    if args.check:
        print(json.dumps(check(args.out, args.show), indent=1))
    else:
        make(args.out)


if __name__ == "__main__":
    main()
