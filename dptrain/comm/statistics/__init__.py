"""Sums of batch statistics over the ranks: each module is one method."""
