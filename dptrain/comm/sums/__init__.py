"""Sums of gradients over the ranks: each module is one method."""
