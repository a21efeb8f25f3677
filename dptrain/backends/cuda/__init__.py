"""Own kernels on NVIDIA GPUs."""
