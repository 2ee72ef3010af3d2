"""The in-process engine against transformers' own generation, and its independence of company."""

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import use_demo

import config
from policy import Policy
from sampler import PREFILL, InProcessSampler, SamplerError

PROMPT = "<|im_start|>user\nWhat is the capital of {}?<|im_end|>\n<|im_start|>assistant\n<think>\n"


@pytest.fixture(scope="module")
def policy():
    with use_demo():
        yield Policy()


@pytest.fixture
def sampler(policy):
    use_demo().__enter__()
    config.SLOTS, config.SLOT_TOKENS = 6, 320
    policy.version = 0
    return InProcessSampler(policy)


def ids_of(policy, country):
    return policy.tokenizer.encode(PROMPT.format(country), add_special_tokens=False)


def sample(sampler, *requests, **settings):
    """Completions of (country, seed, slot) requests, all at once."""
    settings = {"max_tokens": 40, "temperature": 1.0, **settings}

    async def together():
        return await asyncio.gather(
            *(sampler.sample(ids_of(sampler.policy, country), seed=seed, slot=slot, **settings)
              for country, seed, slot in requests)
        )  # fmt: skip

    return asyncio.run(together())


def model_logprobs(policy, prompt_ids, token_ids, temperature=1.0):
    with torch.no_grad():
        logits = policy.model.get_base_model()(torch.tensor([prompt_ids + list(token_ids)])).logits[0]
    chosen = (logits / temperature).log_softmax(-1)[len(prompt_ids) - 1 : -1]
    return chosen.gather(1, torch.tensor(token_ids)[:, None]).squeeze(1).tolist()


def test_greedy_equals_transformers(policy, sampler):
    (completion,) = sample(sampler, ("France", 0, 2), temperature=0.0)
    prompt = ids_of(policy, "France")
    expected = policy.model.get_base_model().generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), max_new_tokens=40, do_sample=False,
        stop_strings=["</call_tool>"], tokenizer=policy.tokenizer,
    )  # fmt: skip
    assert list(completion.token_ids) == expected[0, len(prompt) :].tolist()


@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_LOSS_09_logprobs_are_the_models_over_the_whole_vocabulary(policy, sampler, temperature):
    """There is no top-p, top-k or min-p to renormalise over: the trainer's log-probs are the sampler's."""
    (completion,) = sample(sampler, ("Spain", 5, 1), temperature=temperature)
    expected = model_logprobs(policy, ids_of(policy, "Spain"), completion.token_ids, temperature)
    assert completion.logprobs == pytest.approx(expected, abs=2e-5)


def test_result_does_not_depend_on_company(sampler):
    alone = sample(sampler, ("France", 11, 4))[0]
    crowd = sample(sampler, *((country, i, i) for i, country in enumerate(["Spain", "Peru", "Chad", "Fiji"])),
                   ("France", 11, 4))  # fmt: skip
    assert crowd[-1] == alone  # bit for bit, log-probabilities included


def test_seeds_differ_and_repeat(sampler):
    first = sample(sampler, *(("France", seed, seed) for seed in range(6)))
    again = sample(sampler, *(("France", seed, seed) for seed in range(6)))
    assert first == again
    assert len({c.token_ids for c in first}) > 1


def test_a_slot_serves_one_request_at_a_time(sampler):
    both = sample(sampler, ("France", 1, 3), ("Spain", 2, 3 + config.SLOTS))
    assert both == [sample(sampler, ("France", 1, 3))[0], sample(sampler, ("Spain", 2, 3))[0]]


def test_a_continuation_equals_a_fresh_start(policy, sampler):
    """The second turn reuses the slot's cache; its log-probs are those of the whole context."""
    prompt = ids_of(policy, "France")
    first = sample(sampler, ("France", 1, 0))[0]
    context = prompt + list(first.token_ids) + policy.tokenizer.encode("\n<tool_output>\nParis\n</tool_output>\n")
    second = asyncio.run(sampler.sample(context, max_tokens=20, temperature=1.0, seed=9, slot=0))
    assert second.logprobs == pytest.approx(model_logprobs(policy, context, second.token_ids), abs=2e-5)


def test_new_weights_drop_the_cache(policy, sampler):
    before = sample(sampler, ("France", 1, 0))[0]
    weight = next(p for name, p in policy.parameters.items() if "lora_B" in name)
    with torch.no_grad():
        weight.add_(0.5)
    try:
        asyncio.run(sampler.publish(1))
        after = sample(sampler, ("France", 1, 0))[0]
        expected = model_logprobs(policy, ids_of(policy, "France"), after.token_ids)
    finally:
        with torch.no_grad():
            weight.sub_(0.5)
        policy.version = 0
    assert after.logprobs == pytest.approx(expected, abs=2e-5)
    assert after.logprobs != before.logprobs


