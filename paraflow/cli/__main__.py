"""`python -m paraflow.cli`."""

from paraflow.cli import main

main()
