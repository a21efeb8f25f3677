"""Processes that run programs on request, bound to cores."""
