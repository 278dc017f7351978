"""A step of the flow with mocked engines and models, for `bench.py flow` and `bench.py scale`."""
