"""The border with Transformers: nothing outside this folder touches its internals."""
