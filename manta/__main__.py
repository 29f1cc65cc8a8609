"""`python -m manta` is the same as the `manta` command."""

from manta.deploy.cli import main

if __name__ == "__main__":
    main()
