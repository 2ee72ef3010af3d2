"""Loopback HTTP peers that speak the services' wire formats and keep what they were asked."""

import contextlib
import json
import threading
import time
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass(frozen=True)
class Asked:
    """One request as it arrived; header names in lower case; `json` is None for a body that is none."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self):
        return json.loads(self.body) if self.body else None


class Peer:
    """A server that answers with `script`: a list of replies, the last one for ever, or a function of the Asked.

    A reply is (status, headers, body): body bytes, text, something to send as JSON, or a float of seconds to be
    silent before the connection is closed. tls: an ssl.SSLContext to speak https with.
    """

    def __init__(self, *script, tls=None):
        self.script, self.asked, self.tls = list(script), [], tls

    def __enter__(self):
        peer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_):
                """Quiet."""

            def answer(self):
                length = int(self.headers.get("Content-Length") or 0)
                asked = Asked(self.command, self.path, {k.lower(): v for k, v in self.headers.items()},
                              self.rfile.read(length))  # fmt: skip
                peer.asked.append(asked)
                with contextlib.suppress(ConnectionError):
                    self.send(*peer.next(asked))

            def send(self, status, headers, body):
                if isinstance(body, float):
                    time.sleep(body)
                    self.close_connection = True
                    return
                if not isinstance(body, bytes):
                    body = (body if isinstance(body, str) else json.dumps(body)).encode()
                self.send_response(status)
                for name, value in {"Content-Type": "application/json", **headers}.items():
                    if value is not None:
                        self.send_header(name, value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_GET = do_POST = answer

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        if self.tls:
            self.server.socket = self.tls.wrap_socket(self.server.socket, server_side=True)
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()
        self.port = self.server.server_address[1]
        self.url = f"http{'s' if self.tls else ''}://127.0.0.1:{self.port}"
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()

    def next(self, asked):
        if callable(self.script[0]):
            return self.script[0](asked)
        return self.script.pop(0) if len(self.script) > 1 else self.script[0]


def ok(body):
    return 200, {}, body


def chat_reply(content, model, *, finish="stop", **message):
    """A chat completion as OpenAI-compatible servers send it."""
    choice = {"index": 0, "finish_reason": finish, "message": {"role": "assistant", "content": content, **message}}
    return {"id": "chatcmpl-1", "object": "chat.completion", "created": 1790000000, "model": model, "choices": [choice],
            "usage": {"prompt_tokens": 900, "completion_tokens": 12, "total_tokens": 912}}  # fmt: skip


def jina_reply(**data):
    """A page as Jina Reader sends it."""
    page = {"title": "T", "description": "", "url": "https://e.org/", "content": "C", "usage": {"tokens": 345}, **data}
    return {"code": 200, "status": 20000, "data": page, "meta": {"usage": {"tokens": 345}}}
