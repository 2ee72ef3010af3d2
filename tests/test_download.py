"""download.py against a real HTTP server on the loopback interface, which can break, ignore ranges, or refuse them."""

import hashlib
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

import config
import download

CONTENT = bytes(range(256)) * 40  # 10,240 bytes; no two neighbours alike, so a wrong join shows
BLOB_ID = hashlib.sha1(b"blob 10240\0" + CONTENT).hexdigest()


class Peer(ThreadingHTTPServer):
    """Serves `files` (URL path -> bytes) and notes (path, Range header) of every request.

    cuts: how many bytes the next replies send before the connection breaks, None for all.
    """

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files, self.requests, self.headers_seen, self.cuts = {}, [], [], []
        self.honours_range, self.pause = True, 0

    def handle_error(self, *_):
        """Clients that hang up are what some tests are about."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        peer, wanted = self.server, self.headers.get("Range")
        peer.requests.append((self.path, wanted))
        peer.headers_seen.append(self.headers)
        time.sleep(peer.pause)
        content = peer.files.get(self.path)
        start = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted and peer.honours_range else 0
        if content is None or start >= len(content):
            self.send_response(404 if content is None else 416)
            self.send_header("Content-Length", "0")
            return self.end_headers()
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        cut = peer.cuts.pop(0) if peer.cuts else None
        self.wfile.write(content[start:][:cut])
        self.close_connection = cut is not None

    def log_message(self, *_):
        pass


@pytest.fixture
def peer(monkeypatch):
    server = Peer()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(download, "DATA_BASE_URL", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(config, "DATA_REPOSITORY", "owner/name")
    monkeypatch.setattr(config, "DATA_COMMIT", "c0ffee")
    server.files["/owner/name/c0ffee/data/f.bin"] = CONTENT
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def fetch(tmp_path, blob_id=BLOB_ID):
    download.fetch("data/f.bin", tmp_path / "raw" / "f.bin", blob_id)


def ranges(peer):
    return [wanted for _, wanted in peer.requests]


def the_one_line(failure):
    message = str(failure.value)
    assert "\n" not in message
    return message


def test_blob_id_is_the_one_git_prints(tmp_path):
    (tmp_path / "f").write_bytes(b"")
    assert download.git_blob_id(tmp_path / "f") == "e69de29bb2d1d6434b8b29ae775ad8c2e48c5391"  # git hash-object
    (tmp_path / "f").write_bytes(b"test content\n")
    assert download.git_blob_id(tmp_path / "f") == "d670460b4b4aece5915caf5c68d12f560a9fe3e4"


def test_a_file_is_fetched_once(peer, tmp_path):
    fetch(tmp_path)
    fetch(tmp_path)
    assert (tmp_path / "raw" / "f.bin").read_bytes() == CONTENT
    assert peer.requests == [("/owner/name/c0ffee/data/f.bin", None)]
    assert [path.name for path in (tmp_path / "raw").iterdir()] == ["f.bin"]


def test_the_reply_is_asked_for_uncompressed(peer, tmp_path):
    fetch(tmp_path)
    assert peer.headers_seen[0]["Accept-Encoding"] == "identity"


def test_a_wrong_file_in_place_is_replaced(peer, tmp_path):
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "f.bin").write_bytes(b"version https://git-lfs")
    fetch(tmp_path)
    assert (tmp_path / "raw" / "f.bin").read_bytes() == CONTENT


def test_a_broken_transfer_goes_on_where_it_broke(peer, tmp_path):
    peer.cuts = [1000, 5]
    fetch(tmp_path)
    assert (tmp_path / "raw" / "f.bin").read_bytes() == CONTENT
    assert ranges(peer) == [None, "bytes=1000-", "bytes=1005-"]


def test_without_progress_it_stops_and_the_next_call_resumes(peer, tmp_path):
    peer.cuts = [1000, 0]
    with pytest.raises(SystemExit) as failure:
        fetch(tmp_path)
    message = the_one_line(failure)
    assert "c0ffee/data/f.bin" in message and "--train" in message and "run again" in message
    assert not (tmp_path / "raw" / "f.bin").exists()
    assert (tmp_path / "raw" / "f.bin.part").read_bytes() == CONTENT[:1000]
    fetch(tmp_path)
    assert ranges(peer) == [None, "bytes=1000-", "bytes=1000-"]
    assert (tmp_path / "raw" / "f.bin").read_bytes() == CONTENT


def test_a_server_that_ignores_the_range_starts_over(peer, tmp_path):
    peer.cuts, peer.honours_range = [1000], False
    fetch(tmp_path)
    assert ranges(peer) == [None, "bytes=1000-"]
    assert (tmp_path / "raw" / "f.bin").read_bytes() == CONTENT


def test_a_part_longer_than_the_file_is_refused_with_416_and_starts_over(peer, tmp_path):
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "f.bin.part").write_bytes(CONTENT + b"more")
    fetch(tmp_path)
    assert ranges(peer) == ["bytes=10244-", None]
    assert (tmp_path / "raw" / "f.bin").read_bytes() == CONTENT


def test_a_complete_part_needs_no_request(peer, tmp_path):
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "f.bin.part").write_bytes(CONTENT)
    fetch(tmp_path)
    assert peer.requests == []
    assert (tmp_path / "raw" / "f.bin").read_bytes() == CONTENT


def test_wrong_content_is_named_with_both_ids_and_removed(peer, tmp_path):
    with pytest.raises(SystemExit) as failure:
        fetch(tmp_path, blob_id="0" * 40)
    message = the_one_line(failure)
    assert "data/f.bin" in message and BLOB_ID in message and "0" * 40 in message
    assert list((tmp_path / "raw").iterdir()) == []


def test_a_part_of_another_file_ends_in_the_id_error_then_a_clean_start(peer, tmp_path):
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "f.bin.part").write_bytes(b"of an older commit")
    with pytest.raises(SystemExit, match="git blob id"):
        fetch(tmp_path)
    fetch(tmp_path)
    assert (tmp_path / "raw" / "f.bin").read_bytes() == CONTENT


def test_a_missing_file_is_one_line(peer, tmp_path):
    peer.files.clear()
    with pytest.raises(SystemExit) as failure:
        fetch(tmp_path)
    assert "404" in the_one_line(failure) and len(peer.requests) == 1


def test_a_silent_server_is_one_line(peer, tmp_path, monkeypatch):
    peer.pause = 0.5
    monkeypatch.setattr(download, "DATA_TIMEOUT", 0.1)
    with pytest.raises(SystemExit) as failure:
        fetch(tmp_path)
    assert "timed out" in the_one_line(failure)


def test_no_server_is_one_line(peer, tmp_path, monkeypatch):
    monkeypatch.setattr(download, "DATA_BASE_URL", "http://127.0.0.1:9")  # the discard port: nobody listens
    with pytest.raises(SystemExit) as failure:
        fetch(tmp_path)
    message = the_one_line(failure)
    assert "Connection refused" in message and str(tmp_path / "raw" / "f.bin") in message


def test_fetch_all_puts_each_file_where_the_table_says(peer, tmp_path, monkeypatch):
    peer.files["/owner/name/c0ffee/deep/q.jsonl"] = b"test content\n"
    table = {"raw": {"data/f.bin": BLOB_ID}, "b": {"deep/q.jsonl": "d670460b4b4aece5915caf5c68d12f560a9fe3e4"}}
    monkeypatch.setattr(download, "AUTHORS_FILES", table)
    targets = download.fetch_all(tmp_path)
    assert targets == {"data/f.bin": tmp_path / "raw/f.bin", "deep/q.jsonl": tmp_path / "b/q.jsonl"}
    assert all(target.exists() for target in targets.values())
