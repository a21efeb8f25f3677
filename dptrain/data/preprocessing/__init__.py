"""How raw samples become inputs of a network, and labels become classes."""
