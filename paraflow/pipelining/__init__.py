"""Pipelines: a model cut in stages, a step replayed stage by stage, and the order in which ranks run them."""
