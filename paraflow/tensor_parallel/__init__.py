"""Layers whose parameters are divided over ranks, and class scores of which each rank holds some."""
