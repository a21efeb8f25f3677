"""Max, average and sum pooling."""
