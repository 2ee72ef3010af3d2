"""Token ids in, sampled token ids and log-probabilities out: the vLLM server's /v1/completions.

Every request names the adapter of the present policy version, and a reply is believed only when it names the
same one, repeats the prompt that was sent, and stays inside the vocabulary.
"""

import asyncio
import contextlib
import shutil
from pathlib import Path

import httpx

import adapters
import config
from sampler import TOOL_STOP, Completion, SamplerError
from server import VllmServer

PLAIN = {  # sampling from the policy's own distribution: whatever the trainer's log-probs do not model is off
    "n": 1,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "logprobs": 0,  # of the sampled token alone
    "return_token_ids": True,
    "stop": [TOOL_STOP],
    "include_stop_str_in_output": True,
    "skip_special_tokens": False,
}


def start_server(folder):
    """The policy's server as a context manager, for the run in `folder`; the in-process sampler needs none."""
    if config.SAMPLER == "in_process":
        return contextlib.nullcontext()
    return VllmServer(folder, adapters.served_model())


class VllmSampler:
    """Samples from the adapter of the policy's newest version; `publish` puts it into the server."""

    def __init__(self, policy, server, folder):
        self.policy = policy
        self.server = server
        self.folder = Path(folder) / "adapters"
        self.name = None  # the adapter in service
        self.served_by = 0  # server.starts when it was published; a restarted server has no adapter
        self.probed = False
        self.publishing = asyncio.Lock()
        self.end_ids = sorted(policy.end_ids)
        self.vocabulary = policy.model.get_base_model().lm_head.weight.shape[0]
        self.client = httpx.AsyncClient(
            timeout=httpx.Timeout(config.TRAJECTORY_DEADLINE, connect=10),
            # given up before the server does so (after 5 s), else a request may go into a closing connection
            limits=httpx.Limits(max_connections=config.SERVER_SEQUENCES, keepalive_expiry=2),
            trust_env=False,  # a proxy has no part in loopback traffic
        )

    async def publish(self, version):
        """Serve the policy's present weights as `version`, and prove that the server does; AdapterError otherwise.

        The first time, a probe shows that every kind of layer reaches the server.
        """
        self.policy.version = version
        self.served_by = 0
        try:
            await self._surviving(self._in_service)
        except SamplerError as error:
            raise adapters.AdapterError(
                f"version {version} could not be published: {error}; see the server's log"
            ) from None

    async def _in_service(self):
        """Publish unless the server already has the present version."""
        async with self.publishing:
            starts = self.server.starts
            if self.served_by == starts:
                return
            if not self.probed:
                apart = await adapters.probe(self)
                print(f"probe: adapters on {len(apart) - 1} kinds of layers reach the server, whose log-probs are "
                      f"at most {max(apart.values()):.2g} nats per token off the trainer's", flush=True)  # fmt: skip
                self.probed = True
            before, name = self.name, adapters.name_of(self.policy.version)
            target = self.folder / f"step-{self.policy.version:06d}"
            await adapters.load(self, name, adapters.write(self.policy, target, self.server.served.architecture))
            await adapters.prove(self, name)
            self.name, self.served_by = name, starts
            if before not in (None, name):
                await adapters.unload(self, before)
            for path in self.folder.iterdir():  # versions out of service, and what a kill left half written
                if path != target:
                    shutil.rmtree(path)

    async def _surviving(self, action):
        """The result of an action, or of a second try when the connection broke: on a restarted server if it died."""
        starts = self.server.starts
        try:
            return await action()
        except SamplerError as error:
            if error.kind != "server":
                raise
            if self.server.starts == starts:
                await self.server.revive()
        return await action()

    async def sample(self, prompt_ids, *, max_tokens, temperature, seed, slot=None):
        """Sample one continuation of prompt_ids (list of int), up to max_tokens new tokens; slot plays no part.

        Raises SamplerError; ServerError or AdapterError when going on would make no sense.
        """

        async def attempt():
            await self._in_service()
            return await self.complete(self.name, prompt_ids, max_tokens=max_tokens, temperature=temperature, seed=seed)

        return await self._surviving(attempt)

    async def request(self, method, path, body=None):
        """The server's reply to one HTTP request; SamplerError "server" when the connection breaks, or "timeout"."""
        try:
            return await self.client.request(method, self.server.url + path, json=body)
        except httpx.TimeoutException as error:
            raise SamplerError("timeout", f"{path}: no reply in time ({type(error).__name__})") from None
        except httpx.TransportError as error:
            raise SamplerError("server", f"{path}: {type(error).__name__} {error}") from None

    async def complete(self, model, prompt_ids, *, max_tokens, temperature, seed):
        """One request to `model` (the base model or an adapter), one checked Completion.

        Raises SamplerError: server (it broke off, or its engine failed), timeout, too_long, refused, reply, prompt,
        abort, token_id. AdapterError when the server does not know the model, or answers with another.
        """
        body = {
            **PLAIN,
            "model": model,
            "prompt": list(prompt_ids),
            "max_tokens": max_tokens,
            "temperature": temperature,
            "seed": seed,
            # with --generation-config vllm the server knows one of the checkpoint's end ids only
            "stop_token_ids": self.end_ids,
        }
        starts = self.server.starts
        reply = await self.request("POST", "/v1/completions", body)
        if self.server.starts != starts:  # it waited for a connection, and got one to a server without adapters yet
            raise SamplerError("server", "the server was restarted")
        if not reply.is_success:
            raise _refusal(reply, model)
        return self._completion(reply, model, prompt_ids)

    def _completion(self, reply, model, prompt_ids):
        """The checked Completion of a 200 reply."""
        try:
            content = reply.json()
            answered, choice = content["model"], content["choices"][0]
            ids, logprobs = tuple(choice["token_ids"]), tuple(choice["logprobs"]["token_logprobs"])
            text, finish, stop = choice["text"], choice["finish_reason"], choice["stop_reason"]
            echoed = choice["prompt_token_ids"]
        except (ValueError, LookupError, TypeError) as error:
            raise SamplerError("reply", f"not a completion with token ids ({type(error).__name__}: {error})") from None
        if answered != model:
            raise adapters.AdapterError(
                f"asked for {model}, the server answered with {answered}: nothing it samples can be trained on; "
                "use a server of this project's command line (unset VLLM_URL)"
            )
        if echoed != list(prompt_ids):
            raise SamplerError("prompt", f"{len(prompt_ids)} prompt ids were sent, {len(echoed or ())} other ones used")
        if finish not in ("stop", "length"):
            raise SamplerError("abort", f"the server ended the request with finish_reason {finish!r}")
        if odd := [i for i in ids if not 0 <= i < self.vocabulary]:
            raise SamplerError("token_id", f"token id {odd[0]} is outside the vocabulary of {self.vocabulary}")
        # an end-of-turn token arrives as its id
        return Completion(ids, logprobs, text, finish, TOOL_STOP if stop == TOOL_STOP else None)


def _refusal(reply, model):
    """The error of a reply that is not 200."""
    message = adapters.message_of(reply)
    if reply.status_code == 404:
        return adapters.AdapterError(
            f"the server has no adapter {model} ({message}); was it restarted by someone else?"
        )
    if reply.status_code >= 500:
        return SamplerError("server", message)
    return SamplerError("too_long" if "context length" in message else "refused", message)
