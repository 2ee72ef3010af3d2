"""One HTTP layer for tools and judge: turns, retry, size and time caps, keys, and the ledger of calls and cost.

A Wire serves one purpose. A request that fails for a passing reason is sent again here and nowhere else; what
comes out is a Received, a CallFailure (this call gave nothing) or an AccountError (no later call can succeed).
Keys are read from the environment when they are used, and are blacked out of everything that comes back.
"""

import asyncio
import email.utils
import json
import os
import random
import re
import time
import zlib
from dataclasses import dataclass
from http.cookiejar import CookieJar, DefaultCookiePolicy
from urllib.parse import urlsplit

import httpx

import config
from ledger import LEDGER
from pace import Gate, time_limit
from protocol import clean

PASSING = frozenset({408, 425, 429, *range(500, 600)})  # statuses worth another try; 52x and 529 are among them
ACCOUNT = frozenset({401, 402, 403})  # statuses that blame the key or the balance
# The same, said by other statuses: Serper's 400, OpenAI's 429, Aliyun's 400.
_SPENT = re.compile(r"not enough credits|insufficient[ _](quota|balance|credits?|funds)|arrearage", re.IGNORECASE)
CONNECT_TIMEOUT = 10  # seconds
BODY_SAID = 2000  # bytes of a failed reply that are kept
_jitter = random.Random()  # its own, so that no seeded generator moves


class CallFailure(Exception):
    """One call gave nothing usable. kind: one word for counters; the message is fit for the policy to read.

    status: the HTTP status, 0 when there was none. body: the start of a failed reply. passing: worth another
    try. wait: seconds the server asked for.
    """

    def __init__(self, kind, message, *, status=0, body="", passing=False, wait=0.0):
        super().__init__(message)
        self.kind, self.status, self.body, self.passing, self.wait = kind, status, body, passing, wait

    @property
    def final(self):
        """True when the server faults the request itself, so that asking again cannot help."""
        return 400 <= self.status < 500 and self.status not in PASSING


class AccountError(RuntimeError):
    """A key is missing or refused, or a balance or quota is spent: the run stops, the message names the remedy.

    status: the HTTP status that said so, 0 when nothing was asked.
    """

    def __init__(self, message, status=0):
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Received:
    """A reply below status 400; content is decompressed, header names are lower-case."""

    status: int
    headers: dict[str, str]
    content: bytes

    def json(self):
        """The body as a dict. Raises CallFailure("bad_reply") when it is anything else."""
        try:
            value = json.loads(self.content)
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            raise CallFailure("bad_reply", "the service did not answer with a JSON object", status=self.status)
        return value


@dataclass(frozen=True)
class Key:
    """Where a key is read (the first variable that is set) and how it is sent. optional: go without when none is."""

    variables: tuple[str, ...]
    header: str = "Authorization"
    prefix: str = "Bearer "
    optional: bool = False

    def read(self):
        """The key, "" when an optional one is not set. Raises AccountError when it is missing or not a key's text."""
        name, value = next(
            ((v, os.environ[v].strip()) for v in self.variables if os.environ.get(v, "").strip()), ("", "")
        )
        if not value and not self.optional:
            raise AccountError(f"no key: set the environment variable {' or '.join(self.variables)}")
        if not re.fullmatch(r"[!-~]*", value):  # an HTTP library would quote the whole header in its error
            raise AccountError(
                f"the environment variable {name} holds blanks or non-ASCII characters; set the bare key"
            )
        return value


def retry_after(headers, now=None):
    """Seconds a reply asks to wait (retry-after-ms, or Retry-After as seconds or HTTP date), 0..RETRY_AFTER_CAP.

    0.0 when it asks for nothing, or for something unreadable. now: seconds since the epoch.
    """
    asked = headers.get("retry-after", "").strip()
    milliseconds = headers.get("retry-after-ms", "").strip()
    if re.fullmatch(r"\d{1,12}(\.\d{1,12})?", milliseconds, re.ASCII):
        seconds = float(milliseconds) / 1000
    elif re.fullmatch(r"\d{1,12}(\.\d{1,12})?", asked, re.ASCII):
        seconds = float(asked)
    else:
        date = email.utils.parsedate_tz(asked)
        try:
            seconds = email.utils.mktime_tz(date) - (time.time() if now is None else now) if date else 0.0
        except (ValueError, OverflowError):  # a 32nd of a month, a year 0
            seconds = 0.0
    return float(min(max(seconds, 0.0), config.RETRY_AFTER_CAP))


