"""IP addresses and TCP ports: which addresses are public, which ports are free."""

from __future__ import annotations

import ipaddress
import random
import socket
from pathlib import Path

_NAT64 = ipaddress.ip_network("64:ff9b::/96")


def is_public(address: str) -> bool:
    """Return whether an IP address, and any IPv4 address embedded in it, is public."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        embedded = ip.ipv4_mapped or ip.sixtofour or (ip.teredo or (None, None))[1]
        if ip in _NAT64:
            embedded = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        if embedded is not None:
            return is_public(str(embedded))
    return ip.is_global and not ip.is_multicast


def is_public_literal(host: str) -> bool:
    """Return whether a host is a public address, without resolving a name."""
    try:
        return is_public(host)
    except ValueError:
        return False


def is_known_private(host: str) -> bool:
    """Return whether a host is known to be private without resolving its name."""
    try:
        return not is_public(host)
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def free_port() -> int:
    """Return a TCP port that is free at the moment.

    It is below the range from which the system takes the ports of outgoing connections, so that none of them can
    occupy it before it is used.
    """
    first_outgoing = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    candidates = random.SystemRandom().sample(range(10000, first_outgoing), 100) if first_outgoing >= 11000 else []
    for port in [*candidates, 0]:  # 0: any that the system finds
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise OSError("no TCP port is free on this machine")
