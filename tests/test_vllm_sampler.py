"""The sampler's requests field by field, and what it makes of replies that cannot be trained on."""

import asyncio
import time

import pytest
from conftest import use_demo
from stub_vllm import Stub, error, reply_to

import config
from adapters import AdapterError
from policy import Policy
from sampler import SamplerError, check_completion
from server import ServerError
from vllm_sampler import VllmSampler, start_server

PROMPT = [10, 20, 30, 40]


@pytest.fixture(scope="module")
def policy():
    with use_demo():
        yield Policy()


@pytest.fixture
def stub():
    with Stub() as stub:
        yield stub
        stub.shutdown()


@pytest.fixture
def sampler(policy, stub, tmp_path):
    """A sampler whose adapter policy-000000 is in service."""
    sampler = VllmSampler(policy, stub, tmp_path)
    sampler.name, sampler.served_by, sampler.probed = "policy-000000", 1, True
    return sampler


def sample(sampler, **settings):
    settings = {"max_tokens": 50, "temperature": 0.7, "seed": 2**62 + 1, "slot": 3, **settings}
    return asyncio.run(sampler.sample(PROMPT, **settings))


def test_LOSS_09_every_field_of_a_request(sampler, stub):
    """Nothing the trainer's log-probs do not model: no top-p, top-k, min-p, no penalties."""
    sample(sampler)
    (body,) = stub.bodies("/v1/completions")
    assert body == {
        "model": "policy-000000", "prompt": PROMPT, "max_tokens": 50, "temperature": 0.7, "seed": 2**62 + 1,
        "n": 1, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
        "repetition_penalty": 1.0, "logprobs": 0, "return_token_ids": True, "stop": ["</call_tool>"],
        "include_stop_str_in_output": True, "skip_special_tokens": False, "stop_token_ids": [1008, 1010],
    }  # fmt: skip


def test_TOK_11_every_end_id_is_named(sampler, stub, policy):
    """With --generation-config vllm the server knows the tokenizer's end id only."""
    sample(sampler)
    assert set(stub.requests[0][1]["stop_token_ids"]) == policy.end_ids and len(policy.end_ids) == 2


@pytest.mark.parametrize("finish, reason, expected", [
    ("stop", "</call_tool>", ("stop", "</call_tool>")),
    ("stop", 1010, ("stop", None)),
    ("stop", None, ("stop", None)),
    ("length", None, ("length", None)),
])  # fmt: skip
def test_how_a_completion_ended(sampler, stub, finish, reason, expected):
    stub.complete = lambda body: (
        200, reply_to(body, [7, 8], [-0.25, 0.0], text="q</call_tool>", finish_reason=finish, stop_reason=reason)
    )  # fmt: skip
    completion = sample(sampler)
    assert (completion.finish_reason, completion.stop_reason) == expected
    assert completion.token_ids == (7, 8) and completion.logprobs == (-0.25, 0.0)
    assert completion.text == "q</call_tool>"


def broken(**changes):
    """A reply with some fields of its choice changed; a value of `...` takes the field away."""

    def complete(body):
        reply = reply_to(body, [5, 6, 7], [-0.5, -1.0, 0.0], **changes)
        for field in [field for field, value in changes.items() if value is ...]:
            del reply["choices"][0][field]
        return 200, reply

    return complete


@pytest.mark.parametrize("kind, complete", {
    "token_id": broken(token_ids=[5, 1024, 7]),
    "abort": broken(finish_reason="abort"),
    "prompt": broken(prompt_token_ids=PROMPT[1:]),
    "reply": broken(token_ids=None),
    "too_long": lambda body: (400, error("This model's maximum context length is 2048 tokens. However, ...")),
    "refused": lambda body: (400, error("Token id 248330 is out of vocabulary")),
    "server": lambda body: (500, error("EngineCore encountered an issue.")),
}.items())  # fmt: skip
def test_LOSS_12_what_cannot_be_trained_on_is_an_infrastructure_failure(sampler, stub, kind, complete):
    stub.complete = complete
    with pytest.raises(SamplerError) as caught:
        sample(sampler)
    assert caught.value.kind == kind


@pytest.mark.parametrize("complete", [
    broken(logprobs=None),
    broken(token_ids=...),
    broken(prompt_token_ids=...),
    lambda body: (200, "<html>a proxy's page</html>"),
    lambda body: (200, {"model": body["model"], "choices": []}),
])  # fmt: skip
def test_a_reply_that_is_no_completion(sampler, stub, complete):
    stub.complete = complete
    with pytest.raises(SamplerError) as caught:
        sample(sampler)
    assert caught.value.kind in ("reply", "prompt")


