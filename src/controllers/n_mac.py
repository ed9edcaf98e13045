"""The name that PyMARL2's users type."""

from __future__ import annotations

from omagd.controllers.basic_mac import BasicMAC


class NMAC(BasicMAC):
    """`BasicMAC`: both keep agents apart as [B, n, ...], the shape in which the two once differed."""
