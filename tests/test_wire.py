"""wire.py, pace.py, ledger.py: retry, Retry-After, turns, caps, keys, the ledger."""

import asyncio
import email.utils
import gzip
import json
import logging
import time
import traceback
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st
from peers import Peer, ok

import config
import wire
from ledger import LEDGER, cost_rows
from pace import Gate, time_limit
from wire import AccountError, CallFailure, Key, Wire, backoff, retry_after

SECRET = "sk-test-1234567890"
BUSY = (503, {}, "")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    config.RETRY_PAUSE = 0.001
    monkeypatch.setenv("A_KEY", SECRET)
    LEDGER.clear()


def get(peer, *, key=None, times=1, path="/", **options):
    """What `times` requests over one Wire come to: the last Received, or the exception."""
    made = {
        name: options.pop(name) for name in ("account", "concurrency", "per_minute", "trust_env") if name in options
    }
    layer = Wire("search", seconds=options.pop("seconds", 10), key=key, **{"concurrency": 4, **made})

    async def run():
        try:
            for _ in range(times):
                received = await layer.request("GET", peer.url + path, **options)
            return received
        finally:
            await layer.close()

    return asyncio.run(run())


def row():
    (summary,) = LEDGER.summary()
    return summary


# ---- retry ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [408, 425, 429, 500, 502, 503, 504, 520, 524, 529])
def test_passing_statuses_are_tried_again(status):
    with Peer((status, {}, ""), ok({"a": 1})) as peer:
        assert get(peer).json() == {"a": 1} and len(peer.asked) == 2
    assert (row()["calls"], row()["retries"], row()["failures"]) == (1, 1, 0)


@pytest.mark.parametrize("status", [400, 404, 409, 410, 413, 422, 451])
def test_other_statuses_fail_at_once(status):
    with Peer((status, {}, {"message": "no such thing"})) as peer, pytest.raises(CallFailure) as caught:
        get(peer)
    assert (caught.value.kind, len(peer.asked)) == (f"http_{status}", 1)
    assert str(caught.value) == f"127.0.0.1 answers {status} no such thing"
    assert row()["failures"] == 1


def test_a_service_that_stays_busy_is_given_up_after_the_configured_tries():
    config.WIRE_TRIES = 3
    with Peer(BUSY) as peer, pytest.raises(CallFailure, match="503"):
        get(peer)
    assert len(peer.asked) == 3 and (row()["retries"], row()["failures"], row()["p50"]) == (2, 1, None)


def test_a_refused_connection_and_one_cut_off_are_tried_again():
    with Peer((200, {}, 0.0), ok({})) as peer:
        assert get(peer).status == 200 and len(peer.asked) == 2
    with pytest.raises(CallFailure) as caught:
        get(peer)  # it is closed now
    assert caught.value.kind == "connection" and row()["retries"] == 1 + config.WIRE_TRIES - 1


def test_a_silent_service_is_cut_off_in_time():
    started = time.monotonic()
    with Peer((200, {}, 2.0)) as peer, pytest.raises(CallFailure, match="within 0.3 seconds") as caught:
        get(peer, seconds=0.3)
    assert caught.value.kind == "timeout" and time.monotonic() - started < 4


def test_pauses_double_and_vary():
    config.RETRY_PAUSE = 1.0
    drawn = [backoff(3) for _ in range(500)]
    assert 2 <= min(drawn) < 2.2 and 5.8 < max(drawn) <= 6


# ---- Retry-After ---------------------------------------------------------------------------------


def test_retry_after_is_a_lower_bound():
    with Peer((429, {"Retry-After": "0.4"}, ""), ok({})) as peer:
        started = time.monotonic()
        get(peer)
        assert time.monotonic() - started >= 0.4


def test_retry_after_is_capped_and_does_not_eat_the_time_limit():
    config.RETRY_AFTER_CAP = 0.5
    with Peer((503, {"Retry-After": "86400"}, ""), ok({})) as peer:
        started = time.monotonic()
        assert get(peer, seconds=0.3).status == 200  # waiting out of turn: the limit's clock stood still
        assert 0.5 <= time.monotonic() - started < 5


@given(st.integers(-(10**6), 10**6), st.integers(0, 4 * 10**9))
def test_http_dates_count_from_now(offset, now):
    date = email.utils.formatdate(now + offset, usegmt=True)
    assert retry_after({"retry-after": date}, now) == min(max(offset, 0), config.RETRY_AFTER_CAP)


