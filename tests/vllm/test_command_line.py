"""The server's command line, for a GPU box and for the CPU, read by the installed vLLM's own parser."""

import pytest
import real  # noqa: F401  skips the file where vLLM is not installed
from test_demo_policy import NO_CHUNKS
from test_qwen35 import KINDS, ONE_PASS

import config
from adapters import ServedModel
from server import RANKS, command_line

TARGETS = tuple(sorted(kind.rsplit(".")[-1] for kind in KINDS))


def parsed(served):
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args(command_line(8100, "ours-1", served)[3:])
    validate_parsed_serve_args(arguments)
    return arguments


def test_the_gpu_boxs_command_line():
    """Every constant as config.py has it: Qwen3.5-4B."""
    arguments = parsed(ServedModel("Qwen3_5ForConditionalGeneration", TARGETS))
    wanted = {
        "model": "Qwen/Qwen3.5-4B", "served_model_name": ["Qwen/Qwen3.5-4B", "ours-1"], "host": "127.0.0.1",
        "port": 8100, "dtype": "bfloat16", "max_model_len": 49_152, "gpu_memory_utilization": 0.4, "max_num_seqs": 128,
        "enable_lora": True, "max_loras": 1, "max_lora_rank": 32, "lora_target_modules": list(TARGETS),
        "generation_config": "vllm", "logprobs_mode": "processed_logprobs", "enable_prefix_caching": True,
        "language_model_only": True, "disable_uvicorn_access_log": True,
    }  # fmt: skip
    assert {name: getattr(arguments, name) for name in wanted} == wanted


@pytest.mark.parametrize("extra, architecture", [(NO_CHUNKS, "Qwen3ForCausalLM"),
                                                 (ONE_PASS, "Qwen3_5ForConditionalGeneration")])  # fmt: skip
def test_the_cpus_command_line(extra, architecture):
    config.SERVER_EXTRA_ARGS = extra
    arguments = parsed(ServedModel(architecture, TARGETS))
    assert arguments.max_num_batched_tokens == int(extra[-1])
    assert arguments.enable_prefix_caching == ("--no-enable-prefix-caching" not in extra)
    assert arguments.language_model_only == (architecture != "Qwen3ForCausalLM")


def test_an_option_vllm_does_not_have_is_refused(capsys):
    config.SERVER_EXTRA_ARGS = ("--no-such-option", "1")
    with pytest.raises(SystemExit):
        parsed(ServedModel("Qwen3ForCausalLM", TARGETS))
    assert "--no-such-option" in capsys.readouterr().err


def test_LORA_08_the_table_of_ranks_is_vllms():
    from typing import get_args

    from vllm.config.lora import MaxLoRARanks

    assert get_args(MaxLoRARanks) == RANKS
