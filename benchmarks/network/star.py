"""Hosts around a switch."""
from __future__ import annotations

from .network import START_UP, Network
from .speed import End, Link


class Star(Network):
    """Every host has a cable to one switch.

    Args:
        hosts: How many, ``node0`` and so on.
        rate: Of each cable, in bit/s in each direction.
        switch: Whether there is one more host, ``switch``, the last one,
            that no cable slows down: what runs there is in the switch.
    """

    def __init__(self, hosts: int, rate: float, switch: bool = False) -> None:
        self._cables = hosts
        self.kind = f'star of {hosts} hosts' + (
            ' and one in the switch' if switch else '')
        super().__init__([*(f'node{index}' for index in range(hosts)),
                          *(['switch'] if switch else [])], rate)

    def _build(self) -> None:
        self._build_bridge()
        for host in self.hosts[:self._cables]:
            self._shape(host, [START_UP])
        self._shape(None, [f'port{index}' for index in range(self._cables)])
        bridge = End(None, self._FABRIC_ADDRESS)
        self.links = [Link(host, End(host, self.address(index)), bridge)
                      for index, host
                      in enumerate(self.hosts[:self._cables])]
