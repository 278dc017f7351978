"""What `bench_flow.py` starts on each rank: `flow/ranks.py`."""

from flow.ranks import main

if __name__ == "__main__":
    main()
