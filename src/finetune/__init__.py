"""Fine-tune a classifier of sentence pairs with `miniddp`, on one rank or on many."""
