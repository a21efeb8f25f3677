"""Evaluation and prediction by a trained network, and the quality of its predictions."""
