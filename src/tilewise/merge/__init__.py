"""Partial results into one."""