@given(st.integers(0, 10**11))
def test_seconds_are_read_up_to_the_cap(seconds):
    assert retry_after({"retry-after": f" {seconds} "}) == min(seconds, config.RETRY_AFTER_CAP)
    assert retry_after({"retry-after-ms": str(seconds)}) == min(seconds / 1000, config.RETRY_AFTER_CAP)


@given(
    st.one_of(st.text(), st.from_regex(r"(Mon, )?\d+ (Jan|Feb|Xyz) -?\d+ \d+:\d+:\d+( GMT| \+\d+)?", fullmatch=True))
)
def test_any_retry_after_is_a_number_within_the_cap(text):
    assert 0 <= retry_after({"retry-after": text}) <= config.RETRY_AFTER_CAP


@pytest.mark.parametrize("text", ["", "-5", "nan", "inf", "1e9", "١٢", "soon", "Mon, 99 Jan 2026 99:99:99 GMT"])
def test_unreadable_retry_after_asks_for_nothing(text):
    assert retry_after({"retry-after": text}) == 0


# ---- turns ---------------------------------------------------------------------------------------


def test_a_gate_bounds_concurrency_and_rate():
    async def run():
        gate, now, most, starts = Gate(3, per_minute=60 * 20), 0, 0, []

        async def call():
            nonlocal now, most
            async with gate.turn():
                starts.append(time.monotonic())
                now += 1
                most = max(most, now)
                await asyncio.sleep(0.14)
                now -= 1

        await asyncio.gather(*(call() for _ in range(9)))
        return most, max(starts) - min(starts)

    most, span = asyncio.run(run())
    assert most == 3 and span >= 8 * 0.05 - 0.01


def test_waiting_for_a_turn_stops_the_clocks_and_slowness_does_not():
    async def run(wait, work):
        gate = Gate(1)
        gate.hold(wait)
        async with time_limit(0.3), time_limit(0.25), gate.turn():
            await asyncio.sleep(work)

    asyncio.run(run(0.6, 0.05))
    with pytest.raises(TimeoutError):
        asyncio.run(run(0.0, 0.6))


def test_a_cancelled_wait_gives_its_place_back():
    async def run():
        gate = Gate(1)
        gate.hold(5)
        waiting = asyncio.create_task(gate.turn().__aenter__())
        await asyncio.sleep(0.01)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        gate._free_at = 0
        async with asyncio.timeout(0.5), gate.turn():
            return True

    assert asyncio.run(run())


# ---- bodies --------------------------------------------------------------------------------------


def test_TOOL_04_a_body_is_bounded_while_it_comes_also_when_it_was_compressed():
    config.WIRE_BYTES = 1_000_000
    bomb = gzip.compress(bytes(200_000_000), 9)  # 200 kB
    for headers, body in (({}, b"lorem ipsum " * 2_000_000), ({"Content-Encoding": "gzip"}, bomb)):
        with Peer((200, headers, body)) as peer:
            started = time.monotonic()
            tracemalloc.start()
            with pytest.raises(CallFailure, match="larger than 1,000,000 bytes") as caught:
                get(peer)
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        assert caught.value.kind == "too_large" and peak < 4_000_000 and time.monotonic() - started < 4


def test_compressed_replies_are_read_and_damaged_ones_are_failures():
    body = gzip.compress(json.dumps({"text": "é" * 5000}).encode())
    with Peer((200, {"Content-Encoding": "gzip"}, body)) as peer:
        assert get(peer).json()["text"] == "é" * 5000
        assert peer.asked[0].headers["accept-encoding"] == "gzip"
    for coding, sent in (("gzip", b"not gzip at all"), ("br", b"x")):
        with Peer((200, {"Content-Encoding": coding}, sent)) as peer, pytest.raises(CallFailure) as caught:
            get(peer)
        assert caught.value.kind == "encoding"


@pytest.mark.parametrize("body", ["", "<html>", "[1]", "null", b"\xff\xfe", "[" * 100_000])
def test_a_reply_that_is_no_json_object_is_a_failure(body):
    with Peer(ok(body)) as peer, pytest.raises(CallFailure) as caught:
        get(peer).json()
    assert caught.value.kind == "bad_reply"


def test_no_cookie_comes_back():
    with Peer((200, {"Set-Cookie": "id=1; Path=/"}, {})) as peer:
        get(peer, times=2)
        assert len(peer.asked) == 2 and "cookie" not in peer.asked[1].headers


