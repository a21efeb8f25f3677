"""PyTorch and ONNX Runtime on GPUs."""
