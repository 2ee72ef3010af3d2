"""Makes demo/policy/ from nothing: a tokenizer of 1,024 entries and a Qwen3 model of 0.9 million parameters.

Command line: `python demo/make_policy.py [--out DIR] [--check]` from the repository's root. The run takes
about twenty minutes on one core; `--check` only samples the policy in DIR and prints its rates.
The policy first takes demo/lesson.py's lesson in copying. Then it imitates demo/expert.py's sloppy transcripts,
in searches over invented worlds, rendered by the same code as a rollout.
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
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

sys.path.append(str(Path(__file__).resolve().parent.parent))
import corpus
import expert
import lesson
import settings
from policy_rates import check

import config
import protocol
import tools
from records import ToolCall

OUT_DIR = "demo/policy"
SEED = 0
THREADS = 1  # cores
VOCABULARY = 1024  # entries, special tokens and tags included
CONTEXT = 1024  # tokens the position encoding is made for
WORLDS = 12  # invented worlds the transcripts come from
TRANSCRIPTS_PER_WORLD = 600
TRANSCRIPT_TOKENS = 832  # prompt included; a longer transcript is cut
TOKENIZER_SHARE = 6  # the tokenizer is trained on every so-many-th transcript
ROPE_THETA = 1e6  # slow rotations, so that a token finds its like hundreds of tokens back
HEAD_GAIN = 1.5  # of queries and keys at the start: sharper attention than 1
LESSON_STEPS = 1500  # optimiser steps at most
LESSON_ACCURACY = 0.97  # of copied tokens, mean of REPORT_EVERY steps: the lesson ends
LESSON_BATCH = 32  # rows per step
STEPS = 450  # optimiser steps on transcripts
BATCH = 16  # transcripts per step
REPORT_EVERY = 25  # steps
LEARNING_RATE = 3e-3  # linear warm-up, level through the lesson, cosine to zero through the transcripts
WARM_UP = 50  # steps
SHARPNESS = 1.2  # of all logits in the end: temperature 1 then samples as 1 / 1.2 did, with fewer odd tokens
WEIGHT_DECAY = 0.01
READING_WEIGHT = 0.1  # of the loss on text the policy only reads, where it has 1 on each of the other kinds

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
    tags = "|".join(map(re.escape, SPECIAL + TAGS))  # entries of their own, not to be learnt from
    tokenizer.train_from_iterator([re.sub(tags, "", text) for text in texts], trainer)
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
    """A randomly initialised Qwen3 model, float32, with the gains of its queries and keys at HEAD_GAIN."""
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
            rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
            tie_word_embeddings=True,
            initializer_range=0.05,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    for layer in model.model.layers:
        torch.nn.init.constant_(layer.self_attn.q_norm.weight, HEAD_GAIN)
        torch.nn.init.constant_(layer.self_attn.k_norm.weight, HEAD_GAIN)
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, tokenizer.pad_token_id]
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model


def observation(search, call, number, runner):
    """What a rollout appends after its tool call `number`: the block, with the notice when the budget is spent."""
    block = runner.run(search.call(call)).block
    return f"\n{protocol.budget_notice(block) if number == config.MAX_TOOL_CALLS else block}\n"


def transcripts(countries, runner):
    """Yield (query, facts, pieces) from every invented world, one after the other; see expert.trajectory."""
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
                name, facts, query, prior = expert.question(world, rng)
                pieces = expert.trajectory(name, facts, prior, observe, config.MAX_TOOL_CALLS, rng)
                yield query, list(facts.values()), pieces


def encode(tokenizer, system, query, facts, pieces):
    """(ids, mask) of one transcript, encoded piece by piece as a rollout appends it."""
    ids = tokenizer.encode(protocol.render_prompt(tokenizer, system, query), add_special_tokens=False)
    mask = [lesson.READ] * len(ids)
    for text, written in pieces:
        piece = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids += piece["input_ids"]
        spans = [match.span() for fact in facts for match in re.finditer(re.escape(fact), text)]
        mask += [kind(written, span, spans) for span in piece["offset_mapping"]]
    return ids[:TRANSCRIPT_TOKENS], mask[:TRANSCRIPT_TOKENS]


def kind(written, token, facts):
    """READ, WRITTEN or FACT: what the mask says of a token with the characters `token` (start, end)."""
    if not written:
        return lesson.READ
    return lesson.FACT if any(token[0] < end and start < token[1] for start, end in facts) else lesson.WRITTEN


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


def learn(model, optimizer, ids, mask, rate):
    """One optimiser step on a batch, ids and mask (B, T).

    Returns (loss on WRITTEN tokens, loss on FACT tokens, accuracy on FACT tokens): nats per token and shares of 1,
    NaN where the batch has no such token.
    """
    hidden = model.model(ids[:, :-1]).last_hidden_state  # right padding: causal attention never sees it
    logits, targets, kinds = model.lm_head(hidden), ids[:, 1:], mask[:, 1:]
    losses = cross_entropy(logits.transpose(1, 2), targets, reduction="none")
    written, fact, read = (losses[kinds == k] for k in (lesson.WRITTEN, lesson.FACT, lesson.READ))
    weighted = ((1, written), (1, fact), (READING_WEIGHT, read))
    sum(weight * part.mean() for weight, part in weighted if len(part)).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
    optimizer.zero_grad()
    right = (logits.argmax(-1) == targets)[kinds == lesson.FACT].float()
    return written.mean().item(), fact.mean().item(), right.mean().item()


def report(name, step, history):
    """Print and return the means of the last REPORT_EVERY steps, in learn's order."""
    columns = zip(*history[-REPORT_EVERY:], strict=True)
    means = [torch.tensor(column).nanmean().item() for column in columns]  # some batches are guesses alone: no fact
    if (step + 1) % REPORT_EVERY == 0:
        written, fact, right = means
        print(f"{name} {step + 1}: loss {written:.3f}, of facts {fact:.3f}; facts copied {right:.3f}", flush=True)
    return means


