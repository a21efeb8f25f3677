"""What is recorded of a run, and the machine it ran on."""
