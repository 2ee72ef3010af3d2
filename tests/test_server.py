"""The server's life and every way of its trainer's death, with a fake server process that ignores SIGTERM."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from conftest import ROOT
from processes import living, seconds_until_gone
from trainer_drill import fake_command

import config
import server
from adapters import ServedModel
from server import ServerError, VllmServer

QWEN = ServedModel("Qwen3_5ForConditionalGeneration", ("in_proj_qkv", "q_proj"))


@pytest.fixture
def launch(monkeypatch, tmp_path):
    """launch(behaviour): a VllmServer that will run the fake; after the test nothing of it may be left."""
    config.SERVER_PORT = 0

    def make(behaviour):
        monkeypatch.setattr(server, "command_line", fake_command(behaviour, tmp_path))
        return VllmServer(tmp_path, QWEN)

    yield make
    seconds_until_gone(15, text=str(tmp_path))


def test_a_server_is_ready_when_it_answers_and_gone_afterwards(launch, tmp_path):
    with launch("serves") as running:
        assert running.mark in {model["id"] for model in httpx.get(f"{running.url}/v1/models").json()["data"]}
        assert running.starts == 1 and not running.died()
        assert len(living(text=str(tmp_path))) == 3  # guard, server, worker
    assert not living(text=str(tmp_path))
    assert running.died()


def test_LORA_08_the_server_is_told_to_load_adapters_at_run_time(launch, tmp_path):
    with launch("serves"):
        log = (tmp_path / "vllm.log").read_text()
    # and its `-m` must not find this project's modules (tools, records, ...) before its own
    assert "'VLLM_ALLOW_RUNTIME_LORA_UPDATING': 'True', 'PYTHONSAFEPATH': '1'" in log


DEATHS = {
    "the end": ("stubborn", "ends", ()),
    "exception": ("stubborn", "raises", ()),
    "SIGINT": ("stubborn", "waits", (signal.SIGINT,)),
    "SIGINT twice": ("stubborn", "waits", (signal.SIGINT, signal.SIGINT)),
    "SIGTERM": ("stubborn", "waits", (signal.SIGTERM,)),
    "SIGKILL": ("stubborn", "waits", (signal.SIGKILL,)),
    "SIGINT during start-up": ("never", "waits", (signal.SIGINT,)),
    "SIGTERM during start-up": ("never", "waits", (signal.SIGTERM,)),
    "SIGKILL during start-up": ("never", "waits", (signal.SIGKILL,)),
}


def die(death, folder):
    """Let a trainer die that way; returns (seconds until nothing of its server was left, its exit status)."""
    behaviour, end, signals = DEATHS[death]
    drill = [sys.executable, str(ROOT / "tests" / "trainer_drill.py"), str(folder), behaviour, end]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(drill, start_new_session=True, **quiet) as trainer:
        while not (folder / "up").exists() and behaviour == "stubborn":
            time.sleep(0.05)
        while behaviour == "never" and len(living(text=f"{folder}/served")) < 3:
            time.sleep(0.05)  # guard, server and worker
        try:
            for number in signals:
                with contextlib.suppress(ProcessLookupError):  # the first SIGINT may have been enough
                    os.killpg(trainer.pid, number)  # as a terminal does: to the trainer's whole group
                time.sleep(0.3)
            return seconds_until_gone(20, text=str(folder)), trainer.wait(5)
        finally:
            trainer.kill()  # a trainer that survived would be waited for without end


@pytest.fixture(scope="module")
def deaths(tmp_path_factory):
    """What each of DEATHS left, all died at the same time."""
    with ThreadPoolExecutor(len(DEATHS)) as pool:
        running = {death: pool.submit(die, death, tmp_path_factory.mktemp("drill")) for death in DEATHS}
    return {death: future.result() for death, future in running.items()}


@pytest.mark.parametrize("death", DEATHS)
def test_OPS_01_nothing_is_left_however_the_trainer_dies(death, deaths):
    seconds, status = deaths[death]
    assert seconds < 15
    assert (status == 0) == (death == "the end")


def test_OPS_01_a_killed_guard_leaves_nothing_either(launch, tmp_path):
    with launch("serves") as running:
        os.kill(running.process.pid, signal.SIGKILL)
        time.sleep(0.1)
        assert running.died()
    assert not living(text=str(tmp_path))


def end_server(running):
    """Kill the server process itself, as a crash would; its guard and worker live on for a moment."""
    os.kill(min(pid for pid in living(running.process.pid) if pid != running.process.pid), signal.SIGKILL)


def test_a_dead_server_is_started_again_once_by_whoever_asks_first(launch, tmp_path, capsys):
    async def crash_and_revive():
        end_server(running)
        return await asyncio.gather(*(running.revive() for _ in range(5)), return_exceptions=True)

    with launch("serves") as running:
        before = running.url
        assert asyncio.run(crash_and_revive()) == [None] * 5
        assert running.starts == 2 and running.url == before and not running.died()
        assert httpx.get(f"{running.url}/health").is_success
        errors = asyncio.run(crash_and_revive())
        assert all(isinstance(error, ServerError) and "died a second time" in str(error) for error in errors)
        assert not living(text=str(tmp_path))
        with pytest.raises(ServerError, match="a second time"):
            asyncio.run(running.revive())
    assert "starting it once more" in capsys.readouterr().out


def test_a_living_server_is_left_alone(launch, monkeypatch):
    monkeypatch.setattr(server, "DYING", 0.3)
    with launch("serves") as running:
        asyncio.run(running.revive())
        assert running.starts == 1


def test_a_caller_that_gives_up_does_not_stop_the_restart(launch, monkeypatch):
    """It gives up when the new process exists but does not answer yet; the next caller waits until it does."""
    monkeypatch.setattr(server, "DYING", 0.3)

    async def impatient():
        end_server(running)
        first = asyncio.create_task(running.revive())
        while running.starts < 2:
            await asyncio.sleep(0.01)
        first.cancel()
        await running.revive()

    with launch("serves") as running:
        asyncio.run(impatient())
        assert httpx.get(f"{running.url}/health").is_success


def test_a_failed_start_shows_the_end_of_the_log(launch, tmp_path):
    with pytest.raises(ServerError) as caught, launch("dies"):
        pass
    first, *tail = str(caught.value).splitlines()
    assert first == f"the vLLM server ended while starting; the end of {tmp_path / 'vllm.log'}:"
    assert tail[-2:] == ["  | torch.OutOfMemoryError: no memory left", "  | the server ended with status 1"]


def test_a_silent_server_is_given_up(launch):
    config.SERVER_START_TIMEOUT = 1
    with pytest.raises(ServerError, match="did not answer in 1 s"), launch("never"):
        pass


def test_a_taken_port_is_named_with_the_remedy(launch):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        config.SERVER_PORT = other.getsockname()[1]
        with (
            pytest.raises(ServerError, match=rf"port {config.SERVER_PORT} is taken .* set SERVER_PORT"),
            launch("serves"),
        ):
            pass


def test_another_server_on_the_port_is_not_taken_for_ours(launch, monkeypatch):
    """It came between our look at the port and our child's; it even has the model."""
    with launch("serves") as stranger:
        monkeypatch.setattr(server, "_free_port", lambda wanted: int(stranger.url.rsplit(":")[-1]))
        with pytest.raises(ServerError, match="another server answers"), launch("never"):
            pass
        with pytest.raises(ServerError, match="ended while starting|another server answers"), launch("serves"):
            pass


