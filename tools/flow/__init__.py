"""A step of the flow with mocked engines and models, for `bench_flow.py` and `bench_scale.py`."""