def backoff(attempt):
    """Seconds before attempt n+1: RETRY_PAUSE, doubled every time, times a random 0.5..1.5."""
    return config.RETRY_PAUSE * 2 ** (attempt - 1) * (0.5 + _jitter.random())


class Wire:
    """Requests of one purpose ("search", "reader", "judge"), each host with its own Gate.

    key: a Key or None. seconds: of one request with its retries, waiting for a turn excluded. account: statuses
    that blame the account; an empty set for web pages, whose statuses blame nobody. remedy: what to do then.
    many_hosts: the hosts are whatever comes along: booked together as "any", and no connection is kept open, since
    one kept for an address is bound to the name it was opened for.
    """

    def __init__(self, purpose, *, seconds, concurrency, per_minute=0, key=None, account=ACCOUNT, remedy="",
                 trust_env=True, many_hosts=False):  # fmt: skip
        self.purpose, self.seconds, self.key, self.account, self.remedy = purpose, seconds, key, account, remedy
        self._concurrency, self._per_minute = concurrency, per_minute
        self._trust_env, self._many_hosts = trust_env, many_hosts
        self._gates, self._client = {}, None

    async def close(self):
        """Close idle connections; the next request opens new ones."""
        if self._client is not None:
            await self._client.aclose()
            self._client = None

    def count_tokens(self, url, input_tokens, output_tokens=0):
        """Book tokens that a reply says it used."""
        self._row(urlsplit(url).hostname).count_tokens(input_tokens, output_tokens)

    def _row(self, host):
        return LEDGER.row(self.purpose, "any" if self._many_hosts else host)

    async def request(self, method, url, *, host=None, tries=None, inspect=None, max_bytes=None, **options):
        """Send until it succeeds or has failed config.WIRE_TRIES (or `tries`) times; returns a Received.

        host: name used for turns, counting and messages when the URL holds a bare address. inspect: called with
        the httpx response before its body is read; may raise CallFailure. max_bytes: of the decompressed body.
        options: headers, params, json, extensions of httpx. Raises CallFailure or AccountError.
        """
        host, tries = host or urlsplit(url).hostname, tries or config.WIRE_TRIES
        row = self._row(host)
        row.calls += 1
        try:
            async with time_limit(self.seconds):
                return await self._persist(method, url, host, tries, row, inspect, max_bytes, options)
        except TimeoutError:
            row.failures += 1
            raise CallFailure("timeout", f"no answer from {host} within {self.seconds} seconds") from None
        except (CallFailure, AccountError):
            row.failures += 1
            raise

    async def _persist(self, method, url, host, tries, row, inspect, max_bytes, options):
        gate = self._gates.setdefault(host, Gate(self._concurrency, self._per_minute))
        for attempt in range(1, tries + 1):
            try:
                async with gate.turn():
                    started = time.monotonic()
                    received = await self._send(method, url, host, inspect, max_bytes, options)
                    row.seconds.append(time.monotonic() - started)
                    return received
            except CallFailure as failure:
                if not failure.passing or attempt == tries:
                    raise
                gate.hold(failure.wait)
            row.retries += 1
            await asyncio.sleep(backoff(attempt))
        raise AssertionError("the last attempt returns or raises")

    async def _send(self, method, url, host, inspect, max_bytes, options):
        """One attempt: the Received, or CallFailure or AccountError."""
        secret = self.key.read() if self.key else ""
        headers = {"User-Agent": user_agent(), "Accept-Encoding": "gzip", **options.get("headers", {})}
        if "json" in options:  # encoded here, because a lone surrogate in a model's text would not encode
            options = {**options, "content": json.dumps(options["json"], ensure_ascii=False).encode("utf-8", "replace")}
            headers["Content-Type"] = "application/json"
            del options["json"]
        if secret:
            headers[self.key.header] = self.key.prefix + secret
        try:
            async with self._open().stream(method, url, **{**options, "headers": headers}) as response:
                failed = response.status_code >= 400
                if inspect and not failed:
                    inspect(response)
                content = await read_body(response, BODY_SAID if failed else max_bytes or config.WIRE_BYTES, cut=failed)
        except (httpx.UnsupportedProtocol, httpx.LocalProtocolError):
            raise CallFailure("bad_url", f"{host} cannot be asked: the address or a header is malformed") from None
        except httpx.TimeoutException as error:
            raise CallFailure("timeout", f"{host}: {type(error).__name__}", passing=True) from None
        except httpx.TransportError as error:
            raise CallFailure("connection", f"{host}: {type(error).__name__}", passing=True) from None
        if secret:
            content = content.replace(secret.encode(), b"[key]")
        if failed:
            raise self._failure(response, host, content)
        return Received(response.status_code, {k.lower(): v for k, v in response.headers.items()}, content)

    def _open(self):
        """The client, made at the first request: inside the event loop that uses it."""
        if self._client is None:
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=0 if self._many_hosts else 32)
            self._client = httpx.AsyncClient(
                trust_env=self._trust_env,
                limits=limits,
                timeout=httpx.Timeout(self.seconds, connect=CONNECT_TIMEOUT),
                cookies=CookieJar(DefaultCookiePolicy(allowed_domains=[])),  # none is kept
            )
        return self._client

    def _failure(self, response, host, content):
        """The exception a status of 400 and above comes to."""
        status, body = response.status_code, clean(content.decode("utf-8", "replace"))
        said = " ".join([f"{host} answers {status}", *filter(None, [error_said(body)])])
        if status in self.account or (self.account and _SPENT.search(body)):
            named = f"the key in {' or '.join(self.key.variables)}, or its balance" if self.key else "access"
            return AccountError(f"{self.purpose}: {said}. {self.remedy or f'Check {named}'}", status)
        return CallFailure(f"http_{status}", said, status=status, body=body, passing=status in PASSING,
                           wait=retry_after(response.headers))  # fmt: skip


