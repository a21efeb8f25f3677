"""Replicas that prove their health: digests of their state, see `dptrain.backends.digests`."""