# ---- keys and accounts ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (401, {"error": {"message": f"Incorrect API key provided: {SECRET}"}}),
        (402, {"error": {"message": "Insufficient Balance"}}),
        (403, f"go away {SECRET}"),
        (400, {"message": "Not enough credits", "statusCode": 400}),
        (429, {"error": {"code": "insufficient_quota", "message": "plan"}}),
    ],
)
def test_OPS_07_account_errors_are_fatal_at_once_and_name_the_variable_never_the_key(status, body, caplog):
    caplog.set_level(logging.DEBUG)
    with Peer((status, {}, body)) as peer:
        try:
            get(peer, key=Key(("A_KEY",)))
        except AccountError as error:
            told = "".join(traceback.format_exception(error, chain=True)) + repr(vars(error))
            assert "Check the key in A_KEY" in str(error) and error.status == status
        assert peer.asked[0].headers["authorization"] == f"Bearer {SECRET}" and len(peer.asked) == 1
    assert SECRET not in told + caplog.text


def test_OPS_07_a_key_is_blacked_out_of_replies_and_failures(capfd):
    with Peer(ok({"echo": SECRET}), (404, {}, {"message": f"no {SECRET}"})) as peer:
        assert get(peer, key=Key(("A_KEY",))).json() == {"echo": "[key]"}
        with pytest.raises(CallFailure) as caught:
            get(peer, key=Key(("A_KEY",)))
    assert SECRET not in str(caught.value) + caught.value.body + "".join(capfd.readouterr())


def test_ordinary_quota_words_of_a_web_page_or_a_rate_limit_are_not_fatal():
    with Peer((403, {}, "insufficient credits")) as peer, pytest.raises(CallFailure, match="403"):
        get(peer, account=frozenset())
    with Peer((429, {}, {"error": {"message": "check quota", "status": "RESOURCE_EXHAUSTED"}}), ok({})) as peer:
        assert get(peer).status == 200


def test_a_key_is_read_when_used_from_the_first_variable_set(monkeypatch):
    key = Key(("NO_KEY", "A_KEY"), "X-API-KEY", "")
    with Peer(ok({})) as peer:
        get(peer, key=key)
        monkeypatch.setenv("NO_KEY", " first \n")
        get(peer, key=key)
        assert [asked.headers["x-api-key"] for asked in peer.asked] == [SECRET, "first"]


def test_missing_and_malformed_keys_stop_before_anything_is_sent(monkeypatch):
    monkeypatch.setenv("BAD_KEY", "sk-päss word")
    with Peer(ok({})) as peer:
        with pytest.raises(AccountError, match="set the environment variable NO_KEY or OTHER"):
            get(peer, key=Key(("NO_KEY", "OTHER")))
        with pytest.raises(AccountError, match="BAD_KEY") as caught:
            get(peer, key=Key(("BAD_KEY",)))
        assert "päss" not in str(caught.value) and not peer.asked
        assert "authorization" not in get(peer, key=Key(("NO_KEY",), optional=True)).headers
        assert "authorization" not in peer.asked[0].headers


def test_TOOL_09_proxies_are_honoured_outside_and_ignored_for_this_machine(monkeypatch):
    for name in ("HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
        monkeypatch.setenv(name.lower(), "http://127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    with Peer(ok({})) as peer:
        assert get(peer, trust_env=False).status == 200
        with pytest.raises(CallFailure):
            get(peer, tries=1)
        assert len(peer.asked) == 1


# ---- the ledger ----------------------------------------------------------------------------------


def test_the_ledger_counts_tokens_latencies_and_cost():
    rows = {"search": LEDGER.row("search", "s.org"), "judge": LEDGER.row("judge", "j.org")}
    rows["search"].calls, rows["search"].failures = 1000, 200
    rows["judge"].seconds = [float(n) for n in range(1, 201)]
    rows["judge"].count_tokens(3_000_000, 500_000)
    config.PRICES = {"search s.org": (0.001, 0, 0), "judge j.org": (0, 0.5, 2.0)}
    judge, search = LEDGER.summary()
    assert (search["cost"], judge["cost"]) == (pytest.approx(0.8), pytest.approx(2.5))
    assert (judge["p50"], judge["p99"], search["p50"]) == (100, 198, None)
    config.GPU_HOUR_PRICE = 3.0
    assert cost_rows(LEDGER.summary(), 10) == [
        ("policy GPU hours", 10, 30.0),
        ("judge tokens", 3_500_000, pytest.approx(2.5)),
        ("search calls", 1000, pytest.approx(0.8)),
        ("reader calls", 0, 0),
        ("total", None, pytest.approx(33.3)),
    ]


def test_we_introduce_ourselves_with_the_contact():
    config.CONTACT = "me@e.org"
    with Peer(ok({})) as peer:
        get(peer)
        assert peer.asked[0].headers["user-agent"].startswith("tournament-grpo/1.0 (me@e.org)")
    assert wire.user_agent().endswith("httpx/0.28.1")
