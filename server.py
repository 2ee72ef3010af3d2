"""The vLLM server as a context manager: started, watched, restarted once, and never left behind.

The server runs below a small guard process (this file as a script) in a session of its own. The guard ends the
whole session when it is asked to, and by itself when the trainer is gone, however that died: an exception,
Ctrl-C, SIGTERM and SIGKILL need no code in the trainer.
With VLLM_URL set, a server that is already running is checked and used instead, and never ended.
"""

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx

import config

GRACE = 8  # seconds between SIGTERM and SIGKILL
POLL = 0.2  # seconds between two looks at a process, or for an answer
DYING = 5  # seconds a server may need from its first broken connection until it is seen to be dead
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # what --max-lora-rank accepts (vLLM 0.32, MaxLoRARanks)
LOG_TAIL = 15  # lines of the server's log in an error
ENVIRONMENT = {
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
    "VLLM_NO_USAGE_STATS": "1",
    "PYTHONSAFEPATH": "1",  # `-m` would put the working folder, and our module names with it, before vLLM's imports
}


class ServerError(RuntimeError):
    """The server cannot be used; the message has the remedy, and the end of the server's log."""


def command_line(port, mark, served):
    """The server's command line, as a list; pure.

    mark: a second name of the base model, by which /v1/models tells our own child from any other server.
    served: what adapters.served_model() says of config.MODEL.
    """
    rank = next((rank for rank in RANKS if rank >= config.LORA_RANK), None)
    if rank is None:
        raise ServerError(f"LORA_RANK = {config.LORA_RANK}: vLLM serves ranks up to {RANKS[-1]}; lower it")
    return [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", config.MODEL, "--served-model-name", config.MODEL, mark),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--dtype", config.DTYPE, "--max-model-len", str(config.SERVER_CONTEXT)),
        *("--gpu-memory-utilization", str(config.SERVER_MEMORY_FRACTION)),
        *("--max-num-seqs", str(config.SERVER_SEQUENCES)),
        # one adapter at a time; without the list vLLM wraps the output head as well, and slows down
        *("--enable-lora", "--max-loras", "1", "--max-lora-rank", str(rank)),
        *("--lora-target-modules", *served.targets),
        # the checkpoint's own top-k and top-p would become defaults; log-probs must be after the temperature
        *("--generation-config", "vllm", "--logprobs-mode", "processed_logprobs"),
        "--enable-prefix-caching",
        "--disable-uvicorn-access-log",
        *(("--language-model-only",) if served.multimodal else ()),
        *config.SERVER_EXTRA_ARGS,
    ]


