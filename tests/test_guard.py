"""guard.py: what may be fetched, in every spelling, and where a request really goes."""

import asyncio
import ipaddress
import socket

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import config
import guard
from wire import CallFailure


async def kind(url):
    """The address that would be dialled, or the kind of the refusal."""
    try:
        return (await guard.check(url)).address
    except CallFailure as failure:
        return failure.kind


def verdict(url):
    return asyncio.run(kind(url))


def resolves(monkeypatch, names):
    """Let names resolve as given (name -> list of addresses); any other name does not resolve."""

    async def resolve(host, port):
        if host not in names:
            raise CallFailure("dns", f"{host} does not resolve")
        return [ipaddress.ip_address(address) for address in names[host]]

    monkeypatch.setattr(guard, "resolve", resolve)


INTERNAL = ["0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12",
            "192.168.0.0/16", "192.0.2.0/24", "198.18.0.0/15", "224.0.0.0/4", "240.0.0.0/4"]  # fmt: skip
internal_v4 = st.sampled_from(INTERNAL).flatmap(
    lambda network: st.integers(0, ipaddress.ip_network(network).num_addresses - 1).map(
        lambda offset: ipaddress.ip_network(network)[offset]
    )
)


def spellings(address):
    """The ways in which C libraries, browsers or gateways let an IPv4 address be written."""
    a, b, c, d = address.packed
    n = int(address)
    wide = str(address).translate({ord(digit): 0xFF10 + int(digit) for digit in "0123456789"})
    v6 = [f"::ffff:{address}", f"::ffff:{n >> 16:x}:{n & 0xFFFF:x}", f"64:ff9b::{n >> 16:x}:{n & 0xFFFF:x}",
          f"2002:{n >> 16:x}:{n & 0xFFFF:x}::1", f"::{address}", f"2600::5efe:{n >> 16:x}:{n & 0xFFFF:x}",
          f"2600::200:5efe:{n >> 16:x}:{n & 0xFFFF:x}"]  # fmt: skip
    v4 = [str(address), f"{address}.", str(n), f"{n:#x}", f"{n:#X}", f"0{n:o}", f"{a}.{n & 0xFFFFFF}",
          f"{a}.{b}.{c << 8 | d}", f"0{a:o}.0{b:o}.0{c:o}.0{d:o}", f"{a:#x}.{b:#x}.{c:#x}.{d:#x}",
          f"{a:#x}.{b}.0{c:o}.{d}",
          f"{a:03}.{b:03}.{c:03}.{d:03}", str(address).replace(".", "。"), str(address).replace(".", "．"), wide,
          "".join(f"%{ord(character):02x}" for character in str(address)), f"{address}:80", f"user@{address}",
          f"example.org@{address}", f"example.org:80@{address}", f"{address}#@example.org", f"{address}?@example.org",
          f"{address}\\@example.org", f"example.org\\@{address}", f"{address}%00.example.org",
          f"{address} .example.org", f"\t{address}", f"{address}\n"]  # fmt: skip
    return [*v4, *(f"[{text}]" for text in v6)]


@settings(deadline=None, max_examples=50)
@given(internal_v4)
def test_no_spelling_of_an_internal_address_passes(address):
    async def passing():
        forms = ("http://{}/", "HTTPS://{}", "//{}/x", "{}")
        urls = [form.format(host) for host in spellings(address) for form in forms]
        return [url for url in urls if await kind(url) not in ("blocked", "bad_url")]

    assert asyncio.run(passing()) == []


@given(st.sampled_from(["::1", "::", "fe80::1", "fc00::1", "fd00:ec2::254", "ff02::1", "2001:db8::1", "100::1"]))
def test_no_internal_ipv6_address_passes(text):
    address = ipaddress.ip_address(text)
    for host in (text, address.exploded, text.upper(), f"{text}%25eth0", f"{text}%lo"):
        assert verdict(f"http://[{host}]/") in ("blocked", "bad_url"), host


@given(st.integers(0, 2**32 - 1).map(ipaddress.IPv4Address), st.sampled_from(["", "::ffff:", "64:ff9b::"]))
def test_wrapping_changes_nothing(address, wrapper):
    """Oracle: Python's own list of special networks, asked about the address inside."""
    public = address.is_global and not address.is_multicast and not address.is_reserved
    if str(address) != "168.63.129.16":
        assert guard.is_public(ipaddress.ip_address(f"{wrapper}{address}")) == public