def take_lesson(model, optimizer, source):
    """Train on rows of a Lesson until the copying is right; returns (steps taken, accuracy of copied tokens)."""
    history = []
    for step in range(LESSON_STEPS):
        rows = [source.row() for _ in range(LESSON_BATCH)]
        rate = LEARNING_RATE * min(1, (step + 1) / WARM_UP)
        history.append(learn(model, optimizer, padded(rows, 0, 0), padded(rows, 1, -1), rate))
        right = report("lesson", step, history)[2]
        if step >= REPORT_EVERY and right > LESSON_ACCURACY:
            break
    return len(history), right


def imitate(model, optimizer, rows):
    """Train on encoded transcripts; returns the last means of learn's three numbers."""
    history = []
    for step, (ids, mask) in zip(range(STEPS), batches(rows), strict=False):
        rate = LEARNING_RATE * (1 + math.cos(math.pi * step / STEPS)) / 2
        history.append(learn(model, optimizer, ids, mask, rate))
        means = report("transcripts", step, history)
    return means


def make(out_dir):
    """Build tokenizer and model, train, and write both with a manifest to `out_dir`."""
    countries, _ = corpus.split(corpus.read_countries())
    with asyncio.Runner() as runner:
        data = list(transcripts(countries, runner))
    system = protocol.system_prompt()
    texts = [query + "".join(text for text, _ in pieces) for query, _, pieces in data[::TOKENIZER_SHARE]]
    tokenizer = make_tokenizer([system, *texts])
    model = make_model(tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=WEIGHT_DECAY)
    ordinary = range(len(SPECIAL), VOCABULARY - len(TAGS))
    lesson_steps, lesson_accuracy = take_lesson(model, optimizer, lesson.Lesson(tokenizer, ordinary, SEED))
    written, fact, right = imitate(model, optimizer, [encode(tokenizer, system, *transcript) for transcript in data])
    with torch.no_grad():
        model.model.norm.weight.mul_(SHARPNESS)
    model.save_pretrained(out_dir)
    tokenizer.save_pretrained(out_dir)
    training = {
        "steps of the lesson": lesson_steps,
        "lesson, share of tokens copied right": lesson_accuracy,
        "final loss, nats per written token": written,
        "final loss, nats per token of a fact": fact,
        "share of fact tokens right, given those before": right,
    }
    write_manifest(out_dir, {name: round(value, 4) for name, value in training.items()})


def write_manifest(out_dir, training):
    """MANIFEST.json: how the policy was made, what it does when sampled, and the hash of its weights."""
    constants = {name: value for name, value in globals().items() if name.isupper() and isinstance(value, int | float)}
    manifest = {
        "made by": "demo/make_policy.py from the public-domain CIA World Factbook; weights start at random",
        "settings": {**constants, "habits": expert.HABITS, **settings.SETTINGS},
        **training,
        "sampled at temperature 1": check(out_dir),
        "sha256 of model.safetensors": hashlib.sha256(Path(out_dir, "model.safetensors").read_bytes()).hexdigest(),
        "torch": torch.__version__,
    }
    Path(out_dir, "MANIFEST.json").write_text(json.dumps(manifest, indent=1) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default=OUT_DIR)
    parser.add_argument("--check", action="store_true", help="only sample the policy and print its rates")
    parser.add_argument("--show", type=int, default=0, help="transcripts to print")
    args = parser.parse_args()
    torch.set_num_threads(THREADS)
    settings.apply()
    config.SEARCH_BACKEND = config.BROWSE_BACKEND = "local"
    if args.check:
        print(json.dumps(check(args.out, args.show), indent=1))
    else:
        make(args.out)


if __name__ == "__main__":
    main()
