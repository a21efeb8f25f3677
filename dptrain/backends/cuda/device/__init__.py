"""The GPU: memory, streams, graphs, compilation and launches."""