def user_agent():
    """How we introduce ourselves everywhere; Wikipedia asks for a contact."""
    return f"tournament-grpo/1.0 ({config.CONTACT or 'no contact given'}) httpx/{httpx.__version__}"


async def read_body(response, limit, *, cut=False):
    """The body of an httpx response, gunzipped as it comes so that `limit` bounds what is held, in bytes.

    cut: keep the first `limit` bytes. Otherwise a longer one raises CallFailure("too_large").
    """
    coding = response.headers.get("content-encoding", "").strip().lower()
    if coding not in ("", "identity", "gzip", "x-gzip", "deflate"):
        raise CallFailure("encoding", f"the reply came compressed as {coding[:20]!r}, which was not asked for")
    inflater = zlib.decompressobj(47) if coding not in ("", "identity") else None  # 47: zlib or gzip, by its header
    content = bytearray()
    try:
        async for chunk in response.aiter_raw():
            content += inflater.decompress(chunk, limit + 1 - len(content)) if inflater else chunk
            if len(content) > limit:
                if cut:
                    break
                raise CallFailure("too_large", f"the page is larger than {limit:,} bytes", status=response.status_code)
    except zlib.error:
        raise CallFailure("encoding", "the reply's compression is damaged", status=response.status_code) from None
    return bytes(content[:limit])


def error_said(body):
    """The message inside an error body, whatever the service calls it; "" when it holds none."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return ""
    for name in ("error", "detail", "readableMessage", "message", "info", "msg"):
        while isinstance(value, list) and value:
            value = value[0]
        if isinstance(value, dict) and value.get(name):
            value = value[name]
    return " ".join(value.split())[:200] if isinstance(value, str) else ""
