"""`python -m paraflow.compatibility` prints the table."""

from paraflow.compatibility import page

print(page(), end="")
