"""`paraflow doctor`: what a run would find on these machines, measured by the ranks themselves, and what is wrong."""
