"""python -m hybrid_rlhf: the same as hybrid-rlhf, where that is not on the path."""

from hybrid_rlhf.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