def forced(sampler, script):
    """Make the engine emit the given ids one by one, whatever the model says."""
    ids = list(script)
    sampler._choose = lambda logits, slots: ([ids.pop(0) for _ in slots], [-0.5 for _ in slots])


def test_the_stop_tag_ends_the_call(policy, sampler):
    ids = policy.tokenizer.encode('a<call_tool name="google_search">q</call_tool>b')
    forced(sampler, ids)
    (completion,) = sample(sampler, ("France", 0, 0))
    assert completion.text == 'a<call_tool name="google_search">q</call_tool>'
    assert (completion.finish_reason, completion.stop_reason) == ("stop", "</call_tool>")
    assert list(completion.token_ids) == ids[: len(completion.token_ids)]


def test_TOK_03_ids_keep_a_token_that_runs_past_the_stop_tag(policy, sampler):
    """The tag spelled in plain tokens, the last of which is longer than the tag's end."""
    pieces = {"</call_tool": [1, 2], "><": [3]}
    sampler.policy = type("Stub", (), {"tokenizer": type("T", (), {
        "decode": staticmethod(lambda ids, **_: "".join({1: "</call", 2: "_tool", 3: "><"}[i] for i in ids))})(),
        "end_ids": frozenset(), "model": policy.model, "device": policy.device})()  # fmt: skip
    forced(sampler, [i for ids in pieces.values() for i in ids])
    completion = asyncio.run(sampler.sample([5, 6], max_tokens=9, temperature=1.0, seed=0, slot=0))
    assert completion.token_ids == (1, 2, 3) and len(completion.logprobs) == 3
    assert completion.text == "</call_tool>" and completion.stop_reason == "</call_tool>"


def test_TOK_11_every_end_id_ends_the_turn(policy, sampler):
    assert policy.end_ids == set(policy.model.generation_config.eos_token_id)
    for end in policy.end_ids:
        forced(sampler, [9, end])
        (completion,) = sample(sampler, ("France", 0, 0))
        assert (completion.finish_reason, completion.stop_reason) == ("stop", None)
        assert completion.token_ids == (9, end)


def test_budgets_end_with_length(policy, sampler):
    forced(sampler, [9] * 400)
    (completion,) = sample(sampler, ("France", 0, 0), max_tokens=7)
    assert completion.finish_reason == "length" and len(completion.token_ids) == 7
    room = config.SLOT_TOKENS - len(ids_of(policy, "France"))
    (completion,) = sample(sampler, ("France", 0, 1), max_tokens=10_000)
    assert completion.finish_reason == "length" and len(completion.token_ids) == room


def test_a_context_longer_than_the_slot_is_refused(sampler):
    with pytest.raises(SamplerError, match="SLOT_TOKENS"):
        asyncio.run(sampler.sample([9] * config.SLOT_TOKENS, max_tokens=5, temperature=1.0, seed=0, slot=0))


def test_a_context_of_several_prefill_passes(policy, sampler):
    context = (ids_of(policy, "France") * 9)[: 3 * PREFILL + 5]
    completion = asyncio.run(sampler.sample(context, max_tokens=5, temperature=1.0, seed=0, slot=0))
    assert completion.logprobs == pytest.approx(model_logprobs(policy, context, completion.token_ids), abs=2e-5)


def test_an_engine_failure_reaches_every_caller(sampler):
    def broken(*_):
        raise RuntimeError("out of memory")

    sampler._forward = broken
    with pytest.raises(SamplerError, match="out of memory") as caught:
        sample(sampler, ("France", 0, 0), ("Spain", 1, 1))
    assert caught.value.kind == "engine"
    assert not sampler.active


def test_a_deadline_frees_the_slot(policy, sampler):
    async def late():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await sampler.sample(ids_of(policy, "France"), max_tokens=200, temperature=1.0, seed=0, slot=0)
        return await sampler.sample(ids_of(policy, "Spain"), max_tokens=20, temperature=1.0, seed=2, slot=0)

    assert asyncio.run(late()) == sample(sampler, ("Spain", 2, 0), max_tokens=20)[0]


def test_tokens_are_drawn_from_the_models_distribution(policy, sampler):
    """A thousand first tokens against the probabilities, in total variation."""
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0] + [-50.0] * 4])
    counts = torch.zeros(8)
    for seed in range(1000):
        draws = np.random.Generator(np.random.Philox(seed)).random(1)
        sampler.active[0] = SimpleNamespace(temperature=1.0, draws=draws, sampled=[])
        ids, _ = sampler._choose(logits, [0])
        counts[ids[0]] += 1
    sampler.active.clear()
    assert float((counts / 1000 - logits.softmax(1)[0]).abs().sum() / 2) < 0.05