class VllmServer:
    """A running server: `url` to talk to, `base` the name of its base model.

    starts: how often it was started; a change tells the sampler that its adapter is gone.
    """

    def __init__(self, folder, served):
        self.log_path = Path(folder) / "vllm.log"
        self.served = served
        self.base = config.MODEL
        self.attached = os.environ.get("VLLM_URL")
        self.url = (self.attached or "").rstrip("/").removesuffix("/v1")
        self.port = config.SERVER_PORT  # a restarted server is found where the first one was
        self.starts = 0
        self.process = None
        self._revival = None

    def __enter__(self):
        if self.attached:
            self._attach()
            return self
        print(f"server: starting vLLM with {config.MODEL} (log: {self.log_path})", flush=True)
        began = time.monotonic()
        try:
            self._launch()
            while not self._ready():
                time.sleep(POLL)
        except BaseException:
            self.stop()
            raise
        print(f"server: ready at {self.url} after {time.monotonic() - began:.0f} s", flush=True)
        return self

    def __exit__(self, *_):
        self.stop()

    def died(self):
        """True when our own server has ended, or was never started."""
        if self.attached:
            return False
        if self.process is None:
            return True
        # looked at, not reaped: the process id stays ours until stop() has ended its group
        return os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    async def revive(self):
        """After a failed request: start a dead server again, once in a run; `starts` tells whether that happened.

        Returns when the server answers again, or has been seen to live all along.
        Raises ServerError when it died a second time.
        """
        if self._revival is None or self._revival.done():
            self._revival = asyncio.create_task(self._restart())
        await asyncio.shield(self._revival)  # whoever gives up waiting stops nobody else's restart

    async def _restart(self):
        patience = time.monotonic() + DYING
        while not self.died():
            if time.monotonic() > patience:
                return
            await asyncio.sleep(POLL)
        self.stop()
        if self.starts > 1:
            raise ServerError(self._report("the vLLM server died a second time"))
        print(f"server: it died; starting it once more (log: {self.log_path})", flush=True)
        self._launch()
        while not self._ready():
            await asyncio.sleep(POLL)

    def stop(self):
        """End the server with everything it started; returns when nothing of it is left. Any number of times."""
        if self.process is None:
            return
        os.kill(self.process.pid, signal.SIGTERM)  # the guard's word is enough: it asks the group once, then kills it
        deadline = time.monotonic() + GRACE + 4
        while not self.died() and time.monotonic() < deadline:
            time.sleep(POLL / 4)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # what is left when something ended the guard itself
        self.process.wait()
        self.process = None

    def _launch(self):
        self.port = _free_port(self.port)
        self.url = f"http://127.0.0.1:{self.port}"
        self.mark = f"ours-{secrets.token_hex(8)}"
        command = command_line(self.port, self.mark, self.served)
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.log_path, "ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, __file__, str(os.getpid()), *command],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        self.starts += 1
        self.deadline = time.monotonic() + config.SERVER_START_TIMEOUT

    def _ready(self):
        """True once our own child answers; ServerError when it died or is late."""
        if self.died():
            raise ServerError(self._report("the vLLM server ended while starting"))
        if time.monotonic() > self.deadline:
            raise ServerError(self._report(f"the vLLM server did not answer in {config.SERVER_START_TIMEOUT} s"))
        with contextlib.suppress(httpx.HTTPError, ValueError):
            httpx.get(f"{self.url}/health", timeout=2, trust_env=False).raise_for_status()
            if self.mark not in {model["id"] for model in _models(self.url)}:
                raise ServerError(self._report(f"another server answers at {self.url}; set SERVER_PORT to a free port"))
            return True
        return False

    def _attach(self):
        """Check the server of VLLM_URL: right model, long enough context. The probe checks the rest."""
        try:
            models = _models(self.url)
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            raise ServerError(
                f"VLLM_URL = {self.attached}: no vLLM server answers ({type(error).__name__}: {error}); "
                "start one there, or unset VLLM_URL"
            ) from None
        model = next((model for model in models if config.MODEL in (model["id"], model.get("root"))), None)
        if model is None:
            raise ServerError(f"VLLM_URL = {self.attached} serves {', '.join(m['id'] for m in models)}, not "
                              f"config.MODEL = {config.MODEL}; start it with that model, or change MODEL")  # fmt: skip
        if (model.get("max_model_len") or 0) < config.SERVER_CONTEXT:
            raise ServerError(f"VLLM_URL = {self.attached} has a context of {model.get('max_model_len')} tokens; start "
                              f"it with --max-model-len {config.SERVER_CONTEXT} (SERVER_CONTEXT)")  # fmt: skip
        self.base, self.starts = model["id"], 1

    def _report(self, what):
        """One line, then the end of the log."""
        tail = self.log_path.read_text(errors="replace").splitlines()[-LOG_TAIL:]
        return "\n  | ".join([f"{what}; the end of {self.log_path}:", *tail])


def _models(url):
    """The entries of /v1/models; ValueError when the reply is something else."""
    reply = httpx.get(f"{url}/v1/models", timeout=5, trust_env=False)
    reply.raise_for_status()
    data = reply.json().get("data")
    if not isinstance(data, list) or not all("id" in model for model in data):
        raise ValueError("the reply to /v1/models is no list of models")
    return data


def _free_port(wanted):
    """The wanted port when nobody listens there, or any free one for 0."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port of a run just ended is free
        try:
            probe.bind(("127.0.0.1", wanted))
        except OSError as error:
            raise ServerError(
                f"port {wanted} is taken ({error.strerror}): end the process that listens there "
                f"(ss -ltnp 'sport = :{wanted}'), or set SERVER_PORT to another one, or to 0"
            ) from None
        return probe.getsockname()[1]


def guard(parent, command):
    """Run `command` in this process's own session until it ends, `parent` (a process id) is gone, or SIGTERM comes.

    Never returns: its last act is SIGKILL to its own process group, itself included.
    """
    asked = []  # a flag, not an exception, which could fall between the start of the child and its assignment
    signal.signal(signal.SIGTERM, lambda *_: asked.append(True))
    child = subprocess.Popen(command, env={**os.environ, **ENVIRONMENT})
    while child.poll() is None and os.getppid() == parent and not asked:
        time.sleep(POLL)
    if child.returncode is not None:
        print(f"the server ended with status {child.returncode}", flush=True)
    os.killpg(0, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(GRACE)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    guard(int(sys.argv[1]), sys.argv[2:])
