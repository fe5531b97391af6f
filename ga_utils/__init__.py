"""Gather and Aggregate heads in any language model: load, mask, materialise, measure."""
