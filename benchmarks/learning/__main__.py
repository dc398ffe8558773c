"""Learning: short for ``python -m benchmarks.learning.trials``."""

from benchmarks.learning.trials import main

if __name__ == "__main__":
    main()
