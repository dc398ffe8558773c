"""The grouping of addresses into clients."""

from __future__ import annotations

import ipaddress


def client_of(address: str) -> str:
    """Return the client of an address: for IPv6 its /64 network, since one customer has all 2**64
    addresses of it.

    >>> client_of("10.0.0.7"), client_of("2001:db8::1:2"), client_of("::ffff:10.0.0.7"), client_of("fe80::1%eth0")
    ('10.0.0.7', '2001:db8::/64', '10.0.0.7', 'fe80::/64')
    """
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:  # a Unix socket, or a client that has disconnected
        return address
    if isinstance(ip, ipaddress.IPv4Address):
        return str(ip)
    return str(ip.ipv4_mapped or ipaddress.ip_network((ip, 64), strict=False))