@pytest.mark.parametrize("kind, logprobs", [("logprobs", [-0.5, None, -1.0]), ("logprobs", [-0.5, -9999.0, -1.0]),
                                            ("lengths", [-0.5, -1.0])])  # fmt: skip
def test_LOSS_12_null_sentinel_and_missing_logprobs(sampler, stub, kind, logprobs):
    stub.complete = broken(logprobs={"token_logprobs": logprobs})
    with pytest.raises(SamplerError) as caught:
        check_completion(sample(sampler))
    assert caught.value.kind == kind


def test_LORA_08_an_answer_by_another_model_stops_the_run(sampler, stub):
    stub.complete = lambda body: (200, {**reply_to(body, [5], [-0.5]), "model": "base"})
    with pytest.raises(AdapterError, match="asked for policy-000000, the server answered with base"):
        sample(sampler)


def test_LORA_08_an_adapter_the_server_does_not_know_stops_the_run(sampler, stub):
    stub.complete = lambda body: (404, error("The model `policy-000000` does not exist."))
    with pytest.raises(AdapterError, match="no adapter policy-000000"):
        sample(sampler)


# ---- a server that breaks off ----


def test_a_broken_connection_is_tried_once_more(sampler, stub):
    """The server lives: revive() has looked, and the request is asked again as it was."""
    answers = [None, (200, reply_to({"prompt": PROMPT, "model": "policy-000000"}, [5], [-0.5]))]
    stub.complete = lambda body: answers.pop(0)
    assert sample(sampler).token_ids == (5,)
    first, second = stub.bodies("/v1/completions")
    assert first == second and stub.revived == 1


def test_a_connection_that_stays_broken(sampler, stub):
    stub.complete = lambda body: None
    with pytest.raises(SamplerError) as caught:
        sample(sampler)
    assert caught.value.kind == "server" and len(stub.requests) == 2


def test_after_a_restart_the_adapter_is_published_before_anything_is_sampled(sampler, stub):
    """16 requests lose their connection; the new server gets the adapter once, and every request again."""

    async def revive():
        stub.starts = 2
        stub.listed.clear()

    def complete(body):
        if stub.starts == 1:
            return None
        if body["model"] not in stub.listed:
            return 404, error("no such model")
        return 200, reply_to(body, [5], [-0.5])

    async def crowd():
        requests = (sampler.sample(PROMPT, max_tokens=9, temperature=1.0, seed=s, slot=s) for s in range(16))
        return await asyncio.gather(*requests)

    stub.revive, stub.complete = revive, complete
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("adapters.prove", lambda *_: asyncio.sleep(0))  # test_adapters.py is about it
        completions = asyncio.run(crowd())
    assert [completion.token_ids for completion in completions] == [(5,)] * 16
    assert len(stub.bodies("/v1/load_lora_adapter")) == 1


def test_a_request_that_reached_the_restarted_server_too_early_is_asked_again(sampler, stub):
    """It waited for a connection while another one's failure led to the restart."""

    def complete(body):
        if stub.starts == 1:
            stub.starts = 2
            return 404, error("no such model")
        return 200, reply_to(body, [5], [-0.5])

    stub.complete = complete
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("adapters.prove", lambda *_: asyncio.sleep(0))
        assert sample(sampler).token_ids == (5,)
    assert len(stub.bodies("/v1/load_lora_adapter")) == 1 and not stub.revived


def test_a_server_that_is_lost_stops_the_run(sampler, stub):
    async def revive():
        raise ServerError("the vLLM server died a second time")

    stub.revive, stub.complete = revive, lambda body: None
    with pytest.raises(ServerError, match="a second time"):
        sample(sampler)


def test_OPS_04_a_deadline_reaches_the_server(policy, stub, tmp_path):
    config.TRAJECTORY_DEADLINE = 0.3
    sampler = VllmSampler(policy, stub, tmp_path)
    sampler.name, sampler.served_by = "policy-000000", 1
    stub.complete = lambda body: time.sleep(2)
    with pytest.raises(SamplerError) as caught:
        sample(sampler)
    assert caught.value.kind == "timeout"


def test_the_in_process_sampler_needs_no_server(tmp_path):
    config.SAMPLER = "in_process"
    with start_server(tmp_path) as server:
        assert server is None