@given(st.text(max_size=60))
def test_any_text_is_an_address_or_a_refusal(text):
    for url in (text, f"http://{text}", f"https://e.org/{text}"):
        try:
            parsed, host = guard.parse(url)
        except CallFailure as failure:
            assert failure.kind in ("bad_url", "blocked")
        else:
            assert host.isascii() and parsed.raw_host.decode() == host and "@" not in host


@pytest.mark.parametrize(
    ("url", "refusal"),
    [
        ("ftp://8.8.8.8/", "blocked"),
        ("file:///etc/passwd", "bad_url"),
        ("gopher://8.8.8.8/", "blocked"),
        ("http://8.8.8.8:8000/", "blocked"),
        ("http://8.8.8.8:22/", "blocked"),
        ("http://localhost/", "blocked"),
        ("http://LOCALHOST./", "blocked"),
        ("http://a.localhost/", "blocked"),
        ("http://metadata.google.internal/", "blocked"),
        ("http://printer.lan/", "blocked"),
        ("http://intranet/", "blocked"),
        ("http://168.63.129.16/", "blocked"),
        ("http://100.100.100.200/latest/meta-data", "blocked"),
        ("http://8.8.8.8../", "bad_url"),
        ("http://.e.org/", "bad_url"),
        ("http://a..org/", "bad_url"),
        ("http://8.8.8.8:80:80/", "bad_url"),
        ("http://[::1/", "bad_url"),
        ("http://e.org:99999/", "blocked"),
        ("https://e.org/" + "a" * 3000, "bad_url"),
        ("", "bad_url"),
    ],
)
def test_refusals(url, refusal):
    assert verdict(url) == refusal


def test_public_addresses_pass(monkeypatch):
    resolves(monkeypatch, {"e.org": ["2606:4700::1111", "93.184.215.14"], "xn--mnchen-3ya.de": ["2606:4700::1111"]})
    assert verdict("http://8.8.8.8") == verdict("https://8.8.8.8./x") == "8.8.8.8"
    assert verdict("e.org/a b?q=ü#frag") == "93.184.215.14"  # IPv4 first
    assert verdict("https://München.de:443/") == "2606:4700::1111"
    assert verdict("http://[2606:4700::1111]:80/") == "2606:4700::1111"


def test_one_internal_address_among_many_is_enough_to_refuse(monkeypatch):
    resolves(monkeypatch, {"e.org": ["93.184.215.14", "10.0.0.7"], "r.org": ["::ffff:127.0.0.1"]})
    assert verdict("http://e.org") == verdict("http://r.org") == "blocked"
    assert verdict("http://unknown.org") == "dns"


def test_loopback_passes_only_by_the_constant(monkeypatch):
    resolves(monkeypatch, {"e.org": ["127.0.0.1"], "i.org": ["10.0.0.1"]})
    assert verdict("http://e.org") == "blocked"
    config.FETCH_ALLOW_LOOPBACK = True
    assert verdict("http://e.org") == "127.0.0.1" and verdict("http://i.org") == "blocked"
    config.FETCH_PORTS = (80, 443, 8100)
    assert verdict("http://e.org:8100/") == "127.0.0.1"


def test_a_request_is_pinned_to_the_checked_address_under_its_own_name(monkeypatch):
    resolves(monkeypatch, {"e.org": ["93.184.215.14"]})
    url, headers, extensions = asyncio.run(guard.check("https://E.org/a?b=1#c")).pinned()
    assert url == httpx.URL("https://93.184.215.14/a?b=1")
    assert (headers, extensions) == ({"Host": "e.org"}, {"sni_hostname": "e.org"})


def test_names_are_resolved_by_the_system_and_failures_are_said(monkeypatch):
    async def run(host):
        return await guard.resolve(host, 80)

    assert ipaddress.ip_address("127.0.0.1") in asyncio.run(run("localhost"))
    for broken in ("no-such-name.invalid", "a" * 64 + ".org"):
        with pytest.raises(CallFailure) as caught:
            asyncio.run(run(broken))
        assert caught.value.kind == "dns"
    found = [(socket.AF_INET6, 1, 6, "", ("fe80::1%eth0", 80, 0, 2))]

    async def scoped():
        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", lambda *_, **__: asyncio.sleep(0, found))
        return await guard.resolve("e.org", 80)

    assert asyncio.run(scoped()) == [ipaddress.ip_address("fe80::1")]
