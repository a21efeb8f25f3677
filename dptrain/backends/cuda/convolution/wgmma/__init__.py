"""Convolutions by TMA and wgmma on Hopper, for many channels."""
