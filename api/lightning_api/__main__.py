"""`python -m lightning_api` is `lightning-sql`."""

from lightning_api.cli import main

if __name__ == "__main__":
    main()
