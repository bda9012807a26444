"""The `modules` subpackage: mha."""
