"""Pictures of the explanations, one module each: `python -m docs.pictures` draws all of them."""
