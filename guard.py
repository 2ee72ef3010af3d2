"""The fetch guard: which addresses a policy may have fetched, and where exactly to connect for them.

An address passes when it is plain http or https at a usual port and every address its name resolves to is
public. Whoever connects then dials the address that was checked, so a name that resolves differently the second
time leads nowhere else; redirects are checked hop by hop by whoever follows them.
"""

import asyncio
import ipaddress
import re
import socket
from dataclasses import dataclass

import httpx

import config
from protocol import URL_CHARACTERS, normalize_url
from wire import CallFailure

# Names that mean a machine or a network of one's own, whatever a resolver makes of them.
_OWN_NAMES = ("localhost", "local", "internal", "intranet", "lan", "home", "corp", "private", "arpa", "onion")
_OWN_ADDRESSES = frozenset({ipaddress.ip_address("168.63.129.16")})  # Azure's platform service, in public space
_NAT64 = ipaddress.ip_network("64:ff9b::/96")


@dataclass(frozen=True)
class Target:
    """An address that passed: url (ASCII host), its host, and the checked numeric address to dial."""

    url: httpx.URL
    host: str
    address: str

    def pinned(self):
        """(url, headers, extensions) of a request that dials the checked address under the host's own name."""
        name = self.url.netloc.decode("ascii")
        return self.url.copy_with(host=self.address, fragment=None), {"Host": name}, {"sni_hostname": self.host}


async def check(url):
    """The Target of an address from the policy, from a page, or from a redirect.

    Raises CallFailure: "bad_url" (not an address), "blocked" (not allowed), "dns" (the name does not resolve).
    """
    parsed, host = parse(url)
    if (number := as_address(host)) is not None:
        addresses = [number]
    elif "." not in host or host.rpartition(".")[2] in _OWN_NAMES:
        raise CallFailure("blocked", f"{host} is not a public name")
    else:
        addresses = await resolve(host, parsed.port or (443 if parsed.scheme == "https" else 80))
    for address in addresses:
        if not is_public(address) and not (config.FETCH_ALLOW_LOOPBACK and address.is_loopback):
            raise CallFailure("blocked", f"{host} does not lead to a public address")
    # IPv4 first: rented machines often have no IPv6 route
    return Target(parsed, host, str(min(addresses, key=lambda address: address.version)))


def parse(url):
    """(httpx.URL, host in lower-case ASCII without a final dot) of an address that is well formed and allowed."""
    try:
        url = normalize_url(url)
        if len(url) > URL_CHARACTERS:
            raise CallFailure("bad_url", f"the address is longer than {URL_CHARACTERS} characters")
        authority = re.match(r"[^:]*://([^/?#]*)", url)[1]
        if re.search(r"[\s\\%@\x00-\x20\x7f]", authority):  # parsers disagree on the host of such an address
            raise CallFailure("bad_url", "the address holds a user name or odd characters before its path")
        parsed = httpx.URL(url)
        host = parsed.raw_host.decode("ascii").lower().removesuffix(".")
        parsed = parsed.copy_with(host=host)
    except (ValueError, httpx.InvalidURL):  # UnicodeError is a ValueError
        raise CallFailure("bad_url", "not a web address; give one like https://example.org/page") from None
    if parsed.scheme not in ("http", "https"):
        raise CallFailure("blocked", f"only http and https addresses can be opened, not {parsed.scheme[:20]}")
    if not host or host.startswith(".") or host.endswith(".") or ".." in host:
        raise CallFailure("bad_url", "the address has no proper host")
    if parsed.port is not None and parsed.port not in config.FETCH_PORTS:
        raise CallFailure("blocked", f"port {parsed.port} cannot be opened")
    return parsed, host


def as_address(host):
    """The IP address a host spells, None when it is a name. Raises CallFailure for any but the usual spelling.

    C libraries read 2130706433, 0x7f.1 and 0177.0.0.1 as 127.0.0.1; a public name never ends in a number.
    """
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        if re.fullmatch(r"\d+|0x[0-9a-f]*", host.rpartition(".")[2]) or ":" in host:
            raise CallFailure("blocked", "an address in numbers must be spelt in the usual way") from None
        return None


async def resolve(host, port):
    """Every IP address of a name, through the system's resolver. Raises CallFailure("dns")."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise CallFailure("dns", f"{host} does not resolve") from None
    return [ipaddress.ip_address(entry[4][0].partition("%")[0]) for entry in found]


def is_public(address):
    """True for an address of the public internet; one that wraps an IPv4 address must wrap a public one."""
    if address.version == 6:
        last = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if address.ipv4_mapped is not None or address in _NAT64:
            return is_public(last)
        isatap = (int(address) >> 32) & 0xFCFFFFFF == 0x5EFE
        wrapped = [address.sixtofour, *(address.teredo or ()), last if isatap else None]
        if not all(is_public(inner) for inner in wrapped if inner is not None):
            return False
    return (address.is_global and not address.is_multicast and not address.is_reserved
            and not address.is_unspecified and address not in _OWN_ADDRESSES)  # fmt: skip
