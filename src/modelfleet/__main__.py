"""`python -m modelfleet`: the same as the command `modelfleet`."""

from modelfleet.cli import main

if __name__ == "__main__":
    main()
