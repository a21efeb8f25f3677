"""Experiments of many cases: how long networks take, and what a change of a network brings."""
