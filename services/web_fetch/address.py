"""Which IP addresses are on the public internet, also when they are wrapped in another one."""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address

# Beyond what the standard library's registry says, or says only in newer versions.
_NOT_PUBLIC_4 = tuple(
    IPv4Network(net)
    for net in (
        "0.0.0.0/8",
        "100.64.0.0/10",
        "168.63.129.16/32",  # a cloud provider's host agent, on a public number
        "192.0.0.0/24",
        "192.88.99.0/24",
        "198.18.0.0/15",
        "224.0.0.0/3",
    )
)
_GLOBAL_6 = IPv6Network("2000::/3")
_NOT_PUBLIC_6 = tuple(IPv6Network(net) for net in ("2001::/23", "2001:db8::/32", "3fff::/20"))

# Prefixes whose last 32 bits are an IPv4 address: compatible, mapped, translated, NAT64. The operator's own NAT64
# prefix (64:ff9b:1::/48) is in no public range and therefore refused as a whole, like Teredo (in 2001::/23).
_IPV4_AT_END = tuple(IPv6Network(net) for net in ("::/96", "::ffff:0:0/96", "::ffff:0:0:0/96", "64:ff9b::/96"))
_ISATAP = 0x00005EFE


def is_public(address: str) -> bool:
    """Whether a connection to this address stays on the public internet. Anything unreadable is not public."""
    try:
        ip = ip_address(address)
    except ValueError:
        return False
    return _public_4(ip) if isinstance(ip, IPv4Address) else _public_6(ip)


def _public_4(ip: IPv4Address) -> bool:
    return ip.is_global and not any(ip in net for net in _NOT_PUBLIC_4)


def _public_6(ip: IPv6Address) -> bool:
    if ip.scope_id is not None:
        return False
    wrapped = _wrapped(ip)
    if wrapped:
        return all(_public_4(inner) for inner in wrapped)
    number = int(ip)
    # ISATAP: any prefix, interface id [02]00:5efe:<IPv4>; the tunnel leads to that IPv4 address.
    if (number >> 32) & 0xFDFFFFFF == _ISATAP and not _public_4(_low(number)):
        return False
    return ip in _GLOBAL_6 and ip.is_global and not any(ip in net for net in _NOT_PUBLIC_6)


def _wrapped(ip: IPv6Address) -> Sequence[IPv4Address]:
    """The IPv4 addresses that packets to this tunnel or translation address end up at."""
    if any(ip in net for net in _IPV4_AT_END):
        return [_low(int(ip))]
    return [ip.sixtofour] if ip.sixtofour is not None else []


def _low(number: int) -> IPv4Address:
    return IPv4Address(number & 0xFFFFFFFF)
