"""A process that behaves like a vLLM server from outside, and dies as badly as it can.

    python tests/fake_vllm.py BEHAVIOUR --port PORT --served-model-name NAME MARK ...

BEHAVIOUR: serves; stubborn (serves, and ignores SIGTERM); never (stays silent, and ignores SIGTERM); dies (at once,
with a message). It forks a worker, which always ignores SIGTERM.
"""

import argparse
import json
import os
import signal
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        models = [{"id": name, "parent": None, "max_model_len": 4096} for name in self.server.names]
        body = json.dumps({"data": models} if self.path == "/v1/models" else {}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("behaviour")
    parser.add_argument("--port", type=int)
    parser.add_argument("--served-model-name", nargs="+")
    arguments, _ = parser.parse_known_args()
    print({name: os.environ.get(name) for name in ("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "PYTHONSAFEPATH")}, flush=True)
    if arguments.behaviour == "dies":
        sys.exit("torch.OutOfMemoryError: no memory left")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if os.fork() == 0 or arguments.behaviour == "never":
        time.sleep(600)
    if arguments.behaviour == "serves":
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    server = HTTPServer(("127.0.0.1", arguments.port), Handler)
    server.names = arguments.served_model_name
    server.serve_forever()


if __name__ == "__main__":
    main()
