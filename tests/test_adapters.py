"""An adapter's way into the server: keys, files, names, and servers that say yes and do something else."""

import asyncio

import pytest
import torch
from conftest import use_demo
from safetensors.torch import load_file
from stub_vllm import Oracle, Stub, error
from transformers import Qwen3_5Config, Qwen3Config

import adapters
import config
from adapters import AdapterError
from policy import Policy
from vllm_sampler import VllmSampler

KINDS = {f"self_attn.{name}_proj" for name in "qkvo"} | {f"mlp.{name}_proj" for name in ("gate", "up", "down")}
WRAPPED = "Qwen3_5ForConditionalGeneration"


@pytest.fixture(autouse=True)
def small():
    """A fixed prompt of 32 tokens: the stub has no prefix cache to fill."""
    config.SERVER_CONTEXT, config.DTYPE = 64, "float32"


@pytest.fixture
def policy():
    with use_demo():
        policy = Policy()
        randomise(policy, 0)
        yield policy


@pytest.fixture
def stub():
    with Stub() as stub:
        yield stub
        stub.shutdown()


def randomise(policy, seed):
    """Another policy version: every lora_B far from 0."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in policy.parameters.items():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)


def publish(sampler, *versions):
    async def one_after_the_other():
        for version in versions:
            if version:
                randomise(sampler.policy, version)
            await sampler.publish(version)

    asyncio.run(one_after_the_other())


# ---- keys ----


def test_LORA_01_keys_get_the_name_the_served_class_has_for_its_blocks():
    key = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    assert adapters.served_key(key, "Qwen3ForCausalLM") == key
    assert adapters.served_key(key, "Qwen3_5ForCausalLM") == key
    wrapped = adapters.served_key(key, WRAPPED)
    assert wrapped == "base_model.model.model.language_model.layers.0.self_attn.q_proj.lora_A.weight"
    # what vLLM makes of it: PEFT's prefix goes, then its class maps model.language_model. to language_model.model.
    module = wrapped.removeprefix("base_model.model.").replace("model.language_model.", "language_model.model.")
    assert module == "language_model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.mark.parametrize(
    "key",
    [
        "base_model.model.lm_head.lora_A.weight",
        "model.layers.0.self_attn.q_proj.lora_A.weight",
        "base_model.model.model.embed_tokens.weight",
    ],
)
def test_LORA_01_a_key_that_matches_no_block_is_an_error(key):
    with pytest.raises(AdapterError, match="only layers of the blocks"):
        adapters.served_key(key, WRAPPED)


def test_the_served_model_is_read_from_its_configuration_alone(tmp_path):
    """No weights are there to be loaded."""
    Qwen3_5Config(architectures=[WRAPPED]).save_pretrained(tmp_path)
    config.MODEL = str(tmp_path)
    served = adapters.served_model()
    assert (served.architecture, served.multimodal) == (WRAPPED, True)
    assert served.targets == ("down_proj", "gate_proj", "in_proj_a", "in_proj_b", "in_proj_qkv", "in_proj_z", "k_proj",
                              "o_proj", "out_proj", "q_proj", "up_proj", "v_proj")  # fmt: skip
    Qwen3Config(architectures=["Qwen3ForCausalLM"]).save_pretrained(tmp_path)
    assert not adapters.served_model().multimodal


def test_a_model_that_is_not_there_is_named(tmp_path):
    config.MODEL = str(tmp_path / "nothing")
    with pytest.raises(AdapterError, match="no configuration could be loaded"):
        adapters.served_model()


# ---- files ----


def test_LORA_09_exactly_the_trained_tensors_are_written(policy, tmp_path):
    path = adapters.write(policy, tmp_path / "adapters" / "step-000003", WRAPPED)
    tensors = load_file(path / "adapter_model.safetensors")
    assert len(tensors) == len(policy.parameters) == 2 * 4 * len(KINDS)
    for name, parameter in policy.parameters.items():
        assert torch.equal(tensors[adapters.served_key(name.replace(".default.", "."), WRAPPED)], parameter)
    assert not list(tmp_path.glob("adapters/.*"))


def test_LORA_09_a_trained_tensor_that_cannot_be_served_is_refused(policy, tmp_path):
    policy.model.get_base_model().lm_head.weight.requires_grad_(True)
    with pytest.raises(AdapterError, match="trained but not saved"):
        adapters.write(policy, tmp_path / "step-000001", "Qwen3ForCausalLM")


def test_LORA_07_a_half_written_version_is_never_under_its_name(policy, tmp_path, monkeypatch):
    first = adapters.write(policy, tmp_path / "step-000001", "Qwen3ForCausalLM")
    before = (first / "adapter_model.safetensors").read_bytes()

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(adapters, "save_file", killed)
    with pytest.raises(KeyboardInterrupt):
        adapters.write(policy, tmp_path / "step-000002", "Qwen3ForCausalLM")
    assert not (tmp_path / "step-000002").exists()
    assert (first / "adapter_model.safetensors").read_bytes() == before
    monkeypatch.undo()
    adapters.write(policy, tmp_path / "step-000002", "Qwen3ForCausalLM")  # the leftover is in nobody's way
    assert {path.name for path in tmp_path.iterdir()} == {"step-000001", "step-000002"}


# ---- names and paths ----


def test_LORA_06_every_version_has_a_name_and_a_path_of_its_own(policy, stub, tmp_path):
    Oracle(stub)
    sampler = VllmSampler(policy, stub, tmp_path)
    sampler.probed = True
    publish(sampler, 0, 1, 2)
    loads = [body for body in stub.bodies("/v1/load_lora_adapter") if body["lora_name"].startswith("policy")]
    assert [body["lora_name"] for body in loads] == ["policy-000000", "policy-000001", "policy-000002"]
    assert [body["lora_path"] for body in loads] == [str(tmp_path / "adapters" / f"step-00000{n}") for n in range(3)]
    # old versions are unloaded, and only then removed
    assert stub.listed == {"policy-000002": str(tmp_path / "adapters" / "step-000002")}
    assert [path.name for path in (tmp_path / "adapters").iterdir()] == ["step-000002"]
    assert policy.version == 2


def test_LORA_06_a_name_left_by_an_earlier_run_is_loaded_anew(policy, stub, tmp_path):
    Oracle(stub)
    stub.listed["policy-000000"] = "/of/another/run"
    sampler = VllmSampler(policy, stub, tmp_path)
    sampler.probed = True
    publish(sampler, 0)
    assert stub.listed["policy-000000"] == str(tmp_path / "adapters" / "step-000000")


def test_a_server_that_lists_another_path_stops_the_run(policy, stub, tmp_path):
    Oracle(stub)
    honest = stub.load
    stub.load = lambda body: honest({**body, "lora_path": "/of/another/run"})
    with pytest.raises(AdapterError, match="lists it with path /of/another/run"):
        publish(VllmSampler(policy, stub, tmp_path), 0)


@pytest.mark.parametrize("reply, remedy", [
    ((404, {"detail": "Not Found"}), "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"),
    ((500, error("Loading failed: LoRA rank 64 is greater than max_lora_rank 32.")), "--max-lora-rank 64 or more"),
    ((404, error("Loading lora x failed: No adapter found for <path>")), "must see the run folder"),
    ((500, ""), "See the server's log"),
])  # fmt: skip
def test_LORA_08_a_refused_adapter_stops_the_run_with_the_remedy(policy, stub, tmp_path, reply, remedy):
    Oracle(stub)
    config.LORA_RANK = 64
    stub.refuse_loads = reply
    sampler = VllmSampler(policy, stub, tmp_path)
    with pytest.raises(AdapterError, match="the server refused the adapter") as caught:
        publish(sampler, 0)
    assert remedy in str(caught.value) and len(str(caught.value).splitlines()) == 1
    assert sampler.name is None  # nothing can be sampled


# ---- proof ----


def test_the_probe_covers_every_kind_of_layer_and_leaves_no_trace(policy, stub, tmp_path):
    Oracle(stub)
    sampler = VllmSampler(policy, stub, tmp_path)
    before = {name: p.detach().clone() for name, p in policy.parameters.items()}
    apart = asyncio.run(adapters.probe(sampler))
    assert apart.keys() == KINDS | {"base"} and max(apart.values()) < 1e-5
    assert all(torch.equal(before[name], p) for name, p in policy.parameters.items())
    assert not stub.listed and not list((tmp_path / "adapters").iterdir())
    loads = stub.bodies("/v1/load_lora_adapter")
    assert {body["lora_name"] for body in loads} == {f"probe-{kind}" for kind in KINDS}


def test_LORA_01_a_server_that_ignores_adapters_stops_the_run(policy, stub, tmp_path):
    Oracle(stub, "ignores")
    with pytest.raises(AdapterError, match="accepted an adapter on mlp.down_proj and ignores it"):
        publish(VllmSampler(policy, stub, tmp_path), 0)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_LORA_01_a_server_that_ignores_one_kind_of_layer_stops_the_run(policy, stub, tmp_path, kind):
    oracle = Oracle(stub)
    weights = oracle.weights
    oracle.weights = lambda model: {key: tensor for key, tensor in weights(model).items() if kind not in key}
    with pytest.raises(AdapterError, match=f"accepted an adapter on {kind} and ignores it"):
        publish(VllmSampler(policy, stub, tmp_path), 0)


def test_LORA_01_a_wrapper_class_needs_its_own_keys(policy, stub, tmp_path, monkeypatch):
    """The stub knows modules below language_model. only, and accepts anything."""
    Oracle(stub, "wrapper")
    stub.served = adapters.ServedModel(WRAPPED, ())
    publish(VllmSampler(policy, stub, tmp_path), 0)
    monkeypatch.setattr(adapters, "BLOCKS", {})
    with pytest.raises(AdapterError, match="ignores it.*BLOCKS in adapters.py"):
        publish(VllmSampler(policy, stub, tmp_path), 0)


def test_LORA_06_a_server_with_stale_weights_stops_the_run(policy, stub, tmp_path):
    Oracle(stub, "stale")
    sampler = VllmSampler(policy, stub, tmp_path)
    sampler.probed = True
    with pytest.raises(AdapterError, match="policy-000001: .* another version, or keys and values cached"):
        publish(sampler, 0, 1)
    assert sampler.name == "policy-000000"


def test_LORA_08_a_server_that_answers_with_another_model_stops_the_run(policy, stub, tmp_path):
    oracle = Oracle(stub)
    stub.complete = lambda body: (200, {**oracle.complete(body)[1], "model": "base"})
    with pytest.raises(AdapterError, match="asked for probe-mlp.down_proj, the server answered with base"):
        publish(VllmSampler(policy, stub, tmp_path), 0)


def test_another_base_model_stops_the_run(policy, stub, tmp_path):
    oracle = Oracle(stub)
    with torch.no_grad():
        oracle.policy.model.get_base_model().lm_head.weight.mul_(1.1)
    with pytest.raises(AdapterError, match="the server's base model is .* off the trainer's"):
        publish(VllmSampler(policy, stub, tmp_path), 0)


def test_LOSS_08_logprobs_before_the_temperature_stop_the_run(policy, stub, tmp_path):
    """A server without --logprobs-mode processed_logprobs, at a temperature at which that matters."""
    config.TEMPERATURE = 0.7
    oracle = Oracle(stub)
    raw = oracle.complete
    publish(VllmSampler(policy, stub, tmp_path), 0)
    stub.complete = lambda body: raw({**body, "temperature": 1.0})
    with pytest.raises(AdapterError, match="processed_logprobs"):
        publish(VllmSampler(policy, stub, tmp_path), 0)


def test_logprobs_that_are_none_are_no_proof(policy, stub, tmp_path):
    oracle = Oracle(stub)

    def nulls(body):
        status, reply = oracle.complete(body)
        reply["choices"][0]["logprobs"]["token_logprobs"][3] = None
        return status, reply

    stub.complete = nulls
    with pytest.raises(AdapterError, match="version 0 could not be published: 1 log-probs that are none"):
        publish(VllmSampler(policy, stub, tmp_path), 0)


def test_the_fixed_prompt_fills_blocks_of_the_prefix_cache(policy):
    config.SERVER_CONTEXT = 49_152
    assert len(adapters.proof_prompt(policy)) == 2048
    config.SERVER_CONTEXT = 1024
    assert len(adapters.proof_prompt(policy)) == 512
