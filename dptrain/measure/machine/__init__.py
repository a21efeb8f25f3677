"""The machine and its state: processor, energy, counters, load and software."""
