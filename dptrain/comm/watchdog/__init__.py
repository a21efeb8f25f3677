"""The watchdog process of a node, and the modules that it loads without the package."""
