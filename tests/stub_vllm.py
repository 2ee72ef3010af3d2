"""A loopback peer with vLLM's wire format, answering in this process: faithfully, or with a fault of one's choice."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch
from safetensors.torch import load_file

import adapters
from policy import Policy


class Stub(ThreadingHTTPServer):
    """Lists and loads adapters as vLLM does; `complete(body)` gives (status, reply) of a completion.

    requests: every (path, body) in order. refuse_loads: (status, reply) for every load instead of loading.
    """

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.base, self.starts, self.served = "base", 1, adapters.ServedModel("Qwen3ForCausalLM", ())
        self.listed, self.requests, self.refuse_loads, self.revived = {}, [], None, 0
        self.complete = lambda body: (200, reply_to(body, [5, 6, 7], [-0.5, -1.0, 0.0]))
        threading.Thread(target=self.serve_forever, daemon=True).start()

    async def revive(self):
        self.revived += 1

    def load(self, body):
        if self.refuse_loads:
            return self.refuse_loads
        if body["lora_name"] in self.listed:
            return 400, error(f"The lora adapter '{body['lora_name']}' has already been loaded.")
        self.listed[body["lora_name"]] = body["lora_path"]
        return 200, "Success"

    def unload(self, body):
        known = self.listed.pop(body["lora_name"], None)
        return (200, "Success") if known else (404, error("not found"))

    def bodies(self, path):
        return [body for where, body in self.requests if where == path]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        models = [{"id": "base", "root": "somewhere", "parent": None}]
        models += [{"id": name, "root": path, "parent": "base"} for name, path in self.server.listed.items()]
        self.answer(200, {"data": models})

    def do_POST(self):
        stub, body = self.server, json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        stub.requests.append((self.path, body))
        routes = {
            "/v1/load_lora_adapter": stub.load,
            "/v1/unload_lora_adapter": stub.unload,
            "/v1/completions": stub.complete,
        }
        answered = routes[self.path](body)
        if answered is None:  # hang up without a word
            self.close_connection = True
            return
        self.answer(*answered)

    def answer(self, status, content):
        data = content.encode() if isinstance(content, str) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


def error(message):
    return {"error": {"message": message, "type": "BadRequestError", "param": None, "code": 400}}


def reply_to(body, ids, values, **choice):
    """A completion as vLLM 0.32 writes it."""
    choice = {
        "index": 0,
        "text": "some text",
        "token_ids": ids,
        "prompt_token_ids": body["prompt"],
        "logprobs": {"token_logprobs": values, "tokens": [""] * len(ids)},
        "finish_reason": "stop",
        "stop_reason": None,
        **choice,
    }
    return {"id": "cmpl-1", "object": "text_completion", "model": body["model"], "choices": [choice]}


class Oracle:
    """A second copy of the policy that plays the server's model: adapters from their files, log-probs of its own.

    faults: "ignores" adapters; "stale": the first weights ever loaded stay; "wrapper": only keys with
    "language_model." match a module, as in a multimodal class, the others are ignored without a word.
    """

    def __init__(self, stub, fault=None):
        self.stub, self.fault = stub, fault
        self.policy = Policy()
        self.first = {}
        stub.complete = self.complete

    def weights(self, model):
        if model == self.stub.base or self.fault == "ignores":
            return {}
        tensors = load_file(f"{self.stub.listed[model]}/adapter_model.safetensors")
        if self.fault == "stale" and not model.startswith("probe"):
            self.first = self.first or tensors
            tensors = self.first
        if self.fault == "wrapper":
            return {k.replace("language_model.", ""): v for k, v in tensors.items() if "language_model." in k}
        return tensors

    @torch.no_grad()
    def complete(self, body):
        served = self.weights(body["model"])
        for name, parameter in self.policy.parameters.items():
            parameter.copy_(served.get(name.replace(".default", ""), torch.zeros(())))
        torch.manual_seed(body["seed"])
        ids = torch.randint(0, 1000, (body["max_tokens"],)).tolist()
        start = len(body["prompt"])
        row = adapters.Row([*body["prompt"], *ids], list(range(start, start + len(ids))), body["temperature"])
        logprobs = self.policy.logprobs([row]).tolist()
        return 200, reply_to(body, ids, logprobs, finish_reason="length")
