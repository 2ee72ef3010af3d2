"""The judge as a chat model behind any OpenAI-compatible server, and what every HTTP judge shares.

A back end has a `name` (what identifies the judge), `concurrency`, `prompt(ask)` (what the verdict on an asks.Ask
depends on, as JSON) and `async reply(ask)`, which returns a Reply or raises CallFailure: "too_long" and
"content_filter" blame the content, any other kind the service.
"""

import asyncio
import ipaddress
import json
import re
from dataclasses import dataclass
from urllib.parse import urlsplit

import asks
import config
from verdicts import as_dict
from wire import AccountError, CallFailure, Key, Wire, error_said

REFUSALS = ("too_long", "content_filter")  # kinds of failure that asking again cannot mend
_TOO_LONG = re.compile(
    r"context.?(length|window|size)|max_tokens_exceeded|too many (input |prompt )?tokens|"
    r"(prompt|input|request|message)s? (is|are) too (long|large)|maximum (input|prompt|model) length",
    re.IGNORECASE,
)
_MODERATED = re.compile(
    r"content.?(filter|policy|management)|moderat|flagged|data_inspection_failed|content exists risk|"
    r"inappropriate content|sensitive (content|information|words)",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Reply:
    """What a judge sent. finish: "stop", "length", "content_filter", "foreign_model" (another model answered), or
    whatever else the server says. model: the one that answered, by its own account."""

    raw: str
    model: str = ""
    input_tokens: int = 0
    output_tokens: int = 0
    finish: str = "stop"


def is_loopback(url):
    """True when a URL's host is this machine: no proxy leads there."""
    host = urlsplit(url).hostname or ""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def checked_url(constant, url):
    """The address without a trailing slash; ValueError, naming the constant, when it is none."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{constant} = {url!r} is not an http or https address")
    return url.rstrip("/")


def blame(failure):
    """The failure under the kind that says whose fault it is: too_long, content_filter, or its own."""
    if failure.status == 413 or (failure.status in (400, 422) and _TOO_LONG.search(failure.body)):
        return CallFailure("too_long", str(failure), status=failure.status)
    if failure.status in (400, 403, 422, 451) and _MODERATED.search(failure.body):
        return CallFailure("content_filter", str(failure), status=failure.status)
    return failure


def count(value):
    """A reply's token count, 0 for anything that is none."""
    return value if isinstance(value, int) and value > 0 else 0


async def persist(ask, tries, revive=None):
    """Ask a judge until it decides: (what it decided, None, attempts), or (None, the last error, attempts).

    ask: async, attempt number (from 1) -> (decision, None) or (None, error with `kind` and `final`). A refusal or a
    final error is the last one. revive: async, awaited before the next attempt when the connection broke.
    """
    for attempt in range(1, tries + 1):
        decided, error = await ask(attempt)
        if error is None or error.kind in REFUSALS or error.final or attempt == tries:
            return decided, error, attempt
        if error.kind == "connection" and revive:
            await revive()
        await asyncio.sleep(config.JUDGE_PAUSE * attempt)
    raise ValueError(f"tries must be at least 1, got {tries}")


class ChatJudge:
    """A chat model behind /v1/chat/completions, at temperature 0 with the authors' other settings.

    server_url: of the policy's server, used when config.JUDGE_URL is empty; server_model: its base model's name there.
    Raises ValueError for an address that is none.
    """

    prompt = staticmethod(asks.render)

    def __init__(self, server_url="", server_model=""):
        url = checked_url("config.JUDGE_URL", config.JUDGE_URL or server_url)
        self.url = f"{url}/chat/completions" if urlsplit(url).path else f"{url}/v1/chat/completions"
        self.model = config.JUDGE_MODEL or (server_model if not config.JUDGE_URL else "") or config.MODEL
        self.name, self.concurrency = f"openai:{self.model}", config.JUDGE_CONCURRENCY
        local = is_loopback(url)
        self._key = Key(("JUDGE_API_KEY",) if local else ("JUDGE_API_KEY", "OPENAI_API_KEY"), optional=True)
        self._wire = Wire("judge", seconds=config.JUDGE_TIMEOUT, concurrency=self.concurrency, key=self._key,
                          account=frozenset({401, 402}), trust_env=not local)  # fmt: skip
        self.close = self._wire.close
        self._enforces_schemas = True  # until the server refuses one

    async def reply(self, ask):
        """The Reply to one Ask."""
        return await self.chat(self.prompt(ask), schema=asks.schema(ask))

    async def chat(self, messages, *, schema=None, max_tokens=None):
        """The Reply to any messages; the server holds it to the JSON schema if it can. Raises as `reply` does."""
        body = {"model": self.model, "messages": messages, "temperature": 0, "top_p": config.JUDGE_TOP_P,
                "max_tokens": max_tokens or config.JUDGE_MAX_TOKENS}  # fmt: skip
        if config.JUDGE_THINKING_OFF:
            body["chat_template_kwargs"] = {"enable_thinking": False}
        if schema is None or not self._enforces_schemas:
            return await self._send(body)
        wrapped = {"type": "json_schema", "json_schema": {"name": "reply", "strict": True, "schema": schema}}
        try:
            return await self._send({**body, "response_format": wrapped})
        except CallFailure as failure:
            if failure.status not in (400, 422) or failure.kind in REFUSALS:
                raise
        reply = await self._send(body)  # a server that knows no schemas; the parser checks the reply anyhow
        self._enforces_schemas = False
        return reply

    async def _send(self, body):
        try:
            reply = (await self._wire.request("POST", self.url, json=body)).json()
        except CallFailure as failure:
            blamed = blame(failure)
            if blamed.status == 403 and blamed.kind not in REFUSALS:
                names = " or ".join(self._key.variables)
                raise AccountError(f"judge: {failure}. Check the key in {names}", 403) from None
            raise blamed from None
        return self._read(reply)

    def _read(self, reply):
        usage, choices = as_dict(reply.get("usage")), reply.get("choices")
        choice = as_dict(choices[0]) if isinstance(choices, list) and choices else None
        if choice is None:
            raise CallFailure("no_choice", error_said(json.dumps(reply)) or "the reply holds no choice")
        tokens = count(usage.get("prompt_tokens")), count(usage.get("completion_tokens"))
        self._wire.count_tokens(self.url, *tokens)
        message, model = as_dict(choice.get("message")), str(reply.get("model") or "")
        finish = str(choice.get("finish_reason") or "stop")
        if not _same_model(self.model, model):
            finish = "foreign_model"
        elif message.get("refusal"):
            finish = "content_filter"
        content = message.get("content")  # null after thinking that used up the tokens; never read the thinking
        return Reply(content if isinstance(content, str) else "", model, *tokens, finish)


def _same_model(asked, answered):
    """True for the model that was asked for, or a dated version of it (gpt-x for gpt-x-2026-05-01)."""
    return bool(re.fullmatch(re.escape(asked) + r"([-@]\d[\d.-]*)?", answered))
