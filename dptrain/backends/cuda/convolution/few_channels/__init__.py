"""Convolutions of inputs with few channels, such as images."""
