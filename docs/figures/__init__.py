"""Figures of the explanations, one module each: `python -m docs.figures` draws all of them."""