# ---- a server that is already there (VLLM_URL) ----


@pytest.fixture
def attach(launch, monkeypatch, tmp_path):
    """attach(url=...): a VllmServer on the running fake, which config.MODEL and SERVER_CONTEXT suit."""
    config.MODEL, config.SERVER_CONTEXT = "some/model", 4096
    with launch("serves") as running:

        def make(url=None):
            monkeypatch.setenv("VLLM_URL", url or running.url)
            return VllmServer(tmp_path, QWEN)

        yield make
        assert not running.died()  # whatever the tests did with it


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_a_running_server_is_used_and_never_ended(attach, suffix):
    with attach() as found:
        url = found.url
    with attach(url + suffix) as found:
        assert (found.url, found.base, found.starts) == (url, "some/model", 1)
        assert not found.died()
    assert httpx.get(f"{found.url}/health").is_success


def test_a_running_server_with_another_model_is_refused(attach):
    config.MODEL = "other/model"
    with pytest.raises(ServerError, match=r"serves some/model.*, not config.MODEL = other/model"), attach():
        pass


def test_a_running_server_with_a_short_context_is_refused(attach):
    config.SERVER_CONTEXT = 49_152
    with pytest.raises(ServerError, match="a context of 4096 tokens; start it with --max-model-len 49152"), attach():
        pass


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "nonsense", "http://127.0.0.1:9/v1/"])
def test_no_server_at_the_url_is_said_at_once(attach, url):
    with pytest.raises(ServerError, match="VLLM_URL = .*: no vLLM server answers"), attach(url):
        pass


# ---- the command line ----


def values(command, option):
    start = command.index(option) + 1
    end = next((i for i in range(start, len(command)) if command[i].startswith("--")), len(command))
    return command[start:end]


def test_the_command_line_serves_what_the_trainer_trains():
    config.MODEL, config.DTYPE = "Qwen/Qwen3.5-4B", "bfloat16"
    command = server.command_line(8123, "ours-1", QWEN)
    assert command[:3] == [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    assert values(command, "--served-model-name") == ["Qwen/Qwen3.5-4B", "ours-1"]
    assert values(command, "--lora-target-modules") == ["in_proj_qkv", "q_proj"]
    for option, value in {"--host": "127.0.0.1", "--port": "8123", "--dtype": "bfloat16", "--max-lora-rank": "32",
                          "--max-model-len": "49152", "--generation-config": "vllm",
                          "--logprobs-mode": "processed_logprobs"}.items():  # fmt: skip
        assert values(command, option) == [value]
    assert {"--enable-lora", "--language-model-only", "--enable-prefix-caching"} <= set(command)
    assert "--language-model-only" not in server.command_line(1, "m", ServedModel("Qwen3ForCausalLM", ("q_proj",)))


@pytest.mark.parametrize("rank, served", [(1, 1), (8, 8), (24, 32), (32, 32), (33, 64), (512, 512)])
def test_LORA_08_the_servers_rank_is_at_least_the_trainers(rank, served):
    config.LORA_RANK = rank
    assert values(server.command_line(1, "m", QWEN), "--max-lora-rank") == [str(served)]


def test_LORA_08_a_rank_no_server_has_is_refused():
    config.LORA_RANK = 513
    with pytest.raises(ServerError, match="LORA_RANK = 513: vLLM serves ranks up to 512; lower it"):
        server.command_line(1, "m", QWEN)


def test_extra_arguments_come_last():
    config.SERVER_EXTRA_ARGS = ("--no-enable-prefix-caching", "--max-num-batched-tokens", "4096")
    assert tuple(server.command_line(1, "m", QWEN)[-3:]) == config.SERVER_EXTRA_ARGS
