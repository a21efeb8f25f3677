"""How minibatches are made: order and shards of samples, random changes, and worker processes."""
