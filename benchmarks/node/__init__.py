"""Programs in processes that are bound to the cores of this machine."""
