"""dptrain against PyTorch, and against the limits of the machine, on NVIDIA GPUs."""
